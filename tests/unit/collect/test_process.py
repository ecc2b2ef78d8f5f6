"""The process source finds a member's life, says what it was started with, and never guesses."""

import asyncio
import os
import sys

import pytest

from tandem.collect.incarnations import Incarnations
from tandem.collect.process import SLOW_EVERY_S, ProcessSource
from tandem.errors import WorldError
from tandem.processes import life_of
from tandem.records import Member, Role
from tandem.records import vocabulary as v

LISTENING = """
import socket, subprocess, sys
listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen()
work = "import time\\nwhile time.process_time() < 0.1: pass\\nprint(flush=True); input()"
pipe = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", work], stdin=pipe, stdout=pipe)
child.stdout.readline()
print(listener.getsockname()[1], child.pid, flush=True)
sys.stdin.read()
"""
ENV = {"SGLANG_SHOWN": "1", "SECRET_TOKEN": "s3cret", "ALSO_SHOWN": "2"}


class Started:
    """A real process that listens, with one child."""

    def __init__(self, process, port, child_pid):
        self.process, self.port, self.child_pid = process, port, child_pid
        self.member = Member(
            name="decode-0", role=Role.DECODE, url=f"http://127.0.0.1:{port}", engine="sglang"
        )

    async def end(self):
        if self.process.returncode is None:
            self.process.stdin.close()
            await asyncio.wait_for(self.process.wait(), 10.0)


class Supervisor:
    """Says what the test lets it say."""

    name = "fake"

    def __init__(self, answer):
        self.answer = answer

    async def inspect(self, member):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
async def started():
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LISTENING, "--flag", stdin=pipe, stdout=pipe, env=os.environ | ENV
    )
    line = await asyncio.wait_for(process.stdout.readline(), 10.0)
    made = Started(process, *map(int, line.split()))
    yield made
    await made.end()


class Now:
    at = 1000.0

    def __call__(self):
        return self.at


async def look(source):
    harvest = await source.collect()
    return {(seen.name, seen.label): seen for seen in harvest.observations}


class TestFound:
    """A process that is there."""

    async def test_who_listens_on_its_port_is_the_member(self, started):
        """Its life has the id every part of Tandem gives it, and the other sources learn it."""
        lives = Incarnations()
        seen = await look(ProcessSource(started.member, None, lives))
        life = life_of(started.process.pid)

        assert (seen[v.ALIVE, ""].value, seen[v.PID, ""].value) == (True, started.process.pid)
        assert seen[v.STARTED_AT, ""].incarnation == life.id
        assert (lives.of("decode-0"), lives.pid("decode-0")) == (life.id, life.pid)
        assert seen[v.PROCESS_STATE, ""].value == "S"

    async def test_its_command_line_is_told_and_only_allowed_variables(self, started):
        """Variables of engines and those the operator allowed are told, no others."""
        source = ProcessSource(started.member, None, Incarnations(), variables=("ALSO_SHOWN",))
        seen = await look(source)
        shown = {label: one.value for (name, label), one in seen.items() if name == v.ENVIRONMENT}

        assert seen[v.COMMAND_LINE, ""].value[-1] == "--flag"
        assert {"SGLANG_SHOWN": "1", "ALSO_SHOWN": "2"}.items() <= shown.items()
        assert "SECRET_TOKEN" not in shown

    async def test_the_work_of_its_children_is_its_own(self, started):
        """CPU time and memory are those of the whole family."""
        seen = await look(ProcessSource(started.member, None, Incarnations()))
        alone = life_of(started.child_pid)

        assert alone is not None
        assert seen[v.CPU_SECONDS_TOTAL, ""].value > 0.05
        assert seen[v.RSS_BYTES, ""].value > 8e6

    async def test_what_never_changes_is_told_seldom(self, started):
        """Command line and environment come at first, then now and then; liveness each time."""
        now = Now()
        source = ProcessSource(started.member, None, Incarnations(), now=now)
        told = []
        for step_s in (0.0, 1.0, SLOW_EVERY_S):
            now.at += step_s
            seen = await look(source)
            told.append(((v.ALIVE, "") in seen, (v.COMMAND_LINE, "") in seen))

        assert told == [(True, True), (True, False), (True, True)]

    async def test_who_was_started_by_hand_is_the_member(self, started):
        """A supervisor that knows nobody does not know who started the one that listens."""
        lives = Incarnations()
        seen = await look(ProcessSource(started.member, Supervisor(None), lives))

        assert (seen[v.ALIVE, ""].value, seen[v.PID, ""].value) == (True, started.process.pid)
        assert lives.pid("decode-0") == started.process.pid

    async def test_a_supervisor_is_believed(self, started):
        """Where somebody supervises the member, its word counts."""
        life = life_of(started.process.pid)
        seen = await look(ProcessSource(started.member, Supervisor(life), Incarnations()))

        assert seen[v.STARTED_AT, ""].value == life.started_at


class TestNotFound:
    """A process that is not there, or that nobody can see."""

    async def test_a_member_that_ended_is_not_alive(self, started):
        """Its end is seen, and nobody names its life any more."""
        lives = Incarnations()
        source = ProcessSource(started.member, None, lives)
        await look(source)
        await started.end()
        seen = await look(source)

        assert {key: one.value for key, one in seen.items()} == {(v.ALIVE, ""): False}
        assert lives.of("decode-0") is None

    async def test_a_supervisor_that_knows_none_says_not_alive(self, started):
        """No life is not the same as not being able to look."""
        await started.end()
        seen = await look(ProcessSource(started.member, Supervisor(None), Incarnations()))

        assert seen[v.ALIVE, ""].value is False

    async def test_a_supervisor_that_cannot_look_is_a_reason(self, started):
        """The member is not called dead."""
        refused = Supervisor(WorldError("No bus.", next_step="Start it."))
        seen = await look(ProcessSource(started.member, refused, Incarnations()))

        assert "No bus" in seen[v.ALIVE, ""].missing

    async def test_another_host_is_a_reason(self):
        """Processes elsewhere cannot be seen from here."""
        far = Member(name="p", role=Role.PREFILL, url="http://192.0.2.1:30000", engine="sglang")
        seen = await look(ProcessSource(far, None, Incarnations()))

        assert "another host" in seen[v.ALIVE, ""].missing

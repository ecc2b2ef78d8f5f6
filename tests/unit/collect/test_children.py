"""The processes beside the one that leads a member: what each is, how it does, how it ended."""

import asyncio
import os
import signal
import sys
import time

import pytest

from children import until
from tandem.collect.children import SHOWN_MAX, USE_EVERY_S, ChildrenSource
from tandem.collect.families import Families, rank_of, role_of, stat_of
from tandem.collect.incarnations import Incarnations
from tandem.collect.process import ProcessSource
from tandem.processes import life_of
from tandem.records import Member, Role
from tandem.records import vocabulary as v

MEMBER = Member(name="decode-0", role=Role.DECODE, url="http://127.0.0.1:9", engine="sglang")
LEADER = """
import ctypes, os, signal, sys
def child(name):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.write(1, f"{name} {os.getpid()}\\n".encode())
        while True:
            signal.pause()
    return pid
pids = [child(name) for name in sys.argv[1:]]
for line in sys.stdin:
    os.waitpid(int(line), 0)
    os.write(1, b"reaped\\n")
for pid in pids:
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
"""


class Family:
    """A leader with children that are named like ranks, and the source that looks at them."""

    def __init__(self, process, pids):
        self.process, self.pids = process, pids
        self.lives, self.at = Incarnations(), 1000.0
        self.lives.saw(MEMBER.name, life_of(process.pid))
        # The table of children is read anew at every look.
        ticks = iter(range(0, 10**6, 10))
        self.families = Families(lambda: next(ticks))
        self.source = ChildrenSource(MEMBER, self.lives, self.families, now=lambda: self.at)

    async def look(self, *, later_s=USE_EVERY_S):
        self.at += later_s
        harvest = await self.source.collect()
        return {(one.name, one.label): one for one in harvest.observations}

    async def reap(self, pid):
        self.process.stdin.write(f"{pid}\n".encode())
        await asyncio.wait_for(self.process.stdout.readline(), 10.0)


@pytest.fixture
async def family():
    pipe = asyncio.subprocess.PIPE
    names = ("scheduler_TP0", "scheduler_TP1", "detokenizer")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEADER, *names, stdin=pipe, stdout=pipe
    )
    pids = {}
    for _ in names:
        name, pid = (await asyncio.wait_for(process.stdout.readline(), 10.0)).split()
        pids[name.decode()] = int(pid)
    made = Family(process, pids)
    yield made
    for pid in pids.values():
        if (stat := stat_of(pid)) is not None and stat.parent == process.pid:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
    process.kill()
    await process.wait()


class TestSeen:
    """Children that live."""

    async def test_each_has_its_role_and_what_it_uses(self, family):
        """Roles by name, and state, threads, memory, CPU time and start of every child."""
        seen = await family.look()
        roles = {seen[v.CHILD_ROLE, str(pid)].value: pid for pid in family.pids.values()}
        label = str(family.pids["scheduler_TP1"])

        assert roles == family.pids
        assert seen[v.CHILDREN, ""].value == 3
        assert seen[v.CHILD_STATE, label].value == "S"
        assert seen[v.CHILD_THREADS, label].value == 1
        assert seen[v.CHILD_RSS_BYTES, label].value > 1e6
        assert seen[v.CHILD_CPU_SECONDS_TOTAL, label].value >= 0
        assert abs(seen[v.CHILD_STARTED_AT, label].value - time.time()) < 60.0
        assert seen[v.THREADS, ""].value == 4
        assert seen[v.THREADS_BLOCKED, ""].value == 0
        assert seen[v.CHILD_STATE, label].incarnation == life_of(family.process.pid).id

    async def test_states_are_told_at_every_look_and_the_rest_seldom(self, family):
        """What a child uses changes slowly; that it was stopped is told at once."""
        await family.look()
        pid = family.pids["scheduler_TP1"]
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: stat_of(pid).state == "T")
        seen = await family.look(later_s=1.0)

        assert seen[v.CHILD_STATE, str(pid)].value == "T"
        assert (v.CHILD_RSS_BYTES, str(pid)) not in seen

    async def test_of_very_many_the_number_is_told(self, family, monkeypatch):
        """Beyond the bound children are counted and not shown."""
        monkeypatch.setattr("tandem.collect.children.SHOWN_MAX", 1)
        seen = await family.look()

        assert SHOWN_MAX > 1
        assert seen[v.CHILDREN, ""].value == 3
        assert len([name for name, _ in seen if name == v.CHILD_STATE]) == 1

    async def test_a_member_without_a_process_here_has_none(self):
        """Nothing is claimed of what cannot be seen."""
        source = ChildrenSource(MEMBER, Incarnations(), Families())

        assert (await source.collect()).observations == ()


class TestEnds:
    """Children that end."""

    async def test_a_zombie_shows_how_it_ended(self, family):
        """Until its parent takes it, its exit code is there to read: a status, or a signal."""
        await family.look()
        ended = {"scheduler_TP0": signal.SIGTERM, "scheduler_TP1": signal.SIGKILL}
        for name, how in ended.items():
            pid = family.pids[name]
            os.kill(pid, how)
            await until(lambda pid=pid: stat_of(pid).state == "Z")
        seen = await family.look(later_s=1.0)
        codes = {name: seen[v.CHILD_EXIT_CODE, str(family.pids[name])].value for name in ended}

        assert codes == {"scheduler_TP0": 7, "scheduler_TP1": -9}
        assert seen[v.CHILD_STATE, str(family.pids["scheduler_TP1"])].value == "Z"

    async def test_one_that_was_taken_is_gone_and_its_code_unknown(self, family):
        """That a child is no more is told once, with its role and why nobody knows how it ended."""
        await family.look()
        pid = family.pids["detokenizer"]
        os.kill(pid, signal.SIGKILL)
        await family.reap(pid)
        seen = await family.look()
        after = await family.look()

        assert seen[v.CHILD_STATE, str(pid)].value == "gone"
        assert "detokenizer" in seen[v.CHILD_EXIT_CODE, str(pid)].missing
        assert (seen[v.CHILDREN, ""].value, (v.CHILD_STATE, str(pid)) in after) == (2, False)

    async def test_a_leader_that_nobody_reaped_shows_how_it_ended(self, family):
        """A member whose process is a zombie is not alive, and its exit code is told."""
        pid = family.pids["scheduler_TP0"]
        life = life_of(pid)
        source = ProcessSource(MEMBER, Supervised(life), Incarnations())
        await source.collect()
        os.kill(pid, signal.SIGTERM)
        await until(lambda: stat_of(pid).state == "Z")
        source._supervisor.life = None
        harvest = await source.collect()
        seen = {one.name: (one.value, one.incarnation) for one in harvest.observations}

        assert seen == {
            v.ALIVE: (False, None),
            v.PROCESS_STATE: ("Z", life.id),
            v.EXIT_CODE: (7, life.id),
        }


class Supervised:
    """A supervisor that says what the test lets it say."""

    name = "fake"

    def __init__(self, life):
        self.life = life

    async def inspect(self, member):
        return self.life


class TestRoles:
    """What a title says."""

    @pytest.mark.parametrize(
        ("argv", "role", "rank"),
        [
            (["sglang::scheduler_TP3"], "scheduler_TP3", "TP3"),
            (["sglang::scheduler_DP1_TP0"], "scheduler_DP1_TP0", "DP1_TP0"),
            (["sglang::detokenizer"], "detokenizer", None),
            (["VLLM::Worker_TP1"], "Worker_TP1", "TP1"),
            (["bash", "--api-key", "s3cret"], "bash", None),
        ],
    )
    async def test_a_process_is_what_its_title_says_and_never_its_arguments(self, argv, role, rank):
        """Engines rewrite their titles; of anything else only the program is named."""
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", f"exec -a '{argv[0]}' sleep 60 {' '.join(argv[1:])} 2>/dev/null"
            if len(argv) == 1 else "read x", *argv[1:], stdin=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            if len(argv) == 1:
                await until(lambda: role_of(process.pid, "x") not in ("bash", "x"))
            said = role_of(process.pid, "x")
        finally:
            process.kill()
            await process.wait()

        assert (said, rank_of(said)) == (role, rank)

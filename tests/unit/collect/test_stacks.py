"""Stacks say where each thread stands; what cannot be had is a reason with its remedy."""

import asyncio
import os
import signal
import stat
import sys

import psutil
import pytest

from tandem.collect.incarnations import Incarnations
from tandem.collect.stacks import NO_PY_SPY, StackTaker, py_spy
from tandem.records import Incarnation, Member, Role
from tandem.records import vocabulary as v

MEMBER = Member(name="decode-0", role=Role.DECODE, url="http://127.0.0.1:1", engine="sglang")

WAITING = """
import sys, threading
def stand_here(): sys.stdin.read()
thread = threading.Thread(target=stand_here, name="transfer-worker")
thread.start()
print("ready", flush=True)
thread.join()
"""


@pytest.fixture
async def child():
    """A Python process with a thread named `transfer-worker` that waits."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAITING, stdin=pipe, stdout=pipe
    )
    await asyncio.wait_for(process.stdout.readline(), 10.0)
    yield process
    os.kill(process.pid, signal.SIGCONT)
    process.kill()
    await process.wait()


def lives_of(pid):
    lives = Incarnations()
    lives.saw("decode-0", Incarnation(id=f"{pid}:x", started_at=1.0, pid=pid))
    return lives


def script(tmp_path, body):
    """A stand-in for py-spy."""
    path = tmp_path / "py-spy"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.needs("ptrace")
class TestRealDump:
    """py-spy on a real process."""

    async def test_every_thread_is_told_innermost_first(self, child):
        """The waiting thread stands where it waits, and it is idle."""
        harvest = await StackTaker(lives_of(child.pid)).take([MEMBER])
        stacks = {one.label: one for one in harvest.observations if one.name == v.STACK}
        states = {one.label: one.value for one in harvest.observations if one.name == v.STACK_STATE}
        (label,) = [one for one in stacks if one.endswith("transfer-worker")]

        assert stacks[label].value.startswith("stand_here (")
        assert (states[label], stacks[label].incarnation) == ("idle", f"{child.pid}:x")
        assert len(stacks) == 2

    async def test_a_stopped_process_is_dumped_and_left_stopped(self, child):
        """What somebody else stopped is looked at without waiting for it, and not continued."""
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        harvest = await StackTaker(lives_of(child.pid)).take([MEMBER])

        assert any(one.value for one in harvest.observations if one.name == v.STACK)
        assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


class TestReasons:
    """When there is no dump."""

    async def test_without_py_spy_the_remedy_is_told(self, child):
        """The row says what to install."""
        taker = StackTaker(lives_of(child.pid), find=lambda: None)
        (row,) = (await taker.take([MEMBER])).observations

        assert (row.name, row.missing) == (v.STACK, NO_PY_SPY)

    async def test_without_the_right_to_trace_the_remedy_is_told(self, child, tmp_path):
        """A refusal by the kernel says how to allow it."""
        refusing = script(
            tmp_path,
            "import sys; sys.exit('Error: Operation not permitted (os error 1)')",
        )
        taker = StackTaker(lives_of(child.pid), find=lambda: refusing)
        (row,) = (await taker.take([MEMBER])).observations

        assert "ptrace_scope=0" in row.missing

    async def test_a_member_without_a_process_is_a_reason(self):
        """A member on another host, or dead, has no stack to take."""
        (row,) = (await StackTaker(Incarnations()).take([MEMBER])).observations

        assert "not known" in row.missing

    async def test_a_dump_that_hangs_is_ended_and_its_target_continued(
        self, child, tmp_path, monkeypatch
    ):
        """A py-spy that is killed half way leaves no member stopped."""
        monkeypatch.setattr("tandem.collect.stacks.DUMP_S", 1.0)
        hanging = script(
            tmp_path,
            "import os, signal, sys, threading\n"
            "os.kill(int(sys.argv[-1]), signal.SIGSTOP)\n"
            "threading.Event().wait()",
        )
        taker = StackTaker(lives_of(child.pid), find=lambda: hanging)
        (row,) = (await taker.take([MEMBER])).observations

        assert "did not end within 1 s" in row.missing
        assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED

    def test_py_spy_is_found_beside_this_python(self):
        """The program that was installed with Tandem is the one that is used."""
        assert py_spy() is not None

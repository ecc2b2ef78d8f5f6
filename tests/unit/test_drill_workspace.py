"""A rehearsal's workspace ends what it started, whenever it is told to stop."""

import asyncio
import contextlib

import pytest

from tandem.drills.workspace import Workspace

CHILD = """
import pathlib, signal, sys

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # none is missed before the wait
pathlib.Path("ready").touch()
signal.sigwait({signal.SIGINT})
pathlib.Path("interrupted").write_text(sys.argv[1])
sys.exit(130)
"""
"""Stands where `python -m tandem` finds it, and waits for Ctrl-C."""


@pytest.fixture
def workspace(tmp_path):
    """Give a workspace whose `tandem` waits."""
    (tmp_path / "tandem.py").write_text(CHILD)
    return Workspace(root=tmp_path)


async def ready(workspace):
    """Wait until the child has said that it is there."""
    while not (workspace.root / "ready").exists():
        await asyncio.sleep(0.01)


class TestInterrupt:
    """Ctrl-C in the middle of a rehearsal."""

    async def test_a_command_under_way_is_ended_as_well(self, workspace):
        """A cancelled rehearsal interrupts the command it waits for, and waits for its end."""
        command = asyncio.create_task(workspace.tandem("restart", timeout_s=15.0))
        await ready(workspace)
        command.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await command

        assert (workspace.root / "interrupted").read_text() == "restart"

    async def test_the_watch_is_ended(self, workspace):
        """The loop under test ends as a person would end it."""
        await workspace.start_watch(None)
        await ready(workspace)
        await workspace.stop_watch()

        assert (workspace.root / "interrupted").read_text() == "watch"
        assert not workspace.watch_alive()

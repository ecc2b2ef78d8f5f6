"""What any supervisor must do, held against each of ours with a real process.

For: truths of the port (`ports.Supervisor`). Not for: what only one supervisor promises.
"""
# ruff: noqa: ASYNC240 - nothing else waits for the loop of a test

import asyncio
import functools
import os
import socket
from pathlib import Path

import pytest

from children import answers, end_all, member_of, until
from tandem.errors import WorldError
from tandem.ports import Supervisor
from tandem.processes import life_of
from tandem.supervisors.local import LocalSupervisor


@pytest.fixture
def make_member(tmp_path):
    return functools.partial(member_of, tmp_path)


@pytest.fixture
def supervise(tmp_path):
    """Make supervisors as separate commands would, and end what they started."""
    yield lambda: LocalSupervisor(tmp_path)
    end_all(tmp_path)


class TestAnySupervisor:
    async def test_it_implements_the_port(self, supervise):
        """It has every method of the port."""
        assert isinstance(supervise(), Supervisor)

    async def test_starting_twice_is_starting_once(self, supervise, make_member):
        """The second start returns the life that the first began."""
        supervisor, member = supervise(), make_member()

        first = await supervisor.start(member)
        second = await supervisor.start(member)

        assert first == second

    async def test_two_starts_at_once_begin_one_life(self, supervise, make_member):
        """Two commands that start one member at one moment get the same life."""
        member = make_member()

        first, second = await asyncio.gather(supervise().start(member), supervise().start(member))

        assert first == second

    async def test_a_started_member_serves_and_is_inspected(self, supervise, make_member):
        """What start returned is what inspect sees, from any supervisor object."""
        member = make_member()

        life = await supervise().start(member)
        await until(lambda: answers(member))

        assert await supervise().inspect(member) == life

    async def test_stopping_twice_is_stopping_once(self, supervise, make_member):
        """A stopped member has no life and no residue, and stopping it again is done already."""
        supervisor, member = supervise(), make_member()
        await supervisor.start(member)
        await until(lambda: answers(member))

        await supervisor.stop(member, grace_s=5.0)
        await supervisor.stop(member, grace_s=5.0)

        assert await supervisor.inspect(member) is None
        assert await supervisor.residue(member) == ()

    async def test_what_was_never_started_is_stopped(self, supervise, make_member):
        """Stopping a member that nobody started does nothing."""
        supervisor, member = supervise(), make_member()

        await supervisor.stop(member, grace_s=1.0)

        assert await supervisor.inspect(member) is None

    async def test_a_restart_is_another_life(self, supervise, make_member):
        """Every start after a stop has an incarnation of its own."""
        supervisor, member = supervise(), make_member()
        first = await supervisor.start(member)
        await supervisor.stop(member, grace_s=5.0)

        second = await supervisor.start(member)

        assert first.id != second.id

    async def test_a_crash_ends_the_life(self, supervise, make_member):
        """A member that ended by itself has no life, though nobody stopped it."""
        supervisor, member = supervise(), make_member("crash")
        life = await supervisor.start(member)
        await until(lambda: answers(member))

        await until(lambda: life_of(life.pid) is None)

        assert await supervisor.inspect(member) is None

    async def test_residue_names_the_holder_of_a_port(self, supervise, make_member):
        """A port that someone else listens on is residue, and an obstacle, with port and pid."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            residue = await supervise().residue(make_member(port=port))
            obstacles = await supervise().obstacles(make_member(port=port))

        assert residue == obstacles
        assert len(residue) == 1
        assert f"port {port}" in residue[0]
        assert f"pid {os.getpid()}" in residue[0]

    async def test_a_running_member_is_residue(self, supervise, make_member):
        """While it runs, its process and its port are both named."""
        supervisor, member = supervise(), make_member()
        life = await supervisor.start(member)
        await until(lambda: answers(member))

        process, port = await supervisor.residue(member)

        assert f"pid {life.pid}" in process
        assert f"pid {life.pid}" in port

    async def test_a_taken_port_refuses_the_start(self, supervise, make_member):
        """A start on somebody's port names the port, the pid, and what to do; nothing runs."""
        supervisor = supervise()
        with socket.create_server(("127.0.0.1", 0)) as server:
            member = make_member(port=server.getsockname()[1])
            with pytest.raises(WorldError, match=rf"held by pid {os.getpid()} \(.*Stop that"):
                await supervisor.start(member)

        assert await supervisor.inspect(member) is None

    async def test_the_log_is_where_it_says(self, supervise, make_member):
        """What the member prints is in the file that `log_path` names."""
        supervisor, member = supervise(), make_member("loud")
        await supervisor.start(member)
        await until(lambda: answers(member))

        assert "listening plain loud" in Path(supervisor.log_path(member)).read_text()

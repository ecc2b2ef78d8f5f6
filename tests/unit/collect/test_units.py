"""Units: what systemd says of a member arrives as observations, and its ends and edits as changes.

A real systemd, booted in namespaces, says what is true; a fake one what cannot be brought about.
"""

import asyncio
import contextlib
import os
import socket
from dataclasses import replace

import pytest

from booted import Booted
from tandem.cgroups import Place, Service
from tandem.collect import units as units_module
from tandem.collect.incarnations import Incarnations
from tandem.collect.units import UnitSource, files_known
from tandem.errors import WorldError
from tandem.facts import Facts
from tandem.records import Deployment, Incarnation, Member, Role
from tandem.records import vocabulary as v
from tandem.systemd import Ended, Systemd, Unit, user_bus

UNIT = Unit(
    name="d.service",
    loaded="loaded",
    active="active",
    sub="running",
    result="success",
    restarts=0,
    main_pid=41,
    started_at=1000.0,
    ended=None,
    invocation="aa",
    files=(),
    reload_needed=False,
)
UNTIL_S = 10.0


def member(unit="d.service", **more):
    url = "http://127.0.0.1:30001"
    return Member(name="d", role=Role.DECODE, url=url, engine="sglang", unit=unit, **more)


def life(pid, at=1000.0):
    return Incarnation(id=f"{pid}:7", started_at=at, pid=pid)


class FakeSystemd:
    """A systemd that says what the test lets it say."""

    def __init__(self, answer=UNIT):
        self.answer = answer
        self.asked = []
        self.ends = []

    async def unit(self, name):
        self.asked.append(name)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def follow(self, name):
        pass

    def ended(self, name):
        ends, self.ends = tuple(self.ends), []
        return ends

    async def close(self):
        pass


def source(*members, system=None, user=None, lives=None, **how):
    """A source over fakes: the system's systemd, and the user's own."""
    each = {None: system or FakeSystemd(), os.getuid(): user}
    return UnitSource(
        members or (member(),),
        lives or Incarnations(),
        ask=each.__getitem__,
        every_s=0.0,
        now=lambda: 2000.0,
        **how,
    )


async def look(looked):
    harvest = await looked.collect()
    return {(one.name, one.label): one for one in harvest.observations}, harvest.changes


class TestTold:
    """A unit that systemd knows."""

    async def test_its_state_is_told(self):
        """Name, state, result, restarts, life and start of the main process."""
        seen, changes = await look(source())

        assert {name: one.value for (name, _), one in seen.items()} == {
            v.UNIT: "d.service",
            v.UNIT_STATE: "active/running",
            v.UNIT_RESULT: "success",
            v.UNIT_RESTARTS_TOTAL: 0,
            v.UNIT_INVOCATION: "aa",
            v.UNIT_STARTED_AT: 1000.0,
            v.UNIT_RELOAD_NEEDED: False,
        }
        assert changes == ()

    async def test_its_main_process_is_the_members_life(self):
        """For the process source: of a unit that is named, and of no other."""
        looked = source()

        assert await looked.main_pid(member()) == 41
        assert await looked.main_pid(member(unit=None)) is None

    async def test_an_end_is_a_stop_of_the_life_that_ended(self):
        """With how it ended, also when the next life runs already; and it is told once."""
        systemd, lives = FakeSystemd(), Incarnations()
        lives.saw("d", life(41))
        looked = source(system=systemd, lives=lives)
        await look(looked)
        systemd.ends = [Ended(1500.0, 41, 3, "exit code 3")]
        systemd.answer = replace(UNIT, main_pid=42, restarts=1, started_at=1500.5)
        lives.saw("d", life(42))
        seen, (stop,) = await look(looked)
        _, later = await look(looked)

        assert (stop.kind, stop.at, stop.incarnation) == ("stop", 1500.0, "41:7")
        assert stop.how_known == "systemd: exit code 3"
        end = seen[v.UNIT_EXIT, ""]
        assert (end.value, end.at, end.incarnation) == ("exit code 3", 1500.0, "41:7")
        assert (seen[v.EXIT_CODE, ""].value, later) == (3, ())

    async def test_an_edited_file_is_a_change(self, tmp_path):
        """A drop-in that appears and a unit file that is written again, each with both times."""
        unit, drop_in = tmp_path / "d.service", tmp_path / "x.conf"
        unit.write_text("")
        os.utime(unit, (900.0, 900.0))
        systemd = FakeSystemd(replace(UNIT, files=("/d.service",)))
        looked = source(system=systemd, root=tmp_path)
        first, before = await look(looked)
        drop_in.write_text("")
        os.utime(drop_in, (1900.0, 1900.0))
        os.utime(unit, (1950.0, 1950.0))
        systemd.answer = replace(UNIT, files=("/d.service", "/x.conf"), reload_needed=True)
        seen, changes = await look(looked)

        assert (first[v.UNIT_FILE_WRITTEN_AT, "/d.service"].value, before) == (900.0, ())
        assert seen[v.UNIT_RELOAD_NEEDED, ""].value is True
        assert [(one.kind, one.what, one.before, one.after) for one in changes] == [
            (
                "config",
                "/d.service",
                "written 1970-01-01T00:15:00Z",
                "written 1970-01-01T00:32:30Z",
            ),
            ("config", "/x.conf", None, "written 1970-01-01T00:31:40Z"),
        ]

    async def test_a_file_edited_since_the_start_is_a_change_at_once(self, tmp_path):
        """What was written after the life began is not in force in it."""
        unit = tmp_path / "d.service"
        unit.write_text("")
        os.utime(unit, (1100.0, 1100.0))
        looked = source(system=FakeSystemd(replace(UNIT, files=("/d.service",))), root=tmp_path)
        _, (edit,) = await look(looked)

        assert (edit.kind, edit.at, edit.before) == ("config", 1100.0, None)

    async def test_an_edit_while_tandem_was_away_is_a_change(self, tmp_path):
        """The store's last word on a file is what it is compared with."""
        unit = tmp_path / "d.service"
        unit.write_text("")
        os.utime(unit, (950.0, 950.0))
        systemd = FakeSystemd(replace(UNIT, files=("/d.service",)))
        told, _ = await look(source(system=systemd, root=tmp_path))
        facts = Facts(Deployment(name="t", members=(member(),)), told.values(), now=2000.0)
        known = files_known(facts, (member(),))
        os.utime(unit, (960.0, 960.0))
        _, (edit,) = await look(source(system=systemd, root=tmp_path, known_files=known))

        assert known == {"d": {"/d.service": 950.0}}
        assert edit.at == 960.0


class TestFound:
    """Which unit a member has."""

    @pytest.fixture
    def place(self, monkeypatch):
        """Say where every process is, and who started it."""

        def say(service, forebears):
            monkeypatch.setattr(units_module, "place_of", lambda _: Place(service))
            monkeypatch.setattr(units_module, "_forebears", lambda pid: {pid, *forebears})

        return say

    async def test_the_unit_of_its_process_is_the_members(self, place):
        """The main process, or one that it started, is the member."""
        place(Service("d.service"), {41})
        lives = Incarnations()
        lives.saw("d", life(50))
        one = member(unit=None)
        looked = source(one, lives=lives)
        seen, _ = await look(looked)

        assert seen[v.UNIT, ""].value == "d.service"
        assert looked.unit_of(one) == Service("d.service")

    async def test_the_end_of_its_shell_is_the_members(self, place):
        """Where a script starts the member, systemd tells of the script's end."""
        place(Service("d.service"), {41})
        systemd, lives = FakeSystemd(), Incarnations()
        lives.saw("d", life(50))
        looked = source(member(unit=None), system=systemd, lives=lives)
        await look(looked)
        systemd.ends = [Ended(1500.0, 41, 5, "exit code 5")]
        _, (stop,) = await look(looked)

        assert stop.incarnation == "50:7"

    async def test_whoever_logged_in_is_no_unit(self, place):
        """A process below `ssh.service` that its main process did not start is not its member."""
        place(Service("ssh.service"), {60, 61})
        lives = Incarnations()
        lives.saw("d", life(50))
        seen, _ = await look(source(member(unit=None), lives=lives))

        assert seen == {}

    async def test_a_member_outside_of_systemd_is_nothing_to_tell(self, place):
        """No unit, no row, and systemd is not even asked."""
        place(None, set())
        systemd, lives = FakeSystemd(), Incarnations()
        lives.saw("d", life(50))
        seen, _ = await look(source(member(unit=None), system=systemd, lives=lives))

        assert (seen, systemd.asked) == ({}, [])

    async def test_what_tandem_starts_itself_is_left_out(self):
        """The local supervisor knows its members better."""
        seen, _ = await look(source(member(unit=None, supervisor="local")))

        assert seen == {}

    async def test_a_name_the_system_does_not_know_may_be_the_users(self, monkeypatch):
        """A plain user's own systemd is asked second."""
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        gone = FakeSystemd(replace(UNIT, loaded="not-found", active="inactive"))
        looked = UnitSource(
            (member(),), Incarnations(), ask={None: gone, 1000: FakeSystemd()}.__getitem__
        )
        seen, _ = await look(looked)

        assert seen[v.UNIT, ""].value == "user:d.service"

    async def test_a_unit_nobody_knows_is_a_reason(self):
        """A typing error in `unit` is seen where the state would be."""
        gone = FakeSystemd(replace(UNIT, loaded="not-found", active="inactive"))
        seen, _ = await look(source(system=gone))

        assert "not-found" in seen[v.UNIT_STATE, ""].missing

    async def test_no_bus_is_a_reason(self, tmp_path):
        """A container or an old host has no systemd to ask; nothing is raised."""
        looked = UnitSource(
            (member(),),
            Incarnations(),
            ask=lambda _: Systemd(f"unix:path={tmp_path}/none"),
        )
        seen, _ = await look(looked)
        await looked.close()

        assert "there is no systemd to ask" in seen[v.UNIT, ""].missing

    async def test_a_systemd_that_hangs_costs_a_bound(self, tmp_path):
        """A bus that accepts and never answers is left after its time."""
        met = asyncio.Event()

        async def mute(reader, writer):
            met.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(mute, tmp_path / "bus")
        systemd = Systemd(f"unix:path={tmp_path}/bus", timeout_s=0.2)
        with pytest.raises(WorldError, match="did not answer"):
            await systemd.unit("d.service")
        server.close()

        assert met.is_set()

    def test_the_users_bus_is_in_the_users_folder(self, monkeypatch):
        """The folder of one's own session is known; another's is where logind makes it."""
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/mine")

        assert user_bus(os.getuid()) == "unix:path=/run/mine/bus"
        assert user_bus(4242) == "unix:path=/run/user/4242/bus"


@pytest.fixture(scope="module")
def booted():
    """Boot a real systemd once for this file."""
    machine = Booted()
    yield machine
    machine.close()


async def until(looked, wanted):
    """Look until the rows are as wanted; everything told on the way."""
    rows, changes = {}, []
    async with asyncio.timeout(UNTIL_S):
        while not wanted(rows):
            harvest = await looked.collect()
            rows |= {(one.name, one.label): one for one in harvest.observations}
            changes += harvest.changes
            await asyncio.sleep(0.05)
    return rows, changes


@pytest.mark.needs("systemd")
class TestReal:
    """A whole systemd of its own."""

    async def test_a_restart_too_quick_to_see_leaves_its_exit_code(self, booted):
        """The unit is back at once, and how it ended is known all the same."""
        booted.write(
            "quick.service",
            "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestart=always\nRestartSec=50ms\n"
            "ExecStart=/bin/sh -c 'test -e /run/again && exec sleep 999; touch /run/again; "
            "while test ! -e /run/go; do sleep 0.02; done; exit 3'\n",
        )
        booted.run("systemctl", "start", "quick.service")
        one = member(unit="quick.service")
        looked = UnitSource((one,), Incarnations(), ask=lambda _: Systemd(booted.bus), every_s=0.0)
        await look(looked)
        booted.run("touch", "/run/go")
        rows, changes = await until(
            looked, lambda rows: rows and rows[v.UNIT_RESTARTS_TOTAL, ""].value == 1
        )
        await looked.close()

        assert rows[v.UNIT_EXIT, ""].value == "exit code 3"
        assert [(row.kind, row.how_known) for row in changes] == [("stop", "systemd: exit code 3")]

    async def test_a_kill_is_told_by_its_signal(self, booted):
        """State, result and signal of a unit that somebody killed."""
        booted.write("killed.service", "[Service]\nExecStart=/bin/sleep 999\n")
        booted.run("systemctl", "start", "killed.service")
        one = member(unit="killed.service")
        looked = UnitSource((one,), Incarnations(), ask=lambda _: Systemd(booted.bus), every_s=0.0)
        seen, _ = await look(looked)
        booted.run("systemctl", "kill", "--signal=KILL", "killed.service")
        rows, _ = await until(
            looked, lambda rows: rows and rows[v.UNIT_STATE, ""].value == "failed/failed"
        )
        await looked.close()

        assert seen[v.UNIT_STATE, ""].value == "active/running"
        assert len(seen[v.UNIT_INVOCATION, ""].value) == 32
        assert (rows[v.UNIT_RESULT, ""].value, rows[v.UNIT_EXIT, ""].value) == (
            "signal",
            "killed by SIGKILL",
        )
        assert rows[v.EXIT_CODE, ""].value == -9

    async def test_a_drop_in_is_seen_with_its_reload(self, booted):
        """A drop-in written by hand is a change as soon as systemd has read it."""
        written = booted.write("edited.service", "[Service]\nExecStart=/bin/sleep 999\n")
        os.utime(written, (1000.0, 1000.0))
        booted.run("systemctl", "start", "edited.service")
        one = member(unit="edited.service")
        looked = UnitSource(
            (one,), Incarnations(), ask=lambda _: Systemd(booted.bus), every_s=0.0, root=booted.root
        )
        await look(looked)
        booted.write("edited.service.d/flags.conf", "[Service]\nEnvironment=SGLANG_X=1\n")
        seen, changes = await look(looked)
        await looked.close()

        path = "/run/systemd/system/edited.service.d/flags.conf"
        assert [(row.kind, row.what, row.before) for row in changes] == [("config", path, None)]
        assert seen[v.UNIT_FILE_WRITTEN_AT, path].value > 1e9

    async def test_a_connection_that_broke_is_made_anew(self, booted):
        """A bus that went away is a reason at most once, and is asked again at the next look."""
        systemd = Systemd(booted.bus)
        first = await systemd.unit("systemd-journald.service")
        systemd._bus._sock.shutdown(socket.SHUT_RDWR)
        await asyncio.sleep(0)
        with contextlib.suppress(WorldError):
            await systemd.unit("systemd-journald.service")
        second = await systemd.unit("systemd-journald.service")
        await systemd.close()

        assert (first.active, second.active) == ("active", "active")

    async def test_a_name_is_escaped_as_systemd_does(self, booted):
        """Instances, dashes and leading digits reach their unit."""
        systemd = Systemd(booted.bus)
        booted.write("9a-b@.service", "[Service]\nExecStart=/bin/sleep 999\n")
        unit = await systemd.unit("9a-b@x\\x2dy.service")
        await systemd.close()

        assert (unit.loaded, unit.name) == ("loaded", "9a-b@x\\x2dy.service")

    async def test_a_refusal_is_told_in_systemds_words(self, booted):
        """Starting what does not exist is refused, and the reason is systemd's own."""
        systemd = Systemd(booted.bus)
        with pytest.raises(WorldError, match=r"no-such\.service not found"):
            await systemd.manage("StartUnit", "ss", "no-such.service", "replace")
        await systemd.close()

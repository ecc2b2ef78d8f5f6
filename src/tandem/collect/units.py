"""What systemd says of the members that are services: state, restarts, exit codes, edited files.

For: the unit of a member (told by `unit = "..."`, else found from its process), one look for all.
Not for: starting or stopping units, or members that Tandem itself starts.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from tandem.cgroups import Service, place_of
from tandem.collect.incarnations import Incarnations
from tandem.errors import WorldError
from tandem.facts import Facts
from tandem.ports import Harvest
from tandem.records import Change, Member, Observation, Value
from tandem.records import vocabulary as v
from tandem.systemd import Ended, Systemd, Unit, user_bus

EVERY_S = 5.0
"""Between looks at one member; a new life of it is looked at when it is seen."""
FORBEARS_MAX = 2
"""A unit found by control group is a member's only when its main process is the member, or starts
it through at most this many others: whoever logs in by ssh is below ssh.service too."""
FILES_MAX = 64
LIVES_MAX = 64

Asker = Callable[[int | None], Systemd]
"""Gives the systemd of the whole system (None) or of one user."""


@dataclass(slots=True)
class _Watched:
    """What is remembered of one member."""

    due_at: float = float("-inf")
    looked: str | None = None
    """The life that was seen at the last look."""
    service: Service | None = None
    life: str | None = None
    """For which life the unit was looked for."""
    files: dict[str, float] | None = None
    lives: dict[int, str] = field(default_factory=dict)
    """Main process to the incarnation it was, for naming a life after its end."""
    ended: Ended | None = None
    """The last end that was told."""


class UnitSource:
    """All members of this host that systemd may have."""

    def __init__(
        self,
        members: Sequence[Member],
        incarnations: Incarnations,
        *,
        ask: Asker | None = None,
        known_files: Mapping[str, Mapping[str, float]] | None = None,
        root: Path = Path("/"),
        every_s: float = EVERY_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`known_files` are unit files as last told, by member (`files_known`).

        `root` is where systemd's files are below: another root than `/` is for tests.
        """
        self.name = "units"
        self.interval_s = 1.0
        self.timeout_s = 10.0
        self._members = [one for one in members if one.supervisor != "local"]
        self._incarnations = incarnations
        self._ask = ask or _asker()
        self._asked: dict[int | None, Systemd] = {}
        self._root = root
        self._every_s = every_s
        self._now = now
        files = known_files or {}
        self._watched = {
            one.name: _Watched(files=dict(files[one.name]) if files.get(one.name) else None)
            for one in self._members
        }

    def unit_of(self, member: Member) -> Service | None:
        """The unit of a member as far as it is known: for whoever reads its journal."""
        watched = self._watched.get(member.name)
        if watched is not None and watched.service is None and member.unit is not None:
            return Service(member.unit)
        return None if watched is None else watched.service

    async def main_pid(self, member: Member) -> int | None:
        """The main process of the unit that `tandem.toml` names; None while it has none.

        Raises `WorldError` when systemd cannot be asked.
        """
        watched = self._watched.get(member.name)
        if watched is None or member.unit is None:
            return None
        return (await self._named(member.unit, watched)).main_pid

    async def collect(self) -> Harvest:
        """Look once at every member's unit."""
        due = [one for one in self._members if self._due(self._watched[one.name], one)]
        looks = await asyncio.gather(*(self._told(member) for member in due))
        return Harvest(
            tuple(seen for look in looks for seen in look.observations),
            (),
            tuple(change for look in looks for change in look.changes),
        )

    async def _told(self, member: Member) -> Harvest:
        try:
            return await self._look(member)
        except WorldError as error:
            # What was told last would stand for ever otherwise.
            names = (v.UNIT, v.UNIT_STATE)
            return Harvest(tuple(self._row(member, one, missing=error.clause) for one in names))

    def _due(self, watched: _Watched, member: Member) -> bool:
        """Whether it is time for a look, or a life is seen that was not there at the last."""
        life = self._incarnations.of(member.name)
        if self._now() < watched.due_at and life == watched.looked:
            return False
        watched.due_at, watched.looked = self._now() + self._every_s, life
        return True

    async def close(self) -> None:
        """Leave every bus."""
        for systemd in self._asked.values():
            await systemd.close()

    async def _look(self, member: Member) -> Harvest:
        watched = self._watched[member.name]
        life, pid = self._incarnations.of(member.name), self._incarnations.pid(member.name)
        if life is not None and pid is not None:
            watched.lives[pid] = life
            while len(watched.lives) > LIVES_MAX:
                del watched.lives[next(iter(watched.lives))]
        unit = await self._unit(member, watched, life, pid)
        if unit is None or watched.service is None:
            return Harvest()
        main = unit.main_pid
        if (
            life is not None
            and pid is not None
            and main is not None
            and main not in watched.lives
            and main in await asyncio.to_thread(_forebears, pid)
        ):
            # A shell that starts the member is the main process: its end is the member's.
            watched.lives[main] = life
        systemd = self._systemd(watched.service.uid)
        await systemd.follow(unit.name)
        ends = tuple(
            end
            for end in dict.fromkeys((*systemd.ended(unit.name), unit.ended))
            if end is not None and end != watched.ended
        )
        watched.ended = ends[-1] if ends else watched.ended
        files = await asyncio.to_thread(self._files, unit)
        return Harvest(
            tuple(self._rows(member, watched.service, unit, ends, files)),
            (),
            (*self._stops(member, watched, ends), *self._edits(member, watched, unit, files)),
        )

    async def _unit(
        self, member: Member, watched: _Watched, life: str | None, pid: int | None
    ) -> Unit | None:
        """The member's unit as it is now; None when it is known to have none."""
        if member.unit is not None:
            return await self._named(member.unit, watched)
        if pid is not None and life != watched.life:
            # A new life may have been started in another way.
            watched.service = await self._found(pid)
            watched.life = life
        if watched.service is None:
            return None
        return await self._systemd(watched.service.uid).unit(watched.service.unit)

    async def _named(self, name: str, watched: _Watched) -> Unit:
        """The unit that somebody named: the system's, else one of this user's own."""
        uid = None if watched.service is None else watched.service.uid
        unit = await self._systemd(uid).unit(name)
        if watched.service is None:
            watched.service = Service(name)
            if unit.loaded == "not-found" and os.getuid() != 0:
                with contextlib.suppress(WorldError):
                    own = await self._systemd(os.getuid()).unit(name)
                    if own.loaded != "not-found":
                        watched.service, unit = Service(name, os.getuid()), own
        return unit

    async def _found(self, pid: int) -> Service | None:
        """The service whose main process is this one, or started it."""
        service = (await asyncio.to_thread(place_of, pid)).service
        if service is None:
            return None
        unit = await self._systemd(service.uid).unit(service.unit)
        forebears = await asyncio.to_thread(_forebears, pid)
        return service if unit.main_pid in forebears else None

    def _systemd(self, uid: int | None) -> Systemd:
        if uid not in self._asked:
            self._asked[uid] = self._ask(uid)
        return self._asked[uid]

    def _rows(
        self,
        member: Member,
        service: Service,
        unit: Unit,
        ends: Sequence[Ended],
        files: Mapping[str, float],
    ) -> Iterator[Observation]:
        name = unit.name if service.uid is None else f"user:{unit.name}"
        yield self._row(member, v.UNIT, name)
        if unit.loaded != "loaded":
            yield self._row(member, v.UNIT_STATE, missing=f"systemd says it is {unit.loaded}")
            return
        yield self._row(member, v.UNIT_STATE, f"{unit.active}/{unit.sub}")
        yield self._row(member, v.UNIT_RESULT, unit.result)
        yield self._row(member, v.UNIT_RESTARTS_TOTAL, unit.restarts)
        yield self._row(member, v.UNIT_INVOCATION, unit.invocation or None)
        yield self._row(member, v.UNIT_STARTED_AT, unit.started_at)
        yield self._row(member, v.UNIT_RELOAD_NEEDED, unit.reload_needed)
        watched = self._watched[member.name]
        for end in ends:
            row = self._row(member, v.UNIT_EXIT, end.how)
            life = watched.lives.get(end.pid)
            yield msgspec.structs.replace(row, at=end.at, incarnation=life)
            row = self._row(member, v.EXIT_CODE, end.code)
            yield msgspec.structs.replace(row, at=end.at, incarnation=life)
        for path, changed_at in files.items():
            yield self._row(member, v.UNIT_FILE_WRITTEN_AT, changed_at, label=path)

    def _stops(self, member: Member, watched: _Watched, ends: Sequence[Ended]) -> Iterator[Change]:
        """A row for each life that ended, with how: its successor may be there already."""
        for end in ends:
            life = watched.lives.get(end.pid)
            yield Change(
                at=end.at,
                subject=member.name,
                kind="stop",
                before=life or f"pid {end.pid}",
                how_known=f"systemd: {end.how}",
                incarnation=life or f"{end.pid}:{end.at:.0f}",
            )

    def _edits(
        self, member: Member, watched: _Watched, unit: Unit, files: Mapping[str, float]
    ) -> Iterator[Change]:
        """Rows for unit files and drop-ins that appeared, changed or went since the last look."""
        if unit.loaded != "loaded":
            return
        before, watched.files = watched.files, dict(files)
        if before is None:
            began_at = unit.started_at
            before = {p: at for p, at in files.items() if began_at is None or at <= began_at}
        for path in sorted(before.keys() | files.keys()):
            was, is_now = before.get(path), files.get(path)
            if was == is_now:
                continue
            yield Change(
                at=self._now() if is_now is None else is_now,
                subject=member.name,
                kind="config",
                what=path,
                before=None if was is None else f"written {_stamp(was)}",
                after=None if is_now is None else f"written {_stamp(is_now)}",
                how_known="the file's time of change",
            )

    def _files(self, unit: Unit) -> dict[str, float]:
        """When each file of a unit was last changed; those that cannot be seen are left out."""
        found: dict[str, float] = {}
        for path in unit.files[:FILES_MAX]:
            try:
                found[path] = (self._root / path.lstrip("/")).stat().st_mtime
            except OSError:
                continue
        return found

    def _row(
        self,
        member: Member,
        name: str,
        value: Value = None,
        *,
        label: str = "",
        missing: str | None = None,
    ) -> Observation:
        return Observation(
            source="unit",
            subject=member.name,
            name=name,
            at=self._now(),
            label=label,
            value=value,
            missing=missing,
            incarnation=self._incarnations.of(member.name),
        )


def files_known(facts: Facts, members: Sequence[Member]) -> dict[str, dict[str, float]]:
    """The unit files of each member as the store last had them: an edit while Tandem was away."""
    found: dict[str, dict[str, float]] = {}
    for member in members:
        for path in facts.labels(member.name, v.UNIT_FILE_WRITTEN_AT):
            seen = facts.latest(member.name, v.UNIT_FILE_WRITTEN_AT, path)
            if seen is not None and isinstance(seen.value, int | float):
                found.setdefault(member.name, {})[path] = float(seen.value)
    return found


def _asker() -> Asker:
    def ask(uid: int | None) -> Systemd:
        return Systemd() if uid is None else Systemd(user_bus(uid))

    return ask


def _forebears(pid: int) -> set[int]:
    """A process and the few that started it."""
    found = {pid}
    try:
        process: psutil.Process | None = psutil.Process(pid)
        for _ in range(FORBEARS_MAX):
            process = process.parent() if process is not None else None
            if process is not None:
                found.add(process.pid)
    except psutil.Error:
        pass
    return found - {0, 1}


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


__all__ = ["UnitSource", "files_known"]

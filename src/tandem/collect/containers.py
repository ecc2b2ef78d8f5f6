"""What a container engine says of the members that are containers: state, exit codes, restarts.

For: the container of a member (told by `container = "..."`, else found from its process), in
whichever engine of this host knows it. Not for: starting or stopping containers, or Kubernetes.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tandem.cgroups import place_of
from tandem.collect.incarnations import Incarnations
from tandem.containers import Container, ContainerEngine, elsewhere, socket_paths
from tandem.errors import WorldError
from tandem.ports import Harvest
from tandem.records import Change, Member, Observation, Value
from tandem.records import vocabulary as v

EVERY_S = 5.0
"""Between looks at one member; a new life of it is looked at when it is seen."""
EVENTS_AHEAD_S = 1.0
"""An engine is asked for events until a little later than now, and answers then."""
ID_SHOWN = 12
"""Digits of an id that people read, as `docker ps` shows them."""


class End(NamedTuple):
    """One end of a member's container, and how."""

    at: float
    how: str
    code: int | None


@dataclass(slots=True)
class _Watched:
    """What is remembered of one member."""

    due_at: float = float("-inf")
    looked: str | None = None
    """The life that was seen at the last look."""
    name: str | None = None
    """Name or id under which an engine knows its container."""
    life: str | None = None
    """For which life the container was looked for."""
    engine: ContainerEngine | None = None
    last: Container | None = None
    living: str | None = None
    """The life that the present main process of the container is."""


class ContainerSource:
    """All members of this host that an engine may have."""

    def __init__(
        self,
        members: Sequence[Member],
        incarnations: Incarnations,
        *,
        engines: Sequence[ContainerEngine] | None = None,
        every_s: float = EVERY_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`engines` are asked in this order; without them, those whose sockets are here."""
        self.name = "containers"
        self.interval_s = 1.0
        self.timeout_s = 10.0
        self._members = [one for one in members if one.supervisor != "local"]
        self._incarnations = incarnations
        self._every_s = every_s
        self._now = now
        if engines is None:
            engines = [ContainerEngine(path) for path in socket_paths(os.environ)]
        self._engines = list(engines)
        self._watched = {one.name: _Watched(name=one.container) for one in self._members}

    async def main_pid(self, member: Member) -> int | None:
        """The main process, on this host, of the container that `tandem.toml` names.

        None while it does not run. Raises `WorldError` when no engine tells.
        """
        watched = self._watched.get(member.name)
        if watched is None or member.container is None:
            return None
        return (await self._inspect(watched, member.container)).pid

    def seen(self, member: Member) -> tuple[ContainerEngine, Container] | None:
        """The container of a member as last seen, and who has it: for whoever reads its log."""
        watched = self._watched.get(member.name)
        if watched is None or watched.engine is None or watched.last is None:
            return None
        return watched.engine, watched.last

    async def collect(self) -> Harvest:
        """Look once at every member's container."""
        due = [one for one in self._members if self._due(self._watched[one.name], one)]
        looks = await asyncio.gather(*(self._look(member) for member in due))
        return Harvest(
            tuple(seen for look in looks for seen in look.observations),
            (),
            tuple(change for look in looks for change in look.changes),
        )

    def _due(self, watched: _Watched, member: Member) -> bool:
        """Whether it is time for a look, or a life is seen that was not there at the last."""
        life = self._incarnations.of(member.name)
        if self._now() < watched.due_at and life == watched.looked:
            return False
        watched.due_at, watched.looked = self._now() + self._every_s, life
        return True

    async def close(self) -> None:
        """Close every connection."""
        for engine in self._engines:
            await engine.close()

    async def _look(self, member: Member) -> Harvest:
        watched = self._watched[member.name]
        await self._search(member, watched)
        if watched.name is None:
            return Harvest()
        try:
            seen = await self._inspect(watched, watched.name)
        except WorldError as error:
            # What was told last would stand for ever otherwise.
            names = (v.CONTAINER, v.CONTAINER_STATE)
            return Harvest(tuple(self._row(member, one, missing=error.clause) for one in names))
        before, watched.last = watched.last, seen
        ends = await self._ends(watched.engine, before, seen)
        rows = [*self._rows(member, seen)]
        for end in ends:
            rows += self._ended(member, watched, end)
        changes = tuple(self._changes(member, watched, before, seen, ends))
        return Harvest(tuple(rows), (), changes)

    async def _search(self, member: Member, watched: _Watched) -> None:
        """Learn the container's id from a new life's control group, where nobody named it."""
        life, pid = self._incarnations.of(member.name), self._incarnations.pid(member.name)
        if member.container is not None or pid is None or life == watched.life:
            return
        watched.life = life
        container_id = (await asyncio.to_thread(place_of, pid)).container_id
        if container_id is not None and container_id != watched.name:
            watched.name, watched.engine = container_id, None

    async def _inspect(self, watched: _Watched, name: str) -> Container:
        """The container, from the engine that has it; raises `WorldError` when none tells."""
        reasons: list[str] = []
        asked = 0
        for engine in [watched.engine] if watched.engine else self._engines:
            if not engine.there():
                continue
            try:
                asked += 1
                seen = await engine.container(name)
            except WorldError as error:
                reasons.append(error.clause)
                continue
            if seen is not None:
                watched.engine = engine
                return seen
            reasons.append(f"the engine at {engine.path} has no container {name}")
        # Whoever had it may be another engine next time.
        watched.engine = None
        if asked:
            raise WorldError(
                "; ".join(reasons), next_step="Correct `container`, or start the container."
            )
        far = elsewhere(os.environ)
        raise WorldError(
            f"No container engine of this host can be asked: there is no socket at "
            f"{', '.join(engine.path for engine in self._engines)}"
            + (f", and DOCKER_HOST = {far} is another host's." if far else "."),
            next_step="Start Docker or `podman.socket`, or set DOCKER_HOST to its unix:// socket.",
        )

    async def _ends(
        self, engine: ContainerEngine | None, before: Container | None, seen: Container
    ) -> list[End]:
        """How it ended since the last look: by what it is now, else by the engine's events."""
        if seen.finished_at is None or (before and before.finished_at == seen.finished_at):
            return []
        last = End(seen.finished_at, _how(seen), seen.exit_code)
        if seen.exit_code is not None or before is None or engine is None:
            return [last]
        since = before.finished_at or before.started_at or seen.finished_at
        try:
            told = await engine.exit_codes(seen.id, since=since, until=self._now() + EVENTS_AHEAD_S)
        except WorldError:
            return [last]
        ends = [End(at, f"exit code {code}", code) for at, code in told if at > since + 1e-3]
        return ends or [last]

    def _rows(self, member: Member, seen: Container) -> Iterator[Observation]:
        yield self._row(member, v.CONTAINER, f"{seen.name} ({seen.id[:ID_SHOWN]})")
        yield self._row(member, v.CONTAINER_STATE, seen.state)
        yield self._row(member, v.CONTAINER_RESTARTS_TOTAL, seen.restarts)
        yield self._row(member, v.CONTAINER_OOM_KILLED, seen.oom_killed)
        yield self._row(member, v.CONTAINER_STARTED_AT, seen.started_at)
        yield self._row(member, v.CONTAINER_FINISHED_AT, seen.finished_at)
        yield self._row(member, v.CONTAINER_HEALTH, seen.health)
        yield self._row(member, v.CONTAINER_IMAGE, f"{seen.image} ({seen.image_id})")

    def _ended(self, member: Member, watched: _Watched, end: End) -> Iterator[Observation]:
        why = None if end.code is not None else "the engine does not remember it"
        for row in (
            self._row(member, v.CONTAINER_EXIT, end.how),
            self._row(member, v.EXIT_CODE, end.code, missing=why),
        ):
            yield msgspec.structs.replace(row, at=end.at, incarnation=watched.living)

    def _changes(
        self,
        member: Member,
        watched: _Watched,
        before: Container | None,
        seen: Container,
        ends: Sequence[End],
    ) -> Iterator[Change]:
        """Rows for lives that ended, with how, and for another image."""
        known = watched.living
        for end in ends:
            # Only the first of several is the life that was known; it is forgotten with its end.
            life, watched.living = watched.living, None
            ended = life or f"{seen.id[:ID_SHOWN]}:{end.at:.0f}"
            yield Change(
                at=end.at,
                subject=member.name,
                kind="stop",
                before=ended,
                how_known=f"its container engine: {end.how}",
                incarnation=ended,
            )
        present = self._incarnations.of(member.name)
        if seen.pid is not None and not (ends and present == known):
            watched.living = present
        if before is not None and before.image_id != seen.image_id:
            yield Change(
                at=seen.started_at or self._now(),
                subject=member.name,
                kind="package",
                what="container image",
                before=f"{before.image} ({before.image_id})",
                after=f"{seen.image} ({seen.image_id})",
                how_known="its container engine",
            )

    def _row(
        self, member: Member, name: str, value: Value = None, *, missing: str | None = None
    ) -> Observation:
        return Observation(
            source="container",
            subject=member.name,
            name=name,
            at=self._now(),
            value=value,
            missing=missing,
            incarnation=self._incarnations.of(member.name),
        )


def _how(seen: Container) -> str:
    """How its main process ended last; 128 and more is a signal, by the shells' convention."""
    told = "exit code unknown" if seen.exit_code is None else f"exit code {seen.exit_code}"
    if seen.oom_killed:
        told += ", out of memory"
    return f"{told}: {seen.error}" if seen.error else told


__all__ = ["ContainerSource"]

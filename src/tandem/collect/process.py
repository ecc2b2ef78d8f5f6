"""The members' processes: alive or not, which life, CPU time, memory, command line, environment.

For: the present incarnation of every member, and what it was started with.
Not for: starting or stopping anything, or processes on other hosts.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import psutil

from tandem.collect.families import Families, stat_of
from tandem.collect.incarnations import Incarnations
from tandem.errors import WorldError
from tandem.fetch import host_of
from tandem.ports import Harvest, Supervisor
from tandem.processes import STATES, life_of, listening_life
from tandem.records import ENGINE_VARIABLES, Incarnation, Member, Observation, Value
from tandem.records import vocabulary as v

SLOW_EVERY_S = 15.0
"""Command line and environment never change within a life, but every window shall hold them."""

WORDS_MAX = 512


@runtime_checkable
class KnowsEnds(Protocol):
    """A supervisor that can tell how a process that it started ended."""

    def exit_code(self, pid: int) -> int | None:
        """The exit code, negative when a signal ended it; None when it cannot tell."""
        ...


@dataclass(slots=True)
class _Seen:
    """What the source remembers of the member: its life, and when slow facts are due again."""

    life: Incarnation | None = None
    slow_due_at: float = float("-inf")


class ProcessSource:
    """One member and its children, by its supervisor's word, else by who listens on its port."""

    def __init__(
        self,
        member: Member,
        supervisor: Supervisor | None,
        incarnations: Incarnations,
        *,
        interval_s: float = 1.0,
        variables: Sequence[str] = (),
        families: Families | None = None,
        main_pid: Callable[[Member], Awaitable[int | None]] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`variables` are allowed into evidence beside the built-in prefixes, by exact name.

        `families` may be shared by the sources of all members. `main_pid` is the word of the
        host's systemd or container engine on a member that `tandem.toml` says is theirs.
        """
        self.name = f"process:{member.name}"
        self.interval_s = interval_s
        self.timeout_s = 5.0
        self._member = member
        self._supervisor = supervisor
        self._incarnations = incarnations
        self._variables = frozenset(variables)
        self._families = families or Families()
        self._main_pid = main_pid
        self._now = now
        self._seen = _Seen()

    async def collect(self) -> Harvest:
        """Look once; everything that blocks runs in a thread."""
        at = self._now()
        try:
            life = await self._life()
        except (WorldError, OSError, psutil.Error) as error:
            self._incarnations.saw(self._member.name, None)
            return Harvest((self._row(at, v.ALIVE, missing=f"cannot look: {error}"),))
        self._incarnations.saw(self._member.name, life)
        if life is None:
            ended, self._seen = self._seen.life, _Seen()
            return Harvest((self._row(at, v.ALIVE, value=False), *self._end_of(ended, at)))
        if self._seen.life is None or life.id != self._seen.life.id:
            self._seen = _Seen(life)
        slow = at >= self._seen.slow_due_at
        if slow:
            self._seen.slow_due_at = at + SLOW_EVERY_S
        return Harvest(tuple(await asyncio.to_thread(self._facts, life, at, slow)))

    def _end_of(self, life: Incarnation | None, at: float) -> Iterator[Observation]:
        """How the life that was seen last ended, where anybody can still tell."""
        if life is None or life.pid is None:
            return
        stat = stat_of(life.pid)
        zombie = stat is not None and stat.state == "Z" and life.id == f"{life.pid}:{stat.ticks}"
        code = stat.exit_code if stat is not None and zombie else None
        supervisor: object = self._supervisor
        if code is None and isinstance(supervisor, KnowsEnds):
            code = supervisor.exit_code(life.pid)
        if zombie:
            yield self._row(at, v.PROCESS_STATE, "Z", incarnation=life.id)
        if code is not None:
            yield self._row(at, v.EXIT_CODE, code, incarnation=life.id)

    async def _life(self) -> Incarnation | None:
        """The member's present life.

        Raises `WorldError` where nobody can tell: a member of another host without a supervisor.
        """
        if self._supervisor is None:
            return await self._main_life() or await asyncio.to_thread(self._listening_life)
        life = await self._supervisor.inspect(self._member)
        if life is not None:
            return life
        # Somebody may have started it by hand: a restart that the ledger must have as well.
        with contextlib.suppress(WorldError):
            return await asyncio.to_thread(self._listening_life)
        return None

    async def _main_life(self) -> Incarnation | None:
        """The main process of its unit or container: also while it does not listen yet.

        None where nobody runs it, or whoever does cannot be asked.
        """
        if self._main_pid is None or not (self._member.unit or self._member.container):
            return None
        if (still := self._still()) is not None:
            return still
        with contextlib.suppress(WorldError):
            pid = await self._main_pid(self._member)
            return None if pid is None else await asyncio.to_thread(life_of, pid)
        return None

    def _still(self) -> Incarnation | None:
        """The life that was seen last, while it lasts."""
        known = self._seen.life
        if known is None or known.pid is None:
            return None
        still = life_of(known.pid)
        return still if still is not None and still.id == known.id else None

    def _listening_life(self) -> Incarnation | None:
        if (still := self._still()) is not None:
            return still
        port = int(self._member.url.rstrip("/").rpartition(":")[2])
        return listening_life(host_of(self._member.url), port)

    def _facts(self, life: Incarnation, at: float, slow: bool) -> Iterator[Observation]:  # noqa: FBT001
        def row(
            name: str, value: Value = None, label: str = "", missing: str | None = None
        ) -> Observation:
            return self._row(at, name, value, label, missing, life.id)

        yield row(v.ALIVE, value=True)
        yield row(v.STARTED_AT, life.started_at)
        if life.pid is None:
            return
        yield row(v.PID, life.pid)
        try:
            process = psutil.Process(life.pid)
            with process.oneshot():
                yield row(v.PROCESS_STATE, STATES.get(process.status(), "R"))
                yield from _use(self._families.of(life.pid), row)
                if slow:
                    yield from self._started_with(process, row)
        except psutil.NoSuchProcess:
            yield row(v.PROCESS_STATE, missing="it ended while being looked at")

    def _started_with(
        self, process: psutil.Process, row: "Callable[..., Observation]"
    ) -> Iterator[Observation]:
        try:
            yield row(v.COMMAND_LINE, tuple(process.cmdline()[:WORDS_MAX]))
        except psutil.AccessDenied:
            yield row(v.COMMAND_LINE, missing=_DENIED)
        try:
            environment = process.environ()
        except psutil.AccessDenied:
            yield row(v.ENVIRONMENT, missing=_DENIED)
            return
        shown = {
            name: value
            for name, value in environment.items()
            if name.startswith(ENGINE_VARIABLES) or name in self._variables
        }
        if not shown:
            yield row(v.ENVIRONMENT)
        for name, value in sorted(shown.items()):
            yield row(v.ENVIRONMENT, value, name)

    def _row(
        self,
        at: float,
        name: str,
        value: Value = None,
        label: str = "",
        missing: str | None = None,
        incarnation: str | None = None,
    ) -> Observation:
        return Observation(
            source="process",
            subject=self._member.name,
            name=name,
            at=at,
            label=label,
            value=value,
            missing=missing,
            incarnation=incarnation,
        )


_DENIED = "not ours to see: run Tandem as the member's user, or as root"


def _use(pids: Sequence[int], row: "Callable[..., Observation]") -> Iterator[Observation]:
    """CPU seconds and memory of the process with its children, the reaped ones included."""
    # A child that ends meanwhile is counted with its parent at the next look.
    stats = [stat for pid in pids if (stat := stat_of(pid)) is not None]
    yield row(v.CPU_SECONDS_TOTAL, round(sum(stat.cpu_s for stat in stats), 3))
    yield row(v.RSS_BYTES, sum(stat.rss_bytes for stat in stats))


__all__ = ["ProcessSource"]

"""The processes of a member beside the one that leads it: what each is, and how it does.

For: ranks, detokenizers and helpers of an engine: role, state, CPU time, memory, threads, since
when, where in the kernel one waits, and how one ended. Not for: the leader's life (`process.py`).
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tandem.collect.families import (
    Families,
    Stat,
    blocked_threads,
    role_of,
    stat_of,
    wait_channel,
)
from tandem.collect.incarnations import Incarnations
from tandem.ports import Harvest
from tandem.records import Member, Observation, Value
from tandem.records import vocabulary as v

EVERY_S = 5.0
USE_EVERY_S = 10.0
"""CPU time, memory and threads are told this often; states at every look."""
STANDS = frozenset({"D", "T"})
SHOWN_MAX = 64
"""Children that are told one by one; of the others only the number is."""
SEEN_MAX = 256


@dataclass(slots=True)
class _Child:
    """What is remembered of one child."""

    ticks: int
    role: str


@dataclass(slots=True)
class _Memory:
    """What is remembered of a member's present life."""

    life: str | None = None
    children: dict[int, _Child] = field(default_factory=dict)
    use_due_at: float = float("-inf")


class ChildrenSource:
    """The children of one member on this host."""

    def __init__(
        self,
        member: Member,
        incarnations: Incarnations,
        families: Families,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """The process source says which process leads; `families` is shared by all members."""
        self.name = f"children:{member.name}"
        self.interval_s = EVERY_S
        self.timeout_s = 5.0
        self._member = member
        self._incarnations = incarnations
        self._families = families
        self._now = now
        self._memory = _Memory()

    async def collect(self) -> Harvest:
        """Look once; a member without a process here has no children to see."""
        pid, life = (
            self._incarnations.pid(self._member.name),
            self._incarnations.of(self._member.name),
        )
        if pid is None:
            return Harvest()
        if life != self._memory.life:
            self._memory = _Memory(life)
        return Harvest(tuple(await asyncio.to_thread(lambda: tuple(self._look(pid)))))

    def _look(self, leader: int) -> Iterator[Observation]:
        at = self._now()
        use = at >= self._memory.use_due_at
        if use:
            self._memory.use_due_at = at + USE_EVERY_S
        pids = self._families.of(leader)
        stats = {pid: stat for pid in pids[1:] if (stat := stat_of(pid)) is not None}
        yield from self._gone(stats, at)
        yield self._row(at, v.CHILDREN, len(stats))
        if use:
            if (where := wait_channel(leader)) is not None:
                yield self._row(at, v.WAIT_CHANNEL, where)
            own = stat_of(leader)
            yield self._row(at, v.THREADS, (own.threads if own else 0) + _threads(stats))
            yield self._row(at, v.THREADS_BLOCKED, sum(map(blocked_threads, [leader, *stats])))
        for stat in list(stats.values())[:SHOWN_MAX]:
            yield from self._child(stat, at, use=use)

    def _child(self, stat: Stat, at: float, *, use: bool) -> Iterator[Observation]:
        label = str(stat.pid)
        known = self._memory.children.get(stat.pid)
        if known is None or known.ticks != stat.ticks:
            known = _Child(stat.ticks, role_of(stat.pid, stat.name))
            if len(self._memory.children) < SEEN_MAX:
                self._memory.children[stat.pid] = known
            use = True
        if use:
            # A process names itself a moment after it began.
            known.role = role_of(stat.pid, stat.name) if stat.state != "Z" else known.role
            yield self._row(at, v.CHILD_ROLE, known.role, label)
            yield self._row(at, v.CHILD_STARTED_AT, round(stat.started_at, 2), label)
            yield self._row(at, v.CHILD_CPU_SECONDS_TOTAL, stat.cpu_s, label)
            yield self._row(at, v.CHILD_RSS_BYTES, stat.rss_bytes, label)
            yield self._row(at, v.CHILD_THREADS, stat.threads, label)
        yield self._row(at, v.CHILD_STATE, stat.state, label)
        if stat.exit_code is not None:
            yield self._row(at, v.CHILD_EXIT_CODE, stat.exit_code, label)
        asked = use or stat.state in STANDS
        if asked and (where := wait_channel(stat.pid)) is not None:
            yield self._row(at, v.CHILD_WAIT_CHANNEL, where, label)

    def _gone(self, stats: dict[int, Stat], at: float) -> Iterator[Observation]:
        """A row for each child that ended since the last look."""
        for pid, known in list(self._memory.children.items()):
            stat = stats.get(pid) or stat_of(pid)
            if stat is not None and stat.ticks == known.ticks:
                continue
            del self._memory.children[pid]
            yield self._row(at, v.CHILD_STATE, "gone", str(pid))
            why = f"{known.role} (pid {pid}) ended, and its parent took its exit code"
            yield self._row(at, v.CHILD_EXIT_CODE, None, str(pid), missing=why)

    def _row(
        self, at: float, name: str, value: Value, label: str = "", missing: str | None = None
    ) -> Observation:
        return Observation(
            source="process",
            subject=self._member.name,
            name=name,
            at=at,
            label=label,
            value=value,
            missing=missing,
            incarnation=self._memory.life,
        )


def _threads(stats: dict[int, Stat]) -> int:
    return sum(stat.threads for stat in stats.values())


__all__ = ["ChildrenSource"]

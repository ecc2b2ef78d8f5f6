"""Virtual days: what a watch finds in calm days, what it finds when something breaks, and how fast.

For: the false rate of the watching with the bound it proves, and the stalls it missed.
Not for: real engines, whose soak is `benchmarks/watch.py`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.testing.demand import IDLE, LIGHT, SATURATED, STEADY, Clients
from tandem.testing.fleet import Fleet
from tandem.testing.mechanisms import MECHANISMS, Mechanism, break_, heal
from tandem.testing.schedules import DISTURBANCES, MACHINES, SHAPES, spell
from tandem.testing.virtual_time import VirtualClock, run
from tandem.testing.watching import Told, Watch

DAY_S = 86_400.0
STALLS_EVERY_S = 4 * 3600.0
LIMIT_S = 10.0
PATIENCE_S = 180.0
"""A fault that has not been found by then was missed."""
AFTERWARDS_S = 150.0
"""How long after a fault's cure findings may still speak of it, beside the start of the engines."""
CONFIDENCE = 0.95
STALL_KINDS = ("silent-stall", "partial-stall")


@dataclass(frozen=True, slots=True)
class Broke:
    """One fault that was let act, and what became of it."""

    mechanism: str
    demand: str
    machine: str
    seed: int
    found_after_s: float | None
    """Since the last progress, or the first request that never ended, whichever is later."""
    kind: str
    limit_s: float
    partial: bool


@dataclass(slots=True)
class Soak:
    """What came of the days of one or more seeds."""

    days: float = 0.0
    turns: int = 0
    false: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """Findings of calm days that nobody is asked to act on."""
    broke: list[Broke] = field(default_factory=list)
    disturbed: dict[str, int] = field(default_factory=dict)


def virtual_days(
    days: float,
    seeds: Sequence[int],
    *,
    stalls: bool = True,
    tell: Callable[[str], None] = lambda _: None,
    cpu_s_max: float = math.inf,
) -> dict[str, object]:
    """Watch so many virtual days, shared among the seeds; what was found, as plain JSON data.

    Ends early, between two seeds, once `cpu_s_max` is spent: `days` says how far it came. Keys:
    `days`, `turns`, `cpu_s`, `us_per_turn`, `false` (sentences), `false_per_day_max` (upper bound
    at 95 %), `told`, `stalls`, `missed` (sentences), `late` (sentences), `found_after_s` (by
    idle-or-light, busy and partial: count, p50, p99), `disturbances` (by name), `seeds` (done).
    """
    total, done = Soak(), []
    began = time.process_time()
    for seed in seeds:
        if time.process_time() - began > cpu_s_max:
            break
        before = len(total.false)
        soak_seed(seed, days / len(seeds) * DAY_S, total, stalls=stalls)
        done.append(seed)
        for said in total.false[before:]:
            tell(f"false: {said}")
        tell(
            f"seed {seed}: {total.days:.2f} days, {len(total.false)} false, "
            f"{len(total.broke)} faults, {time.process_time() - began:.0f} s of CPU"
        )
    cpu_s = time.process_time() - began
    missed = [_said(one) for one in total.broke if one.found_after_s is None]
    late = [
        _said(one)
        for one in total.broke
        if one.found_after_s is not None and one.found_after_s > one.limit_s
    ]
    return {
        "days": round(total.days, 3),
        "seeds": done,
        "turns": total.turns,
        "cpu_s": round(cpu_s, 1),
        "us_per_turn": round(cpu_s / max(1, total.turns) * 1e6),
        "false": total.false,
        "false_per_day_max": round(bound(len(total.false), total.days), 4),
        "told": _counted(total.told),
        "stalls": len(total.broke),
        "missed": missed,
        "late": late,
        "found_after_s": _delays(total.broke),
        "disturbances": dict(sorted(total.disturbed.items())),
    }


def bound(events: int, days: float) -> float:
    """The rate a day that so many events in so many days leave possible at 95 %.

    For none this is the rule of three: 3 / days. Exact for a Poisson process.
    """
    low, high = 0.0, 10.0 + 4.0 * events
    for _ in range(60):
        mean = (low + high) / 2
        below = sum(
            math.exp(-mean + count * math.log(mean) - math.lgamma(count + 1))
            for count in range(events + 1)
        )
        low, high = (mean, high) if below > 1 - CONFIDENCE else (low, mean)
    return high / days if days else math.inf


def soak_seed(seed: int, seconds: float, into: Soak, *, stalls: bool = True) -> None:
    """The days of one seed: its fleet, its machine and all that happens follow from the seed."""
    clock = VirtualClock()
    names = list(MACHINES)
    machine = names[seed % len(names)]
    prefills, decodes = SHAPES[seed // len(names) % len(SHAPES)]
    fleet = Fleet(clock, seed=seed, prefills=prefills, decodes=decodes, machine=MACHINES[machine])
    run(_Days(fleet, machine, into).live(seconds, stalls=stalls), clock)


class _Days:
    """The days of one fleet."""

    def __init__(self, fleet: Fleet, machine: str, into: Soak) -> None:
        self._fleet = fleet
        self._machine = machine
        self._into = into
        self._watch = Watch(fleet)
        self._clients = Clients(fleet)

    async def live(self, seconds: float, *, stalls: bool) -> None:
        clock = self._fleet.clock
        began, ends_at = clock.world, clock.world + seconds
        broken_at = began
        while clock.world < ends_at:
            await self._calm(ends_at)
            if stalls and clock.world - broken_at > STALLS_EVERY_S:
                await self._break()
                broken_at = clock.world
        await self._watch.close()
        self._into.days += (clock.world - began) / DAY_S
        self._into.turns += self._watch.turns

    async def _calm(self, ends_at: float) -> None:
        fleet, watch = self._fleet, self._watch
        now = spell(fleet)
        self._clients.ask(now.demand)
        counted = self._into.disturbed
        counted[now.disturbance] = counted.get(now.disturbance, 0) + 1
        counted[f"demand {now.demand.name}"] = counted.get(f"demand {now.demand.name}", 0) + 1
        first = len(watch.told)
        lasts_s = max(0.0, min(now.seconds, ends_at - fleet.clock.world - 60.0))
        await watch.watch(60.0)
        fleet.advance()
        DISTURBANCES[now.disturbance](watch)
        await watch.watch(lasts_s)
        for one in watch.told[first:]:
            if one.opened:
                said = (
                    f"seed {fleet.seed} ({self._machine}) at {one.at:.0f}, {now.demand.name}, "
                    f"{now.disturbance}: {one.finding.kind} {one.finding.summary}"
                )
                (self._into.false if one.finding.actionable else self._into.told).append(said)
        watch.told.clear()

    async def _break(self) -> None:
        """Let something break, see whether it is found, mend it, and let all come back."""
        fleet, watch, chance = self._fleet, self._watch, self._fleet.chance
        live = fleet.machine.live_loads
        mechanism = chance.choice(
            [
                one
                for one in MECHANISMS.values()
                if one.expected != "nothing" and (live or not one.needs_live_loads)
            ]
        )
        demand = chance.choice((LIGHT, STEADY) if mechanism.needs_load else (IDLE, LIGHT, STEADY))
        if not mechanism.needs_load and chance.random() < 0.25:
            demand = SATURATED
        self._clients.ask(demand)
        await watch.watch(240.0)
        p99_s = max(side.ttft_p99_s() for side in fleet.prefills.values() if side.ttfts)
        prefill, decode = chance.choice(list(fleet.prefills)), chance.choice(list(fleet.decodes))
        broke_at = fleet.clock.world
        break_(fleet, mechanism.name, prefill, decode)
        found: list[Told] = []

        def tells(one: Told) -> bool:
            if one.opened and _names(mechanism, one):
                found.append(one)
            return bool(found)

        await watch.watch(PATIENCE_S, tells)
        after_s = self._after_s(found[0].at, broke_at, mechanism) if found else None
        busy = demand in (STEADY, SATURATED) or mechanism.needs_load
        self._into.broke.append(
            Broke(
                mechanism=mechanism.name,
                demand=demand.name,
                machine=self._machine,
                seed=fleet.seed,
                found_after_s=after_s,
                kind=found[0].finding.kind if found else "",
                limit_s=max(LIMIT_S, 3 * p99_s) if busy else LIMIT_S,
                partial=mechanism.partial,
            )
        )
        self._clients.ask(IDLE)
        for room in fleet.open_rooms():
            fleet.hang_up(room, "left")
        heal(fleet)
        machine = fleet.machine
        await watch.watch(machine.load_s + machine.warm_s + machine.compile_s + AFTERWARDS_S)
        watch.told.clear()

    def _after_s(self, found_at: float, broke_at: float, mechanism: Mechanism) -> float:
        """Seconds from the last progress, or the first request that never ended, to the finding."""
        hung = [room.arrived_at for room in self._fleet.open_rooms()]
        first = max(broke_at, min(hung, default=broke_at))
        if mechanism.expected != "stall":
            first = broke_at
        if mechanism.partial:
            return found_at - first
        return found_at - max(first, self._fleet.completed_at)


def _names(mechanism: Mechanism, one: Told) -> bool:
    """Whether a finding is the one to be found."""
    if mechanism.kinds:
        return one.finding.kind in mechanism.kinds
    return one.finding.kind in STALL_KINDS


def _said(one: Broke) -> str:
    after = "never" if one.found_after_s is None else f"after {one.found_after_s:.1f} s"
    return (
        f"{one.mechanism} under {one.demand} on {one.machine} (seed {one.seed}): found {after}, "
        f"at most {one.limit_s:.0f} s"
    )


def _delays(broke: Sequence[Broke]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[float]] = {}
    for one in broke:
        if one.found_after_s is None:
            continue
        quiet = one.demand in ("idle", "light")
        name = "partial" if one.partial else "idle-or-light" if quiet else "busy"
        groups.setdefault(name, []).append(one.found_after_s)
    return {
        name: {
            "count": len(delays),
            "p50": round(_share(delays, 0.5), 2),
            "p99": round(_share(delays, 0.99), 2),
        }
        for name, delays in sorted(groups.items())
    }


def _share(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _counted(told: Sequence[str]) -> dict[str, int]:
    """Findings that ask for nothing, by kind."""
    counts: dict[str, int] = {}
    for said in told:
        kind = said.partition(": ")[2].split(" ", 1)[0]
        counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))


__all__ = ["Broke", "Soak", "bound", "soak_seed", "virtual_days"]

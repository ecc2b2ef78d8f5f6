"""A router that disagrees with its engines: routed requests hang while direct ones complete.

For: `router-disagrees`. Not for: a router that is down (`down`), or a stalled path (`stall`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.detect.settled import settled_at
from tandem.detect.waiting import PROBE_FRESH_S, completed_probe
from tandem.facts import Facts
from tandem.records import Member, Observation, Role
from tandem.records import vocabulary as v

SHUT_S = 150.0
"""A breaker that opened for a good reason tries again within a minute, and health checks are a
minute apart: a worker refused for longer than this is refused for no reason any more."""
LOST_S = 60.0
"""A request that the router has had open for this long, and no engine has: nobody answers it."""
EMPTY_LOOKS_MIN = 4
OUT_STILL_S = 0.5
"""How long after the engines were seen empty a routed probe must have been out still: the look that
tells its end may be the next."""
ONE_LOOK_S = 0.6
"""Looks at several engines within this are one."""
SERVED_S = 10.0
"""How long before the last routed miss a direct probe may have ended."""
MISSES_MIN = 2
"""Routed probes that must go wrong in a row: one may have met a blip that is over."""
MISSED = ("late", "stuck", "failed")
REFUSED = "failed"
RETRIES_S = 70.0
CALM_S = 5.0
"""After an engine came back, probes sent meanwhile may still fail for this long."""
APART_S = 2.0
"""Two misses closer together than this are one event."""


def disagreements(facts: Facts) -> list[Candidate]:
    """Every router that holds or refuses what its engines would serve."""
    return [
        found
        for one in facts.deployment.of(Role.ROUTER)
        if (found := _disagrees(facts, one) or _shut(facts, one) or _lost(facts, one))
    ]


def _disagrees(facts: Facts, router: Member) -> Candidate | None:
    newest = facts.latest(router.name, v.PROBE)
    if newest is None or newest.value == "completed":
        return None
    misses = _misses(facts, router.name)
    if len(misses) < MISSES_MIN or facts.now - misses[-1].at > PROBE_FRESH_S:
        return None
    alive = facts.latest(router.name, v.ALIVE)
    answer = facts.last(router.name, v.ROUTER_REQUESTS_TOTAL)
    if (alive and alive.value is False) or (answer and answer.missing is not None):
        # A router that is away disagrees with nobody.
        return None
    cells = facts.deployment.cells()
    served = [seen for cell in cells if (seen := _served_meanwhile(facts, cell.subject, misses))]
    if not cells or len(served) < len(cells):
        return None
    cited = _empty_together(facts, misses[0].at, misses[-1].at - OUT_STILL_S)
    if not cited:
        return None
    said = (
        f"{len(misses)} probes in a row through {router.name} got no answer ({misses[-1].value}) "
        f"while direct probes of every path completed"
    )
    idle = "no engine holds a request: every queue was empty"
    return Candidate(
        kind="router-disagrees",
        subject=router.name,
        members=(router.name,),
        onset_at=misses[0].at,
        summary=f"{router.name} disagrees with its engines: {said}, and {idle}",
        witnesses=(
            client(said, (*(s.id for s in misses), *(s.id for s in served))),
            server(idle, tuple(cited)),
        ),
    )


def _empty_together(facts: Facts, since: float, until: float) -> tuple[int, ...]:
    """The looks of one moment at which no engine held a request; () when there was none.

    Engines that show no live queue say nothing; where none does there is no such moment.
    """
    empty: list[dict[float, int]] = []
    for engine in (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE)):
        levels: dict[float, float] = {}
        ids: dict[float, int] = {}
        for name, _ in signs.QUEUES[engine.role]:
            for sample in facts.numbers(engine.name, name, since=since, source=signs.LIVE):
                levels[sample.at] = levels.get(sample.at, 0.0) + sample.value
                ids[sample.at] = sample.id
        if levels:
            empty.append({at: ids[at] for at, level in levels.items() if not level and at <= until})
    if not empty:
        return ()
    for moment in sorted(empty[0], reverse=True):
        near = [
            next((cite for at, cite in one.items() if abs(at - moment) <= ONE_LOOK_S), None)
            for one in empty
        ]
        if None not in near:
            return tuple(cite for cite in near if cite is not None)
    return ()


def _served_meanwhile(facts: Facts, cell: str, misses: list[Observation]) -> Observation | None:
    """The newest direct probe that ended well between the first and the last routed miss.

    A routed one that is looked at less often than the direct one would seem to hang when a line in
    which both waited has just moved on.
    """
    since = max(misses[0].at, misses[-1].at - SERVED_S)
    rows = (seen for seen in reversed(facts.rows(cell, v.PROBE)) if seen.at <= misses[-1].at)
    return next((seen for seen in rows if seen.value == "completed" and seen.at >= since), None)


def _misses(facts: Facts, router: str) -> list[Observation]:
    """The probes through a router that went wrong since the last that completed.

    Not those of a time when a member was away or had just come back, and of several at once one.
    """
    begun_at = signs.begun_at(facts, router)
    calm_since = float("-inf") if begun_at is None else begun_at + signs.STARTED_LATELY_S
    for engine in facts.deployment.members:
        if engine.role is not Role.ROUTER:
            answered_at = settled_at(facts, engine.name)
            if answered_at is None:
                return []
            calm_since = max(calm_since, answered_at + CALM_S)
    misses: list[Observation] = []
    for seen in reversed(facts.rows(router, v.PROBE)):
        if seen.value == "completed" or seen.at < calm_since:
            break
        if seen.value == REFUSED and seen.at < calm_since + RETRIES_S:
            # A breaker that opened when an engine went away tries again within a minute.
            break
        if seen.value in MISSED and (not misses or misses[0].at - seen.at >= APART_S):
            misses.insert(0, seen)
    return misses


def _shut(facts: Facts, router: Member) -> Candidate | None:
    """A worker that the router refuses, though every path to it serves whoever asks directly."""
    engines = (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE))
    for engine in engines:
        for name, value, said in (
            (v.WORKER_BREAKER_OPEN, True, "has kept its breaker open against"),
            (v.WORKER_HEALTHY, False, "has counted as unhealthy"),
        ):
            rows = facts.rows(router.name, name, engine.name)
            if not rows or rows[-1].value is not value:
                continue
            since = signs.held_since(rows, value)
            if since is None or facts.now - since.at < SHUT_S:
                continue
            served = _served(facts, engine, facts.now - SHUT_S)
            if served is None:
                continue
            refuses = server(
                f"{router.name} {said} {engine.name} for {facts.now - since.at:.0f} s",
                (since.id, rows[-1].id),
            )
            direct = client(f"every direct probe through {engine.name} completed meanwhile", served)
            return Candidate(
                kind="router-disagrees",
                subject=router.name,
                members=(router.name,),
                onset_at=since.at,
                summary=f"{router.name} disagrees with its engines: {refuses.statement}, while "
                f"{direct.statement}",
                witnesses=(direct, refuses),
            )
    return None


def _served(facts: Facts, engine: Member, since: float) -> tuple[int, ...] | None:
    """The newest direct probe of each cell of an engine, when none went wrong since."""
    cited = []
    for cell in facts.deployment.cells():
        if engine.name not in (cell.prefill, cell.decode):
            continue
        rows = [seen for seen in facts.rows(cell.subject, v.PROBE) if seen.at >= since]
        if not rows or any(seen.value in MISSED for seen in rows):
            return None
        fresh = completed_probe(facts, cell.subject, facts.now - PROBE_FRESH_S)
        if fresh is None:
            return None
        cited.append(fresh.id)
    return tuple(cited) or None


def _lost(facts: Facts, router: Member) -> Candidate | None:
    """Requests that the router has open and no engine has: their answers went astray.

    Told only: a client that reads slowly looks the same, and no restart brings an answer back.
    """
    newest = facts.latest(router.name, v.ROUTER_ACTIVE_REQS)
    if newest is None or not isinstance(newest.value, int | float) or newest.value < 1:
        return None
    since = facts.now - LOST_S
    samples = facts.numbers(router.name, v.ROUTER_ACTIVE_REQS, since=since - LOST_S)
    over = signs.covering(samples, since, facts.now)
    if over is None:
        return None
    least = min(sample.value for sample in over)
    empty = _nothing_on_engines(facts, since) if least >= 1 else None
    if empty is None:
        return None
    held = client(
        f"{router.name} has had {least:.0f} or more requests open for {LOST_S:.0f} s",
        (over[0].id, over[-1].id),
    )
    idle = server("its engines had none, again and again", empty)
    free = [sample.at for sample in samples if sample.value < 1]
    onset_at = next(sample.at for sample in samples if not free or sample.at > free[-1])
    return Candidate(
        kind="router-disagrees",
        subject=router.name,
        members=(router.name,),
        onset_at=onset_at,
        summary=f"{router.name} disagrees with its engines: {held.statement}, while "
        f"{idle.statement}: an answer was lost, or its client reads slowly",
        witnesses=(held, idle),
        actionable=False,
    )


def _nothing_on_engines(facts: Facts, since: float) -> tuple[int, ...] | None:
    """Looks at which no engine held or ran anything, often enough and over half of the time.

    Not merely fewer than are open: a request is on no engine while it is being tokenized or sent.
    """
    levels: dict[int, dict[str, float]] = {}
    cited: dict[int, int] = {}
    for engine in (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE)):
        for name in _names(engine):
            samples = facts.numbers(engine.name, name, since=since, source=signs.LIVE)
            if samples and sum(not sample.value for sample in samples) < EMPTY_LOOKS_MIN:
                return None
            for sample in samples:
                levels.setdefault(int(sample.at), {})[f"{engine.name} {name}"] = sample.value
                cited.setdefault(int(sample.at), sample.id)
    seen = {key for at in levels.values() for key in at}
    empty = [
        at
        for at, level in sorted(levels.items())
        if level.keys() == seen and not any(level.values())
    ]
    if len(empty) < EMPTY_LOOKS_MIN or empty[-1] - empty[0] < LOST_S / 2:
        return None
    return tuple(cited[at] for at in (empty[0], empty[-1]))


def _names(engine: Member) -> tuple[str, ...]:
    return tuple({name: None for name, _ in signs.QUEUES[engine.role]} | {v.RUNNING_REQS: None})

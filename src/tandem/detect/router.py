"""A router that disagrees with its engines: routed requests hang while direct ones complete.

For: `router-disagrees`. Not for: a router that is down (`down`), or a stalled path (`stall`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.detect.settled import settled_at
from tandem.detect.waiting import PROBE_FRESH_S, completed_probe
from tandem.facts import Facts
from tandem.records import Member, Observation, Role, Thresholds
from tandem.records import vocabulary as v

MISSES_MIN = 2
"""Routed probes that must go wrong in a row: one may have met a blip that is over."""
MISSED = ("late", "stuck", "failed")
CALM_S = 5.0
"""After an engine came back, probes sent meanwhile may still fail for this long."""
APART_S = 2.0
"""Two misses closer together than this are one event."""


def disagreements(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """Every router that holds or refuses what its engines would serve."""
    routers = facts.deployment.of(Role.ROUTER)
    return [found for one in routers if (found := _disagrees(facts, one, thresholds))]


def _disagrees(facts: Facts, router: Member, thresholds: Thresholds) -> Candidate | None:
    misses = _misses(facts, router.name)
    if len(misses) < MISSES_MIN or facts.now - misses[-1].at > PROBE_FRESH_S:
        return None
    alive = facts.latest(router.name, v.ALIVE)
    answer = facts.last(router.name, v.ROUTER_REQUESTS_TOTAL)
    if (alive and alive.value is False) or (answer and answer.missing is not None):
        # A router that is away disagrees with nobody.
        return None
    cells = facts.deployment.cells()
    direct = [completed_probe(facts, cell.subject, misses[0].at) for cell in cells]
    served = [seen for seen in direct if seen is not None and seen.at >= misses[-1].at - 10.0]
    if not cells or len(served) < len(cells):
        return None
    engines = (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE))
    cited: list[int] = []
    for engine in engines:
        for name, _ in signs.QUEUES[engine.role]:
            low = signs.floor(facts, engine.name, name, thresholds.floor_s)
            if low is not None and low.value > 0:
                return None
            cited.extend(low.evidence if low else ())
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


def _misses(facts: Facts, router: str) -> list[Observation]:
    """The probes through a router that went wrong since the last that completed.

    Not those of a time when a member was away or had just come back, and of several at once one.
    """
    life = facts.incarnation(router)
    calm_since = float("-inf") if life is None else life.started_at + signs.STARTED_LATELY_S
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
        if seen.value in MISSED and (not misses or misses[0].at - seen.at >= APART_S):
            misses.insert(0, seen)
    return misses

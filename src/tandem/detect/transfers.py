"""Hand-offs that fail aloud: transfer failures that keep rising.

For: `transfer-failures-rising`. Not for: the handful that a restart or a client's abort causes.
"""

import itertools

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.detect.settled import settled_at
from tandem.detect.waiting import PROBE_FRESH_S
from tandem.facts import Facts, Reading, Sample
from tandem.records import Path, Role, Witness
from tandem.records import vocabulary as v

COUNTERS = (v.TRANSFER_FAILED_TOTAL, v.BOOTSTRAP_FAILED_TOTAL)
RISING_S = 60.0
"""How far back a rise counts as going on."""
RISES_MIN = 2
"""One jump is an event; a second, later one is a state."""
FAILURES_MIN = 3
SERVER_ERRORS = ("500", "502", "503", "504")
RESTART_SHADOW_S = 15.0
"""Failures this close to the start of either side are that restart's."""


def failing(facts: Facts) -> list[Candidate]:
    """Every cell whose hand-offs keep failing while nobody restarts or aborts."""
    counting = {one.name for one in facts.deployment.members if _counts(facts, one.name)}
    cells = facts.deployment.cells() if counting else ()
    return [
        found
        for cell in cells
        if counting & {cell.prefill, cell.decode} and (found := _rising(facts, cell))
    ]


def _rising(facts: Facts, cell: Path) -> Candidate | None:
    sides = {name: _rises(facts, cell, name) for name in (cell.prefill, cell.decode)}
    count = {name: sum(by for _, by in rises) for name, rises in sides.items()}
    loud = max(count, key=lambda name: (count[name], name))
    rises = sides[loud]
    aborted = signs.grown(facts, loud, v.ABORTED_TOTAL, RISING_S)
    unexplained = count[loud] - (aborted.value if aborted else 0.0)
    if len(rises) < RISES_MIN or unexplained < FAILURES_MIN:
        return None
    if facts.now - rises[-1][0].at > RISING_S / 2:
        return None
    said = f"{loud} counted {count[loud]:.0f} failed hand-offs in the last {RISING_S:.0f} s"
    own = server(said, (rises[0][0].id, rises[-1][0].id))
    other = _second(facts, cell, sides, loud)
    if other is None:
        return None
    return Candidate(
        kind="transfer-failures-rising",
        subject=cell.subject,
        members=(cell.prefill, cell.decode),
        onset_at=rises[0][0].at,
        summary=f"hand-offs on {cell.subject} keep failing: {said}, and {other.statement}",
        witnesses=(other, own),
    )


def _counts(facts: Facts, member: str) -> bool:
    """Whether any failure was ever counted in this life: a quick first look."""
    newest = [facts.latest(member, name) for name in COUNTERS]
    return any(seen is not None and seen.value not in (0, None) for seen in newest)


def _rises(facts: Facts, cell: Path, member: str) -> list[tuple[Sample, float]]:
    """Each look at which a failure counter had risen, no restart near, with by how much."""
    rises = [
        (later, later.value - earlier.value)
        for name in COUNTERS
        for earlier, later in itertools.pairwise(
            facts.numbers(member, name, since=facts.now - RISING_S)
        )
        if later.value > earlier.value
    ]
    rises.sort()
    # A counter does not say with which of its peers a hand-off failed.
    peers = {
        name
        for one in facts.deployment.cells()
        for name in (one.prefill, one.decode)
        if member in (one.prefill, one.decode)
    } | {cell.prefill, cell.decode}
    calm = [_calm_since(facts, name) for name in sorted(peers)] if rises else []
    if not rises or None in calm:
        return []
    calm_since = max(at for at in calm if at is not None)
    starts = [life.started_at for name in peers for life in signs.lives(facts, name)]
    return [
        (later, by)
        for later, by in rises
        if later.at >= calm_since
        and not any(abs(later.at - at) < RESTART_SHADOW_S for at in starts)
    ]


def _calm_since(facts: Facts, member: str) -> float | None:
    """From when on failures are not those of a restart, however long it loaded; None: not yet."""
    alive = facts.latest(member, v.ALIVE)
    answered_at = settled_at(facts, member)
    if answered_at is None or (alive is not None and alive.value is False):
        return None
    restarted = len(signs.lives(facts, member)) > 1
    return answered_at + RESTART_SHADOW_S if restarted else float("-inf")


def _second(
    facts: Facts, cell: Path, sides: dict[str, list[tuple[Sample, float]]], loud: str
) -> Witness | None:
    """A failed or overdue probe of the cell, the other engine counting too, or failed answers."""
    probe = facts.latest(cell.subject, v.PROBE)
    fresh = probe is not None and facts.now - probe.at <= PROBE_FRESH_S
    if probe is not None and fresh and probe.value in ("failed", "late", "stuck"):
        return client(f"the probe of {cell.subject} was {probe.value}", (probe.id,))
    for name, rises in sides.items():
        if name != loud and rises:
            by = Reading(sum(step for _, step in rises), (rises[0][0].id, rises[-1][0].id))
            return server(f"{name} counted {by.value:.0f} as well", by.evidence)
    return _errors(facts)


def _errors(facts: Facts) -> Witness | None:
    """A router that answered its clients with HTTP 5xx meanwhile."""
    since = facts.now - RISING_S
    for router in facts.deployment.of(Role.ROUTER):
        for status in SERVER_ERRORS:
            grown = facts.growth(router.name, v.ROUTER_RESPONSES_TOTAL, status, since=since)
            if grown is not None and grown.value > 0:
                return client(
                    f"{router.name} answered {grown.value:.0f} requests with HTTP {status}",
                    grown.evidence,
                )
    return None

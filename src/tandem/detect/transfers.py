"""Hand-offs that fail aloud: transfer failures that keep rising.

For: `transfer-failures-rising`. Not for: the handful that a restart or a client's abort causes.
"""

import itertools

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.detect.waiting import PROBE_FRESH_S
from tandem.facts import Facts, Reading, Sample
from tandem.records import Path, Witness
from tandem.records import vocabulary as v

RISING_S = 60.0
"""How far back a rise counts as going on."""
RISES_MIN = 2
"""One jump is an event; a second, later one is a state."""
FAILURES_MIN = 3
RESTART_SHADOW_S = 15.0
"""Failures this close to the start of either side are that restart's."""


def failing(facts: Facts) -> list[Candidate]:
    """Every cell whose hand-offs keep failing while nobody restarts or aborts."""
    cells = facts.deployment.cells()
    return [found for cell in cells if (found := _rising(facts, cell))]


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


def _rises(facts: Facts, cell: Path, member: str) -> list[tuple[Sample, float]]:
    """Each look at which the failure counter had risen, no restart near, with by how much."""
    samples = facts.numbers(member, v.TRANSFER_FAILED_TOTAL, since=facts.now - RISING_S)
    rises = [
        (later, later.value - earlier.value)
        for earlier, later in itertools.pairwise(samples)
        if later.value > earlier.value
    ]
    if not rises:
        return []
    starts = [
        life.started_at for name in (cell.prefill, cell.decode) for life in signs.lives(facts, name)
    ]
    return [
        (later, by)
        for later, by in rises
        if not any(abs(later.at - at) < RESTART_SHADOW_S for at in starts)
    ]


def _second(
    facts: Facts, cell: Path, sides: dict[str, list[tuple[Sample, float]]], loud: str
) -> Witness | None:
    """A failed or overdue probe of the cell, or the other engine counting failures too."""
    probe = facts.latest(cell.subject, v.PROBE)
    fresh = probe is not None and facts.now - probe.at <= PROBE_FRESH_S
    if probe is not None and fresh and probe.value in ("failed", "late", "stuck"):
        return client(f"the probe of {cell.subject} was {probe.value}", (probe.id,))
    for name, rises in sides.items():
        if name != loud and rises:
            by = Reading(sum(step for _, step in rises), (rises[0][0].id, rises[-1][0].id))
            return server(f"{name} counted {by.value:.0f} as well", by.evidence)
    return None

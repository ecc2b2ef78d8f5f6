"""Detect: from facts and the findings still open to the findings as they stand now.

For: noticing that a path stalls, a member is away, hand-offs fail or the router disagrees, each by
two witnesses; one finding per cause; and closing what is over. Not for: saying why (`diagnose`).

Wants facts over the last 120 s (180 s when a path is busy). Pure: the same facts and open
findings give the same answer.
"""

from collections.abc import Sequence

import msgspec

from tandem.detect.candidate import Candidate
from tandem.detect.down import away
from tandem.detect.partial import partial
from tandem.detect.router import disagreements
from tandem.detect.silent import silent
from tandem.detect.slow import slow
from tandem.detect.transfers import failing
from tandem.facts import Facts
from tandem.records import Finding, Thresholds

__all__ = ["detect"]

STALLS = ("silent-stall", "partial-stall")
"""One cause in two degrees: the silent one swallows the partial one and keeps its onset."""
LOOK_BACK_S = 2.0
"""How far apart the moments are at which an open finding is looked for before it closes."""


def detect(
    facts: Facts, open_findings: Sequence[Finding], thresholds: Thresholds
) -> tuple[Finding, ...]:
    """The findings as they stand at `facts.now`: new ones, continuing ones, and those just closed.

    A continuing finding is returned unchanged. One that is closed has `closed_at` set, is returned
    this once, and closes for one of three reasons: a member it speaks of began another life, a
    graver finding of the same cause took over (a partial stall that became silent hands on its
    onset, and closes in the very turn in which the silent one opens), or nothing was seen of it
    for `clear_s`.
    """
    candidates = _candidates(facts, thresholds)
    standing: list[Finding] = []
    closed: list[Finding] = []
    for finding in open_findings:
        if finding.closed_at is not None:
            continue
        if _stands(facts, finding, candidates, thresholds):
            standing.append(finding)
        else:
            closed.append(msgspec.structs.replace(finding, closed_at=facts.now))
    opened = []
    for candidate in candidates:
        if any(_continues(candidate, finding) for finding in standing):
            continue
        before = [one for one in closed if _grew(candidate, one)]
        onset_at = min([candidate.onset_at, *(one.onset_at for one in before)])
        opened.append(candidate.finding(facts, onset_at))
    found = (*standing, *opened, *closed)
    return tuple(sorted(found, key=lambda one: (one.closed_at is not None, one.onset_at, one.id)))


def _candidates(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """What looks wrong at this moment, the consequences of a graver cause left out."""
    kept = away(facts, thresholds)
    for offered in (
        silent(facts, thresholds),
        partial(facts, thresholds),
        failing(facts),
        disagreements(facts, thresholds),
        slow(facts),
    ):
        told = {member for one in kept for member in one.members}
        stalled = any(one.kind in STALLS for one in kept)
        for candidate in offered:
            if candidate.kind == "router-disagrees" and stalled:
                continue
            if not told.intersection(candidate.members):
                kept.append(candidate)
    return kept


def _stands(
    facts: Facts, finding: Finding, candidates: Sequence[Candidate], thresholds: Thresholds
) -> bool:
    """Whether an open finding still holds: seen now, or at some moment of the last `clear_s`."""
    for member, life in finding.incarnations.items():
        present = facts.incarnation(member)
        if present is not None and present.id != life:
            return False
    if any(_continues(candidate, finding) for candidate in candidates):
        return True
    if any(_swallows(candidate, finding) for candidate in candidates):
        return False
    if facts.now - finding.found_at < thresholds.clear_s:
        return True
    for step in range(1, int(thresholds.clear_s / LOOK_BACK_S) + 1):
        moment = facts.now - step * LOOK_BACK_S
        then = _candidates(facts.at(moment), thresholds)
        if any(_continues(candidate, finding) for candidate in then):
            return True
    return False


def _continues(candidate: Candidate, finding: Finding) -> bool:
    """Whether a candidate is what an open finding already tells: same cause, no graver."""
    if finding.kind == "silent-stall" and candidate.kind in STALLS:
        return bool(_about(finding).intersection(candidate.members))
    return candidate.kind == finding.kind and candidate.subject == finding.subject


def _swallows(candidate: Candidate, finding: Finding) -> bool:
    """Whether a candidate is a graver form, or the cause, of an open finding."""
    touched = bool(_about(finding).intersection(candidate.members))
    if candidate.kind == "member-down":
        return touched and finding.kind != "member-down"
    if candidate.kind == "silent-stall":
        routed = finding.kind == "router-disagrees"
        return finding.kind != "member-down" and (touched or routed)
    if candidate.kind == "partial-stall":
        return touched and finding.kind in ("transfer-failures-rising", "slow-but-moving")
    return False


def _grew(candidate: Candidate, finding: Finding) -> bool:
    """Whether a finding closed in this turn was the beginning of this candidate."""
    same = bool(_about(finding).intersection(candidate.members))
    return candidate.kind == "silent-stall" and finding.kind == "partial-stall" and same


def _about(finding: Finding) -> set[str]:
    """The members a finding speaks of."""
    return {*finding.incarnations, *finding.subject.split(">")}

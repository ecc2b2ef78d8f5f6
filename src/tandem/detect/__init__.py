"""Detect: from facts and the findings still open to the findings as they stand now.

For: noticing that a path stalls, a member is away, hand-offs fail or the router disagrees, each by
two witnesses; one finding per cause; and closing what is over. Not for: saying why (`diagnose`).

Wants facts over the last 120 s (180 s when a path is busy). Pure: the same facts and known
findings give the same answer. A quiet deployment costs a turn almost nothing: every rule looks
first whether anything is held, late, red or restarted at all.
"""

from collections.abc import Callable, Sequence

import msgspec

from tandem.detect.candidate import Candidate
from tandem.detect.corrupted import corrupted
from tandem.detect.down import away
from tandem.detect.headless import headless
from tandem.detect.health import lying
from tandem.detect.partial import partial
from tandem.detect.paused import paused
from tandem.detect.restarts import hazards, restarting
from tandem.detect.router import disagreements
from tandem.detect.silent import silent
from tandem.detect.slow import slow
from tandem.detect.transfers import failing
from tandem.detect.watched import watched_since
from tandem.facts import Facts
from tandem.records import Finding, Thresholds

__all__ = ["RECURS_S", "detect"]

STALLS = ("silent-stall", "partial-stall")
"""One cause in two degrees: the silent one swallows the partial one and keeps its onset."""
AWAY = ("member-paused", "member-restarting", "member-down")
"""A member that is not there explains what its paths do, whatever that looks like."""
GRAVER = {
    "member-paused": ("member-down",),
    "member-restarting": ("member-down",),
    "silent-stall": ("partial-stall",),
}
"""What takes over from what, beside what `AWAY` and a stall explain."""
STALL_EXPLAINS = ("transfer-failures-rising", "health-lies", "restart-hazard", "slow-but-moving")
LOOK_BACK_S = 2.0
"""How far apart the moments are at which an open finding is looked for before it closes."""
RECURS_S = 600.0
"""What comes back within this long after it cleared, in the same lives, is the same finding."""

Rule = Callable[[Facts, Thresholds], list[Candidate]]

RULES: tuple[Rule, ...] = (
    lambda facts, _: paused(facts),
    lambda facts, _: restarting(facts),
    lambda facts, _: headless(facts),
    away,
    silent,
    partial,
    lambda facts, _: failing(facts),
    lying,
    lambda facts, _: disagreements(facts),
    hazards,
    lambda facts, _: corrupted(facts),
    lambda facts, _: slow(facts),
)
"""Gravest first: what a graver one tells of a member, a lesser one does not tell again."""


def detect(facts: Facts, known: Sequence[Finding], thresholds: Thresholds) -> tuple[Finding, ...]:
    """The findings as they stand at `facts.now`: new ones, continuing ones, and those just closed.

    `known` are the findings that are open, and those that closed within `RECURS_S`, as far as the
    caller remembers them: one of these that is seen again, in the same lives, is open again under
    its own id. A continuing finding is returned unchanged, unless it has come to call for action.
    One that is closed has `closed_at` set, is returned this once, and closes for one of three
    reasons: a member it speaks of began another life, a graver finding of the same cause took over
    (a partial stall that became silent hands on its onset, and closes in the very turn in which
    the silent one opens), or nothing was seen of it for `clear_s` in which somebody looked.
    """
    candidates = _candidates(facts, thresholds)
    standing: list[Finding] = []
    closed: list[Finding] = []
    past: list[Finding] = []
    for finding in known:
        if finding.closed_at is not None:
            if facts.now - finding.closed_at <= RECURS_S and not _outlived(facts, finding):
                past.append(finding)
        elif _stands(facts, finding, candidates, thresholds):
            standing.append(_as_it_stands(finding, candidates))
        else:
            closed.append(msgspec.structs.replace(finding, closed_at=facts.now))
    opened: list[Finding] = []
    for candidate in candidates:
        if any(_continues(candidate, finding) for finding in (*standing, *opened)):
            continue
        again = next((one for one in past if _continues(candidate, one)), None)
        if again is not None:
            opened.append(candidate.again(again))
            continue
        before = [one for one in closed if _grew(candidate, one)]
        onset_at = min([candidate.onset_at, *(one.onset_at for one in before)])
        opened.append(candidate.finding(facts, onset_at))
    found = (*standing, *opened, *closed)
    return tuple(sorted(found, key=lambda one: (one.closed_at is not None, one.onset_at, one.id)))


def _candidates(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """What looks wrong at this moment, the consequences of a graver cause left out."""
    kept: list[Candidate] = []
    told: set[str] = set()
    for rule in RULES:
        stalled = any(one.kind in STALLS for one in kept)
        found = [
            one
            for one in rule(facts, thresholds)
            if not told.intersection(one.members)
            and not (stalled and one.kind == "router-disagrees")
        ]
        kept += found
        told.update(member for one in found if one.actionable for member in one.members)
    return kept


def _stands(
    facts: Facts, finding: Finding, candidates: Sequence[Candidate], thresholds: Thresholds
) -> bool:
    """Whether an open finding still holds: seen now, or at some moment of the last `clear_s`."""
    if _outlived(facts, finding):
        return False
    if any(_continues(candidate, finding) for candidate in candidates):
        return True
    if any(_swallows(candidate, finding) for candidate in candidates):
        return False
    if 0.0 <= facts.now - finding.found_at < thresholds.clear_s:
        return True
    looked_s = facts.now - watched_since(facts)
    if looked_s < thresholds.clear_s + max(thresholds.floor_s, thresholds.flat_s):
        # Nobody looked for a while: that nothing is seen now says nothing yet.
        return True
    for step in range(1, int(thresholds.clear_s / LOOK_BACK_S) + 1):
        moment = facts.now - step * LOOK_BACK_S
        then = _candidates(facts.at(moment), thresholds)
        if any(_continues(candidate, finding) for candidate in then):
            return True
    return False


def _outlived(facts: Facts, finding: Finding) -> bool:
    """Whether a member a finding speaks of began another life since."""
    for member, life in finding.incarnations.items():
        present = facts.incarnation(member)
        if present is not None and present.id != life:
            return True
    return False


def _as_it_stands(finding: Finding, candidates: Sequence[Candidate]) -> Finding:
    """A continuing finding: unchanged, unless what was only told now calls for action."""
    if finding.actionable:
        return finding
    for candidate in candidates:
        if candidate.actionable and _continues(candidate, finding):
            return candidate.escalated(finding)
    return finding


def _continues(candidate: Candidate, finding: Finding) -> bool:
    """Whether a candidate is what a finding already tells: same cause, no graver."""
    if finding.kind == "silent-stall" and candidate.kind in STALLS:
        return bool(_about(finding).intersection(candidate.members))
    return candidate.kind == finding.kind and candidate.subject == finding.subject


def _swallows(candidate: Candidate, finding: Finding) -> bool:
    """Whether a candidate is a graver form, or the cause, of an open finding."""
    if finding.kind in GRAVER.get(candidate.kind, ()):
        return bool(_about(finding).intersection(candidate.members))
    if candidate.kind in AWAY:
        touched = bool(_about(finding).intersection(candidate.members))
        return candidate.actionable and touched and finding.kind not in AWAY
    if candidate.kind == "silent-stall" and finding.kind == "router-disagrees":
        return True
    if candidate.kind in STALLS:
        touched = bool(_about(finding).intersection(candidate.members))
        return touched and finding.kind in STALL_EXPLAINS
    return False


def _grew(candidate: Candidate, finding: Finding) -> bool:
    """Whether a finding closed in this turn was the beginning of this candidate."""
    same = bool(_about(finding).intersection(candidate.members))
    return candidate.kind == "silent-stall" and finding.kind == "partial-stall" and same


def _about(finding: Finding) -> set[str]:
    """The members a finding speaks of."""
    return {*finding.incarnations, *finding.subject.split(">")}

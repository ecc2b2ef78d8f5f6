"""Diagnose: a verdict per failure mode and per change, and the hunch answered by name.

For: deterministic differential diagnosis from facts and findings. Not for: knowing any failure
mode (they are given), acting, or guessing: where evidence cannot split what is left, the verdict
is undetermined and names the observation that would.

Wants facts since before the first restart in question (3600 s by default) and the whole ledger.
Pure: the same facts, findings, modes and hunch give the same bytes.
"""

import hashlib
from collections.abc import Sequence

from tandem.diagnose.changes import judge_changes, suspected
from tandem.diagnose.hunch import answer_hunch
from tandem.diagnose.observe_next import asked_for, splits, unseen
from tandem.diagnose.weigh import Weighed, weigh
from tandem.facts import Facts
from tandem.ports import Mode
from tandem.records import Diagnosis, Finding, ModeVerdict, RuledOut, TestResult

__all__ = ["asked_for", "diagnose", "knowledge_version"]

HARNESS = 1
"""Raised whenever the harness itself would judge the same answers differently."""


def diagnose(
    facts: Facts, findings: Sequence[Finding], modes: Sequence[Mode], hunch: str | None
) -> Diagnosis:
    """Weigh every mode on the sick path, judge every change, answer the hunch."""
    finding = _chosen(findings)
    subject = _subject(facts, finding)
    weighed = weigh(modes, facts, subject, finding)
    cause = _cause(weighed)
    mode = next((one for one in modes if cause is not None and one.slug == cause.mode), None)
    mechanism, split = None, None
    if mode is not None and mode.split is not None:
        mechanism, split = mode.split(facts, subject)
    suspects = () if mode is not None else suspected(modes, weighed.modes)
    changes = judge_changes(facts, subject, finding, mode, suspects)
    following = None if weighed.verdict in ("none", "confirmed") else splits(weighed.modes)
    if weighed.verdict == "undetermined" and following is None:
        following = unseen(facts)
    return Diagnosis(
        knowledge_version=knowledge_version(modes),
        verdict=weighed.verdict,
        cause=cause.mode if cause is not None else None,
        incident_class=cause.incident_class if cause is not None else None,
        mechanism=mechanism,
        confidence_note=_confidence(weighed, cause, mechanism, split, following),
        modes=weighed.modes,
        ruled_out=tuple(_ruled_out(one) for one in weighed.modes if one.standing == "ruled_out"),
        changes=changes,
        hunch=(
            answer_hunch(hunch, modes, weighed.modes, changes) if hunch and hunch.strip() else None
        ),
        next_observation=following,
        subject=subject if finding is not None else None,
    )


def knowledge_version(modes: Sequence[Mode]) -> str:
    """Names what judged: the harness, how many modes, and a hash over all of them."""
    known = sorted(f"{mode.slug} {mode.version}" for mode in modes)
    digest = hashlib.sha256("\n".join([str(HARNESS), *known]).encode()).hexdigest()
    return f"{HARNESS}.{len(modes)}.{digest[:12]}"


def _chosen(findings: Sequence[Finding]) -> Finding | None:
    """The finding to explain: still open, actionable before told only, the earliest of several."""
    still = [one for one in findings if one.closed_at is None]
    return min(still, key=lambda one: (not one.actionable, one.onset_at, one.id), default=None)


def _subject(facts: Facts, finding: Finding | None) -> str:
    """The sick path or member; without a finding the first cell, so that tests have a subject."""
    if finding is not None:
        return finding.subject
    cells = facts.deployment.cells()
    return cells[0].subject if cells else facts.deployment.name


def _cause(weighed: Weighed) -> ModeVerdict | None:
    named = weighed.verdict in ("confirmed", "best_supported")
    return weighed.modes[0] if named and weighed.modes else None


def _ruled_out(verdict: ModeVerdict) -> RuledOut:
    decided = [one for one in verdict.tests if one.because == verdict.because]
    evidence = decided[0].evidence if decided else ()
    return RuledOut(mode=verdict.mode, because=verdict.because, evidence=evidence)


def _confidence(
    weighed: Weighed,
    cause: ModeVerdict | None,
    mechanism: str | None,
    split: TestResult | None,
    following: str | None,
) -> str:
    """One sentence: why it is not more, or less, certain."""
    left = [one for one in weighed.modes if one.standing not in ("ruled_out", "untestable")]
    if weighed.verdict == "none":
        return "Nothing that was collected shows a fault."
    if cause is None:
        if not left:
            return "Every known failure mode is ruled out or untestable: this is something else."
        if left[0].score <= 0:
            return "Nothing that was collected speaks for any known failure mode."
        leaders = " and ".join(f"{one.mode} ({one.score:+.1f})" for one in left[:2])
        return f"Evidence does not single out a cause; what is left first: {leaders}."
    narrower = f"; the mechanism is {mechanism}: {split.because}" if split and mechanism else ""
    if weighed.verdict == "confirmed":
        return f"Confirmed by what was seen of it directly: {cause.because}{narrower}."
    rival = left[1] if len(left) > 1 else None
    ahead = (
        f"ahead of {rival.mode} by {cause.score - rival.score:.1f}"
        if rival
        else "and every other known mode is ruled out"
    )
    proof = f"; what would settle it: {following}" if following else ""
    return (
        f"Best supported, not proven: its mechanism itself was not seen (score {cause.score:.1f}, "
        f"{ahead}){narrower}{proof}."
    )

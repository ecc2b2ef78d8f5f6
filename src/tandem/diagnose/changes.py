"""The change ledger judged row by row: exonerated, implicated, or open.

For: answering "which of today's changes did it" with evidence, so that improvements are kept.
Not for: reverting anything.
"""

from collections.abc import Sequence
from typing import Literal

from tandem import signs
from tandem.facts import Facts, Reading
from tandem.ports import Mode
from tandem.records import Change, ChangeVerdict, Finding, ModeVerdict, Role
from tandem.records import vocabulary as v

Judged = Literal["exonerated", "implicated", "open"]
LIVES = ("restart", "start", "stop")
"""Rows that are events in a member's life, not settings."""
WORKED_MIN = 20.0
"""Completions with a change in force that show the path worked under it."""


def judge_changes(
    facts: Facts,
    subject: str,
    finding: Finding | None,
    cause: Mode | None,
    suspects: Sequence[Mode],
) -> tuple[ChangeVerdict, ...]:
    """Every row of the ledger against the cause, or against the modes left when none is named."""
    onset_at = finding.onset_at if finding is not None and finding.actionable else None
    return tuple(
        _judged(facts, subject, onset_at, change, cause, suspects) for change in facts.changes
    )


def suspected(modes: Sequence[Mode], verdicts: Sequence[ModeVerdict]) -> tuple[Mode, ...]:
    """The modes that evidence speaks for and has not ruled out."""
    left = {one.mode for one in verdicts if one.standing != "ruled_out" and one.score > 0}
    return tuple(mode for mode in modes if mode.slug in left)


def _judged(
    facts: Facts,
    subject: str,
    onset_at: float | None,
    change: Change,
    cause: Mode | None,
    suspects: Sequence[Mode],
) -> ChangeVerdict:
    if cause is not None and cause.implicates is not None:
        said = cause.implicates(facts, change)
        if said is not None and said.answer != "unknown":
            guilty = said.answer == "supports"
            verdict: Judged = "implicated" if guilty else "exonerated"
            return _verdict(change, verdict, said.because, said.evidence)
    if onset_at is None and cause is None:
        return _healthy(facts, subject, change)
    if change.kind in LIVES:
        what = f"nothing ties this {change.kind} of {change.subject} to {_named(cause)}"
        return _verdict(change, "open", what)
    path = _components(cause, suspects)
    touches = _touches(facts, change)
    if touches == "unknown" or not path:
        why = f"what {change.what or 'it'} touches is not known" if path else "no cause is named"
        return _verdict(change, "open", f"{why}, so nothing clears or accuses it")
    if touches in path:
        why = f"it touches {touches}, which {_named(cause)} runs through; nothing clears it"
        return _verdict(change, "open", why)
    worked = _worked(facts, subject, change.at, onset_at)
    if worked is None or worked.value < WORKED_MIN:
        why = f"it touches {touches}: not on the failing path (inferred)"
        return _verdict(change, "exonerated", why, inferred=True)
    why = (
        f"{worked.value:.0f} hand-offs completed with it in force before this began; it touches "
        f"{touches}, not {' or '.join(path)}"
    )
    return _verdict(change, "exonerated", why, worked.evidence)


def _healthy(facts: Facts, subject: str, change: Change) -> ChangeVerdict:
    worked = _worked(facts, subject, change.at, None)
    if worked is None or worked.value < 1:
        return _verdict(change, "open", "nothing fails, and nothing was seen to work since")
    why = f"nothing fails: {worked.value:.0f} hand-offs completed since"
    return _verdict(change, "exonerated", why, worked.evidence)


def _verdict(
    change: Change,
    verdict: Judged,
    because: str,
    evidence: tuple[int, ...] = (),
    *,
    inferred: bool = False,
) -> ChangeVerdict:
    return ChangeVerdict(
        change=change.id,
        subject=change.subject,
        what=change.what or change.kind,
        at=change.at,
        verdict=verdict,
        because=because,
        evidence=evidence,
        inferred=inferred,
    )


def _components(cause: Mode | None, suspects: Sequence[Mode]) -> tuple[str, ...]:
    """The failing path: the cause's, or everything that any suspect runs through."""
    if cause is not None:
        return cause.components
    if any(not mode.components for mode in suspects):
        return ()
    return tuple(sorted({part for mode in suspects for part in mode.components}))


def _touches(facts: Facts, change: Change) -> str:
    if change.touches != "unknown":
        return change.touches
    trait = facts.trait(change.subject, v.T_TOUCHES, change.what)
    return str(trait.value) if trait is not None else "unknown"


def _worked(facts: Facts, subject: str, since: float, until: float | None) -> Reading | None:
    """Hand-offs that completed on the sick path's prefill after a change and before the onset."""
    prefill, _ = signs.ends(facts, subject)
    names = [prefill] if prefill else [one.name for one in facts.deployment.of(Role.PREFILL)]
    for name in names:
        samples = [
            sample
            for sample in facts.numbers(name, v.TRANSFERS_TOTAL, since=since)
            if until is None or sample.at <= until
        ]
        if len(samples) >= 2:
            return signs.growth(samples)
    return None


def _named(cause: Mode | None) -> str:
    return "any cause that is left" if cause is None else cause.slug

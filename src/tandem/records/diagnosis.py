"""What diagnose says: a verdict per failure mode and per change, and the hunch answered."""

from typing import Literal

from tandem.records.record import Record

Answer = Literal["supports", "contradicts", "unknown"]
Strength = Literal["decisive", "strong", "moderate", "weak"]
ModeStanding = Literal["confirmed", "best_supported", "possible", "ruled_out", "untestable"]
Overall = Literal["confirmed", "best_supported", "undetermined", "none"]


class TestResult(Record, frozen=True, kw_only=True):
    """One test of one failure mode: what it answers, how strongly, on which evidence, and why."""

    __test__ = False  # not a pytest class

    test: str
    answer: Answer
    strength: Strength
    because: str
    evidence: tuple[int, ...] = ()
    collect: str | None = None
    """For an unknown: the one observation that would answer it."""


class ModeVerdict(Record, frozen=True, kw_only=True):
    """How one failure mode stands after all its tests."""

    mode: str
    incident_class: str
    standing: ModeStanding
    score: float
    """Log-odds over declared strengths; comparable within one diagnosis only."""
    tests: tuple[TestResult, ...]
    scope: str
    """The repair it would call for: nothing, router, engine:ROLE, pair, role, all, config."""
    because: str
    """The one sentence that decided it."""


class RuledOut(Record, frozen=True, kw_only=True):
    """A failure mode that evidence excludes."""

    mode: str
    because: str
    evidence: tuple[int, ...]


class ChangeVerdict(Record, frozen=True, kw_only=True):
    """One ledger row, judged. `inferred` marks reasoning from a table alone."""

    change: int
    """The id of the `Change`."""
    subject: str
    what: str
    at: float
    verdict: Literal["exonerated", "implicated", "open"]
    because: str
    evidence: tuple[int, ...] = ()
    inferred: bool = False


class HunchAnswer(Record, frozen=True, kw_only=True):
    """The operator's hunch, answered by name; it never moves a score."""

    asked: str
    matched: str | None
    """The failure mode (or change) it was understood as; None when nothing matches."""
    answer: Literal["ruled_out", "supported", "confirmed", "open", "not_understood"]
    because: str
    evidence: tuple[int, ...] = ()


class Diagnosis(Record, frozen=True, kw_only=True):
    """The verdict over one sealed folder; same folder and knowledge give the same bytes.

    `mechanism` narrows the cause only when evidence splits what the family leaves together.
    """

    knowledge_version: str
    verdict: Overall
    cause: str | None
    incident_class: str | None
    mechanism: str | None
    confidence_note: str
    """One sentence: why it is not more, or less, certain."""
    modes: tuple[ModeVerdict, ...]
    ruled_out: tuple[RuledOut, ...]
    changes: tuple[ChangeVerdict, ...]
    hunch: HunchAnswer | None
    next_observation: str | None
    """The one observation that would split what is left best."""
    subject: str | None = None
    """The path or member that is sick."""

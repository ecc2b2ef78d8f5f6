"""The whole incident: every stage's record of one bad night, as one folder holds it."""

from typing import Literal

from tandem.records.aftermath import Aftermath
from tandem.records.deployment import Deployment
from tandem.records.diagnosis import Diagnosis
from tandem.records.finding import Finding
from tandem.records.outcome import Outcome
from tandem.records.plan import Plan
from tandem.records.record import Record
from tandem.records.verification import Verification

FORMAT = 1
"""Version of the incident folder; readers refuse what they do not know."""


class Seal(Record, frozen=True, kw_only=True):
    """The evidence as sealed: file, hash, size, and what did not fit."""

    path: str
    sha256: str
    size_bytes: int
    observations: int
    left_out: tuple[str, ...]
    sealed_at: float


class Rendered(Record, frozen=True, kw_only=True):
    """One incident as text: its section of the living document, a page, and a commit subject."""

    incident: str
    """The incident's id, which anchors the section in the document."""
    subject: str
    markdown: str
    html: str


class ReportRef(Record, frozen=True, kw_only=True):
    """Where the report went."""

    path: str
    commit: str | None
    subject: str | None
    note: str = ""
    state: str = ""
    """The incident's state when it was written: another one since calls for writing it again."""
    followed: int = 0
    """How many statements of its aftermath it tells."""


class Incident(Record, frozen=True, kw_only=True):
    """One incident; fields fill in as the stages run."""

    id: str
    """Folder name: `<UTC time>-<slug>`."""
    format: int = FORMAT
    opened_at: float
    deployment: Deployment
    finding: Finding | None = None
    hunch: str | None = None
    seal: Seal | None = None
    diagnosis: Diagnosis | None = None
    plan: Plan | None = None
    outcomes: tuple[Outcome, ...] = ()
    verification: Verification | None = None
    report: ReportRef | None = None
    state: Literal["open", "advised", "repairing", "repaired", "failed", "closed"] = "open"
    opened_by: Literal["person", "watch"] = "person"
    """Who looks after it: what a watch opened and did not end, the next watch goes on with."""
    aftermath: Aftermath | None = None
    recurrence_of: str | None = None
    """The repaired incident of the same kind and subject that this one is again."""

"""What repair says: what it is about to do, and what became of each step."""

from typing import Literal

from tandem.records.record import Record


class Intent(Record, frozen=True, kw_only=True):
    """Journaled before a step acts, so that a crash inside it can be understood afterwards.

    `incarnations` are the lives observed when the repair began (member name to incarnation id, or
    None where nothing ran): a life that is in there is old, any other was born since.
    """

    step: str
    at: float
    incarnations: dict[str, str | None]


class Outcome(Record, frozen=True, kw_only=True):
    """One step's end; the intent was journaled before, this after."""

    step: str
    status: Literal["done", "already", "failed", "skipped", "interrupted"]
    started_at: float
    ended_at: float
    detail: str
    """What was observed: the gate's evidence, or the holder that kept it from passing."""
    incarnation: str | None = None

"""What repair says: what became of each step."""

from typing import Literal

from tandem.records.record import Record


class Outcome(Record, frozen=True, kw_only=True):
    """One step's end; the intent was journaled before, this after."""

    step: str
    status: Literal["done", "already", "failed", "skipped", "interrupted"]
    started_at: float
    ended_at: float
    detail: str
    """What was observed: the gate's evidence, or the holder that kept it from passing."""
    incarnation: str | None = None

"""What happened, told as it happened: the rolling account that screens and pages follow."""

from tandem.records.observation import Value
from tandem.records.record import Record


class Event(Record, frozen=True, kw_only=True):
    """One sentence about one moment; `kind` is the stage or word that said it.

    `id` grows with time and is given by the store; a reader asks for what came after the last.
    """

    at: float
    kind: str
    text: str
    data: dict[str, Value] = {}
    id: int = 0

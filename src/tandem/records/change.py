"""The change ledger: what was changed, when, and how that is known."""

from tandem.records.record import Record


class Change(Record, frozen=True, kw_only=True):
    """One row of the ledger.

    `kind`: restart, start, stop, flag, env, code, package, driver, config, scale. `what` names the
    flag or variable (empty for a restart). `touches` is the component a trait says it touches
    (`kv-transfer`, `scheduler`, `compute`, `admission`, `memory`, `logging`, `routing`, `unknown`).
    """

    at: float
    subject: str
    kind: str
    what: str = ""
    before: str | None = None
    after: str | None = None
    how_known: str = ""
    incarnation: str | None = None
    """The incarnation that began with, or first carried, this change."""
    touches: str = "unknown"
    id: int = 0

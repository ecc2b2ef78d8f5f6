"""What was seen, or why it was not: observations, and what adapters know about an engine."""

from tandem.records.record import Record

Value = bool | int | float | str | tuple[str, ...] | None


class Observation(Record, frozen=True, kw_only=True):
    """One thing seen at one moment, in Tandem's vocabulary (`records/vocabulary.py`).

    `subject` is a member's name, a path's `subject`, or `host`; `label` tells several of one name
    apart (a worker of the router, a variable, a log signature, a thread). `at` is unix seconds.
    When nothing could be seen `value` is None and `missing` says why: that is evidence too.
    `id` is given by the store (0 before that) and is what evidence lists cite.
    """

    source: str
    """The collector's name: metrics, loads, health, probe, router, process, log, stack."""
    subject: str
    name: str
    at: float
    label: str = ""
    value: Value = None
    missing: str | None = None
    incarnation: str | None = None
    """Which life of the member this speaks of, where the collector knows."""
    id: int = 0


class Trait(Record, frozen=True, kw_only=True):
    """What an adapter knows of an engine that judgement needs, sealed like any evidence.

    Names are in `records/vocabulary.py` (`T_...`); `label` narrows (a flag, a gauge);
    `because` says where it is known from (a reference, an issue number, a file of the engine).
    """

    subject: str
    """A member's name, or `*` for the whole deployment."""
    name: str
    at: float
    label: str = ""
    value: Value = None
    because: str = ""
    id: int = 0

"""What detect says: something is wrong, since when, and who saw it."""

from tandem.records.record import Record

KINDS = (
    "silent-stall",
    "partial-stall",
    "member-down",
    "member-paused",
    "member-restarting",
    "transfer-failures-rising",
    "health-lies",
    "router-disagrees",
    "corruption-suspected",
    "restart-hazard",
    "slow-but-moving",
)
"""Every kind of finding, as docs/operating/findings.md tells them."""


class Thresholds(Record, frozen=True, kw_only=True):
    """The numbers detect works with, from `[detect]`; every one is seconds or a count."""

    flat_s: float = 4.0
    """Progress counters must stand still this long before silence counts."""
    floor_s: float = 4.0
    """A queue must never reach zero over this long to count as pinned (total stall)."""
    partial_floor_s: float = 9.0
    """The same while other requests still flow (partial stall)."""
    down_s: float = 10.0
    """A member must be unreachable this long before it counts as down."""
    probe_deadline_s: float = 5.0
    clear_s: float = 10.0
    """A finding closes when its witnesses stay away this long."""


class Witness(Record, frozen=True, kw_only=True):
    """One side's testimony: `side` is client or server; evidence lists observation ids."""

    side: str
    statement: str
    evidence: tuple[int, ...]


class Finding(Record, frozen=True, kw_only=True):
    """One thing wrong with one path or member; one finding per cause, not per symptom.

    `kind` is one of `KINDS`. `onset_at` is when it began, not when it was noticed.
    `actionable` is False for what is told and never handed on: it opens no incident.
    """

    id: str
    """Deterministic: kind, subject and onset, e.g. `silent-stall@prefill-0>decode-0@1764500000`."""
    kind: str
    subject: str
    onset_at: float
    found_at: float
    summary: str
    witnesses: tuple[Witness, ...]
    incarnations: dict[str, str] = {}
    """Member name to the incarnation id it speaks of."""
    actionable: bool = True
    closed_at: float | None = None
    recurred_at: tuple[float, ...] = ()
    """When it came back after it had cleared, the newest few times; it is the same finding."""

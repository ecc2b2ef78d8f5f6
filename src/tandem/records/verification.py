"""What verify says: the proof, request by request."""

from typing import Literal

from tandem.records.record import Record


class Profile(Record, frozen=True, kw_only=True):
    """How much proof is asked for, from `[verify]`."""

    sequential: int = 8
    sessions: int = 30
    turns: int = 3
    concurrency: int = 8
    output_tokens: int = 12
    prompt_tokens_max: int = 80
    """Most new prompt tokens a turn adds."""
    request_timeout_s: float = 60.0
    rescored_sessions: int = 3
    gap_max: float = 1.0
    """A greedy token further than this below the best logit under a clean prefill is corrupt."""


class RequestRecord(Record, frozen=True, kw_only=True):
    """One verification request, accounted for."""

    session: str
    turn: int
    sent_at: float
    latency_s: float
    status: Literal["clean", "corrupted", "failed", "timed_out"]
    detail: str = ""


class LostRequest(Record, frozen=True, kw_only=True):
    """A request killed by the repair, or the count of those we can only count."""

    subject: str
    count: int
    detail: str


class Verification(Record, frozen=True, kw_only=True):
    """The proof of a repair (or of a healthy deployment, when asked by hand).

    `proven` is None when a thing could not be shown: `not_proven` then says which.
    """

    passed: bool
    sequential_passed: int
    sequential_total: int
    sequential_latency_s: float
    """Median."""
    sessions_passed: int
    sessions_total: int
    corrupted: int
    rescored_tokens: int
    rescored_gap_max: float | None
    transfer_failed_delta: int | None
    inflight_after: int | None
    requests: tuple[RequestRecord, ...]
    lost: tuple[LostRequest, ...]
    not_proven: tuple[str, ...]
    started_at: float
    ended_at: float

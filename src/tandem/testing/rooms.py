"""One request of the simulated fleet, and the shape of the engines it runs on.

For: what prefill, decode, router and demand have in common. Not for: anything that happens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal[
    "new", "bootstrap", "waiting", "prefilling", "inflight", "prealloc", "transfer", "running",
    "retracted", "ended",
]  # fmt: skip
Status = Literal["completed", "failed", "left"]


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast the simulated engines are, and how much they hold; seconds, tokens, bytes."""

    prefill_tokens_per_s: float = 500.0
    chunk_tokens: int = 256
    step_overhead_s: float = 0.01
    decode_step_s: float = 0.03
    decode_per_sequence_s: float = 0.004
    max_running: int = 8
    max_inflight: int = 16
    kv_cells: int = 262_144
    reserved_tokens: int = 512
    kv_bytes_per_token: int = 46_080
    link_bytes_per_s: float = 2e9
    link_latency_s: float = 0.003
    bootstrap_timeout_s: float = 300.0
    waiting_timeout_s: float = 300.0
    lease_s: float = 15.0
    load_s: float = 4.0
    """From the start of a process to its first answer over HTTP."""
    warm_s: float = 1.0
    """From there to its first 200 of `/health`."""
    compile_s: float = 0.0
    """What the first step of a life takes longer."""
    live_loads: bool = True
    """Whether `/v1/loads` is there; else queues are read from gauges that freeze."""
    decode_log_steps: int = 40
    gauges_idle_s: float = 30.0


@dataclass(slots=True, eq=False)
class Room:
    """One request, on both engines at once; the phases are those of the two sides."""

    id: int
    prompt_tokens: int
    output_tokens: int
    prefill: str
    decode: str
    arrived_at: float
    done: "Callable[[Room, Status], None]"
    """Told once how it ended for its client."""
    patience_s: float = float("inf")
    routed: bool = False
    on_prefill: Phase = "new"
    on_decode: Phase = "new"
    computed: int = 0
    written_at: float = 0.0
    decode_life: int = 0
    agent: int = 0
    """Which life of the decode the prefill writes to."""
    first_token_at: float = 0.0
    ends_at_v: float = 0.0
    admitted_at: float = 0.0
    settled: bool = field(default=False)
    """Whether its client has been told."""

    def end(self, status: Status) -> None:
        """Tell the client, once."""
        if not self.settled:
            self.settled = True
            self.done(self, status)


__all__ = ["Machine", "Phase", "Room", "Status"]

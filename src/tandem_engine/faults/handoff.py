"""Faults of KV on its way from a prefill to a decode.

A fault of a transfer is a `Sender` around the real one, put there when a room is posted: what is
off costs nothing, and a room keeps the way it went.

For: the switches, their texts, and these senders.
Not for: the transports (`tandem_engine.handoff`) or rooms (`handoffs.py`).
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

from tandem_engine.faults.family import Family, Switches, Text
from tandem_engine.handoff import Export, HandoffError, Sender, Ticket
from tandem_engine.handoff.header import Header
from tandem_engine.model import Identity

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=600_000)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Layout = Literal["own", "model_hash", "library_build", "kv_dtype", "page_size"]


class HandoffSwitches(Switches, frozen=True):
    """The switches of this family."""

    handoff_dropped: bool = False
    """Prefill: KV is posted and never written."""
    handoff_stalls: bool = False
    """Prefill: KV is being written for ever; the write can neither end nor be cancelled."""
    handoff_fails_from_tokens: Tokens = 0
    """Prefill: prompts of this many tokens or more cannot be sent; 0 is off."""
    handoff_delay_ms: Milliseconds = 0.0
    """Prefill: KV lands this much later than it was posted."""
    handoff_mb_per_s: Rate = 0.0
    """Prefill: what one decode is sent goes at this rate, one room after the other; 0 is off."""
    foreign_layout: Layout = "own"
    """Either, read at the start: this side's KV differs from the other's in one field."""


OFF = HandoffSwitches()


class HandoffFaults(Family[HandoffSwitches]):
    """The family in one worker."""

    name = "handoff"
    kind = HandoffSwitches
    catalogue = {
        "handoff_dropped": Text(
            "Every room is computed and posted, and nothing arrives: the decode's transfer queue "
            "and the prefill's inflight queue grow together, each request fails on both sides "
            "after the decode's waiting timeout (KVPoll.WaitingForInput), no KV bytes move. "
            "/health is 200 everywhere, nothing else is logged.",
            "Mending the transport; no restart helps.",
        ),
        "handoff_stalls": Text(
            "As when dropped, but the prefill's transfer never ends: the decode times out and its "
            "client gets an error, the prefill's half is never answered and keeps its slot, "
            "num_prefill_inflight_queue_reqs never falls; with every slot pinned the pair is "
            "silent with /health 200 everywhere.",
            "Restarting the prefill, or the decode (its agent is gone then), frees what is pinned.",
        ),
        "handoff_fails_from_tokens": Text(
            "Short prompts pass; from a length on every request fails at once with HTTP 500 on "
            "both sides, 'Failed to send kv chunk' on the prefill, num_transfer_failed_reqs_total "
            "rises on both. Queues stay empty, restarts change nothing.",
            "Capping the length or mending the transport (memory registration, MTU).",
        ),
        "handoff_delay_ms": Text(
            "Every TTFT grows by the same time whatever its length; kv_transfer_latency_ms shows "
            "it; nothing fails until it passes the decode's waiting timeout.",
            "Mending the path between the two.",
        ),
        "handoff_mb_per_s": Text(
            "TTFT grows with the prompt and with the load, kv_transfer_speed_gb_s is low and flat, "
            "the inflight and transfer queues grow under load and drain when it drops. Nothing "
            "fails and nothing is stuck: this is no stall.",
            "Mending the path, or less load.",
        ),
        **{
            f"foreign_layout={field}": Text(
                f"From the first contact every request fails at once on both sides, and both say "
                f"{field}, what it is there and what it is here. Nothing is computed, "
                f"queued or sent; /health is 200 everywhere. (Another model or context length is "
                f"given by the flags --model and --context-length of one side.)",
                "Starting both sides with one configuration.",
            )
            for field in ("model_hash", "library_build", "kv_dtype", "page_size")
        },
    }

    def __init__(self) -> None:
        """Nothing on its way."""
        super().__init__()
        self._delayed: list[Delayed] = []
        self._busy_until_s: dict[int, float] = {}

    def carry(self, sender: Sender, tokens: int, now_s: float) -> Sender:
        """How a room of this many tokens goes to the landing of `sender`."""
        switches = self.switches
        if switches == OFF:
            return sender
        if 0 < switches.handoff_fails_from_tokens <= tokens:
            return Failing(sender)
        if switches.handoff_dropped:
            return Dropping(sender)
        if switches.handoff_stalls:
            return Stalling(sender, self)
        if switches.handoff_delay_ms or switches.handoff_mb_per_s:
            return Delaying(sender, self, now_s)
        return sender

    def post(self, sender: Sender, size_bytes: int, now_s: float) -> float:
        """When a blob that is posted now has landed; seconds of the caller's clock."""
        due_s = now_s + self.switches.handoff_delay_ms / 1e3
        rate = self.switches.handoff_mb_per_s
        if rate:
            begin_s = max(now_s, self._busy_until_s.get(id(sender), 0.0))
            self._busy_until_s[id(sender)] = ended_s = begin_s + size_bytes / (rate * 1e6)
            due_s = max(due_s, ended_s)
        return due_s

    def add(self, delayed: "Delayed") -> None:
        """A blob is on its way; whoever posted it may be gone before it lands."""
        self._delayed.append(delayed)

    def land(self, now_s: float, senders: Container[Sender]) -> None:
        """Write what is due; what was on its way to a landing that is closed is lost with it."""
        if not self._delayed:
            return
        for delayed in list(self._delayed):
            if delayed.sender not in senders:
                delayed.failure = "the landing is gone"
            elif now_s >= delayed.due_s:
                delayed.land()
            else:
                continue
            self._delayed.remove(delayed)

    def identity(self, identity: Identity) -> Identity:
        """What this side's KV is."""
        match self.switches.foreign_layout:
            case "page_size":
                return replace(identity, page_size=identity.page_size * 16)
            case "kv_dtype":
                return replace(identity, kv_dtype="fp8_e5m2")
            case "model_hash":
                return replace(identity, model_hash=identity.model_hash[::-1])
            case "library_build":
                return replace(identity, library_build=f"{identity.library_build}-next")
            case "own":
                return identity


class Carrier:
    """A `Sender` that leaves everything to the real one."""

    stuck = False
    """Whether a room that went this way cannot be cancelled."""

    def __init__(self, sender: Sender) -> None:
        """Around the real one."""
        self._sender = sender

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """See `Sender.write`."""
        self._sender.write(ticket, header, size_bytes, export)

    def fail(self, ticket: Ticket) -> None:
        """See `Sender.fail`."""
        self._sender.fail(ticket)

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """See `Sender.acknowledged`."""
        return self._sender.acknowledged(ticket)

    def reason(self, ticket: Ticket) -> str:
        """See `Sender.reason`."""
        return self._sender.reason(ticket)

    def forget(self, ticket: Ticket) -> None:
        """See `Sender.forget`."""
        self._sender.forget(ticket)

    def close(self) -> None:
        """The real one is closed by its owner."""


class Failing(Carrier):
    """The transfer engine refuses the blob."""

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """Raises `HandoffError`."""
        self._sender.fail(ticket)
        raise HandoffError(
            f"the transfer of {size_bytes} bytes for room {ticket.room} returned status -1"
        )


class Dropping(Carrier):
    """Posted, and never written."""

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """Nothing."""

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """Nobody says anything."""
        return None


class Stalling(Dropping):
    """A write that is in progress for as long as the fault is on."""

    def __init__(self, sender: Sender, faults: HandoffFaults) -> None:
        """Asks the switch again and again."""
        super().__init__(sender)
        self._faults = faults

    @property
    def stuck(self) -> bool:  # type: ignore[override]
        """Whether the handle still reads "in progress"."""
        return self._faults.switches.handoff_stalls

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """In progress; failed once it moves again."""
        return None if self.stuck else False


@dataclass(slots=True, eq=False)
class Delayed:
    """A blob on its way."""

    sender: Sender
    ticket: Ticket
    header: Header
    payload: bytes
    due_s: float
    written: bool = False
    forgotten: bool = False
    failure: str = ""

    def land(self) -> None:
        """Write it now. A room that ended meanwhile does not take back what was posted."""

        def export(into: memoryview) -> int:
            into[: len(self.payload)] = self.payload
            return len(self.payload)

        try:
            self.sender.write(self.ticket, self.header, len(self.payload), export)
            self.written = True
        except HandoffError as problem:
            self.failure = str(problem)
        if self.forgotten:
            self.sender.forget(self.ticket)


class Delaying(Carrier):
    """Posted now, written later, from a copy."""

    def __init__(self, sender: Sender, faults: HandoffFaults, now_s: float) -> None:
        """`faults` says when it lands."""
        super().__init__(sender)
        self._faults = faults
        self._now_s = now_s
        self._delayed: Delayed | None = None

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """Copy, and let it be on its way."""
        payload = bytearray(size_bytes)
        with memoryview(payload) as into:
            written = export(into)
        due_s = self._faults.post(self._sender, written, self._now_s)
        self._delayed = Delayed(self._sender, ticket, header, bytes(payload[:written]), due_s)
        self._faults.add(self._delayed)

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """Nothing is known before it landed."""
        delayed = self._delayed
        if delayed is None or delayed.failure:
            return False
        return self._sender.acknowledged(ticket) if delayed.written else None

    def reason(self, ticket: Ticket) -> str:
        """Why it failed."""
        failure = self._delayed.failure if self._delayed is not None else ""
        return failure or self._sender.reason(ticket)

    def forget(self, ticket: Ticket) -> None:
        """The room ended; what is on its way lands all the same."""
        delayed = self._delayed
        if delayed is None or delayed.written:
            self._sender.forget(ticket)
        else:
            delayed.forgotten = True

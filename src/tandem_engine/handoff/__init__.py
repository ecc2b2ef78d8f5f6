"""The KV hand-off: a prefill writes one blob per room into a slot that the decode reserved.

The decode owns a `Landing` (its slots, reached by shared memory or TCP) and tells the prefill the
landing's `address` and, per room, a `Ticket`. The prefill holds a `Sender` per address. Signals go
with the data, as with RDMA: the write completes with a notification, and only the decode's
acknowledgement tells the prefill that somebody took it.

For: the two sides' interfaces, what they exchange, and the errors.
Not for: the transports (`shm.py`, `tcp.py`, by name in `transports.py`), the blob's header
(`header.py`), or who talks to whom (`peers.py`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tandem_engine.handoff.header import Header

Export = Callable[[memoryview], int]
"""Writes the KV into the buffer it is given and returns the bytes written (`Model.export_kv`)."""


class HandoffError(Exception):
    """A hand-off could not be made: a dead address, a blob too large, a foreign segment."""


class StaleTicketError(HandoffError):
    """The slot of this ticket was given to another room since; nothing was written."""


class Ticket(NamedTuple):
    """The right to write one room's KV into one slot, once.

    `generation` is a fencing token: it grows with every reservation of a decode, and from one
    incarnation of a decode to the next, so a late writer is told from the present one.
    """

    slot: int
    room: int
    generation: int


class Arrival(NamedTuple):
    """A reserved slot whose writer is done: `failed` when the prefill gave up on it."""

    ticket: Ticket
    failed: bool


class Landing(Protocol):
    """The decode's side. One thread at a time; no call blocks."""

    address: str
    """What a prefill needs to reach it: `shm:/dev/shm/...` or `tcp:HOST:PORT`."""
    slots: int
    slot_bytes: int
    """The largest blob a slot takes, header included."""

    def reserve(self, room: int) -> Ticket | None:
        """Give a free slot to a room; None when every slot is in use."""
        ...

    def poll(self) -> list[Arrival]:
        """The reserved slots whose writer is done and that were not settled yet (level)."""
        ...

    def view(self, ticket: Ticket) -> memoryview:
        """The arrived blob, header first (see `header.open_blob`); valid until `release`."""
        ...

    def acknowledge(self, ticket: Ticket, *, consumed: bool = True) -> None:
        """Tell the prefill that the blob was taken, or (`consumed=False`) refused."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Free the slot, whatever its state; not given out again while it is being written."""
        ...

    def close(self) -> None:
        """Release everything; later calls are an error."""
        ...


class Sender(Protocol):
    """The prefill's side of one landing. One thread at a time; no call waits for the decode."""

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """Export `size_bytes` of KV into the ticket's slot and announce it.

        `export` is called on this thread; the header's size and checksum are filled in here.
        Raises `StaleTicketError`, `HandoffError` when the blob does not fit, and what `export`
        raises. A dead decode is not noticed here.
        """
        ...

    def fail(self, ticket: Ticket) -> None:
        """Tell the decode that no blob will come for this ticket."""
        ...

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """True when the decode took the blob, False when it failed, None while nobody said."""
        ...

    def reason(self, ticket: Ticket) -> str:
        """Why `acknowledged` is False, for a log line; empty otherwise."""
        ...

    def forget(self, ticket: Ticket) -> None:
        """Drop what is kept for a ticket whose room ended; call it once for every ticket."""
        ...

    def close(self) -> None:
        """Let go of the landing."""
        ...

"""Hand-off through shared memory: a prefill exports KV straight into a slot of its decode.

The segment is a file of its own under `/dev/shm` (`multiprocessing.shared_memory` unlinks it in the
process that attaches, before Python 3.13). Completion and acknowledgement are words in the slot's
control block, as with an RDMA write that carries its notification. What follows is what follows
there: a prefill that keeps the segment of a dead decode mapped writes into it successfully, and
nobody ever acknowledges. A writer is refused only by a fence that is *newer* than its ticket, which
a dead segment never has.

Stores reach the other process in program order on x86; elsewhere the blob's checksum is what
catches a blob announced too early.

For: both sides on one host.
Not for: noticing that the other side died; that is `peers.py` and the bootstrap.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_engine.handoff import Arrival, Export, HandoffError, StaleTicketError, Ticket
from tandem_engine.handoff.header import HEADER_BYTES, Header, pack
from tandem_engine.handoff.segment import (
    FAILED,
    FENCE,
    FOLDER,
    OUTCOMES,
    OUTCOMES_KEPT,
    READY,
    READY_BYTES,
    ROOM,
    WRITING,
    SegmentFile,
    SegmentMemory,
    create_segment,
    open_segment,
    sweep,
)

DRAIN_S: Final = 30.0
"""How long a released slot waits for a writer that began before (SGLang waits as long)."""


@dataclass(slots=True)
class _Slot:
    """What the decode knows of one slot beside the shared words."""

    ticket: Ticket | None = None
    settled: bool = False
    outcomes: int = 0
    drain_until_s: float | None = None


class Segment:
    """The decode's side: a `Landing` in shared memory."""

    def __init__(
        self, file: SegmentFile, memory: SegmentMemory, clock: Callable[[], float]
    ) -> None:
        """`Segment.create` is the way to get one."""
        self.address = f"shm:{file.path}"
        self.slots = memory.slots
        self.slot_bytes = memory.slot_bytes
        self._file = file
        self._memory = memory
        self._clock = clock
        self._slots = [_Slot() for _ in range(memory.slots)]
        self._free = deque(range(memory.slots))
        # Generations grow across incarnations of a decode as well, because they start at the time.
        self._generation = time.time_ns()

    @classmethod
    def create(
        cls,
        agent_id: str,
        *,
        slots: int,
        slot_bytes: int,
        folder: Path = FOLDER,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Segment":
        """Sweep what dead owners left, then create a segment and touch its pages.

        Raises `HandoffError` when there is no shared memory, or not enough.
        """
        sweep(folder)
        file, memory = create_segment(agent_id, slots=slots, slot_bytes=slot_bytes, folder=folder)
        return cls(file, memory, clock)

    def reserve(self, room: int) -> Ticket | None:
        """Give a free slot to a room; None when every slot is in use."""
        self._end_drains()
        if not self._free:
            return None
        slot = self._free.popleft()
        ticket = Ticket(slot, room, self._next_generation())
        self._slots[slot].ticket = ticket
        self._slots[slot].settled = False
        self._memory.set(slot, ROOM, room)
        self._memory.set(slot, FENCE, ticket.generation)
        return ticket

    def poll(self) -> list[Arrival]:
        """The reserved slots whose writer is done and that were not settled yet."""
        arrivals = []
        for slot, state in enumerate(self._slots):
            if state.ticket is None or state.settled:
                continue
            if self._memory.get(slot, READY) == state.ticket.generation:
                arrivals.append(Arrival(state.ticket, failed=False))
            elif self._memory.get(slot, FAILED) == state.ticket.generation:
                arrivals.append(Arrival(state.ticket, failed=True))
        return arrivals

    def view(self, ticket: Ticket) -> memoryview:
        """The arrived blob; raises `HandoffError` before it is whole."""
        self._present(ticket)
        if self._memory.get(ticket.slot, READY) != ticket.generation:
            raise HandoffError(f"the KV of room {ticket.room} has not arrived; poll first")
        size_bytes = min(self._memory.get(ticket.slot, READY_BYTES), self.slot_bytes)
        return self._memory.slot(ticket.slot)[:size_bytes].toreadonly()

    def acknowledge(self, ticket: Ticket, *, consumed: bool = True) -> None:
        """Write the outcome where the prefill looks for it."""
        state = self._present(ticket)
        if state.settled:
            return
        state.settled = True
        word = OUTCOMES + state.outcomes % OUTCOMES_KEPT
        state.outcomes += 1
        self._memory.set(ticket.slot, word, ticket.generation * 2 + consumed)

    def release(self, ticket: Ticket) -> None:
        """Free the slot; a writer that already began delays its next use, at most `DRAIN_S`."""
        state = self._slots[ticket.slot]
        if state.ticket != ticket:
            return
        state.ticket = None
        # Reserved for nobody: from here on a late writer finds a newer fence.
        self._memory.set(ticket.slot, FENCE, self._next_generation())
        self._memory.set(ticket.slot, ROOM, 0)
        if self._memory.get(ticket.slot, WRITING):
            state.drain_until_s = self._clock() + DRAIN_S
        else:
            self._free.append(ticket.slot)

    def close(self) -> None:
        """Unlink the file and let go of the memory."""
        self._memory.close()
        self._file.close()

    def _present(self, ticket: Ticket) -> _Slot:
        state = self._slots[ticket.slot]
        if state.ticket != ticket:
            raise StaleTicketError(
                f"room {ticket.room} no longer holds slot {ticket.slot}; it was released before"
            )
        return state

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _end_drains(self) -> None:
        for slot, state in enumerate(self._slots):
            if state.drain_until_s is None:
                continue
            if not self._memory.get(slot, WRITING) or self._clock() >= state.drain_until_s:
                self._memory.set(slot, WRITING, 0)
                state.drain_until_s = None
                self._free.append(slot)


class Attachment:
    """The prefill's side: a `Sender` into the segment of one decode."""

    def __init__(self, memory: SegmentMemory) -> None:
        """`Attachment.open` is the way to get one."""
        self._memory = memory

    @classmethod
    def open(cls, path: Path, *, folder: Path = FOLDER) -> "Attachment":
        """Map a decode's segment; raises `HandoffError` for anything that is not one of ours."""
        return cls(open_segment(path, folder=folder))

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """Export into the slot, then announce it; see `Sender.write`."""
        slot, _room, generation = ticket
        self._check(ticket)
        if HEADER_BYTES + size_bytes > self._memory.slot_bytes:
            self.fail(ticket)
            raise HandoffError(
                f"the KV of room {ticket.room} is {size_bytes} bytes and the decode's slot takes "
                f"{self._memory.slot_bytes - HEADER_BYTES}; give both sides one context length"
            )
        self._memory.set(slot, WRITING, generation)
        announced = False
        try:
            # Again, now that the decode can see us: it either sees a writer, or we see its fence.
            self._check(ticket)
            blob = self._memory.slot(slot)
            written = export(blob[HEADER_BYTES : HEADER_BYTES + size_bytes])
            payload = blob[HEADER_BYTES : HEADER_BYTES + written]
            blob[:HEADER_BYTES] = pack(header.sealed(payload))
            self._memory.set(slot, READY_BYTES, HEADER_BYTES + written)
            self._memory.set(slot, READY, generation)
            announced = True
        finally:
            if not announced:
                self.fail(ticket)
            self._memory.set(slot, WRITING, 0)

    def fail(self, ticket: Ticket) -> None:
        """Tell the decode that no blob will come."""
        if self._memory.get(ticket.slot, FENCE) <= ticket.generation:
            self._memory.set(ticket.slot, FAILED, ticket.generation)

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """Read the outcome the decode wrote; None while there is none."""
        # The fence first: the decode writes the outcome before it moves the fence.
        fence = self._memory.get(ticket.slot, FENCE)
        for word in range(OUTCOMES, OUTCOMES + OUTCOMES_KEPT):
            outcome = self._memory.get(ticket.slot, word)
            if outcome >> 1 == ticket.generation:
                return bool(outcome & 1)
        return False if fence > ticket.generation else None

    def reason(self, ticket: Ticket) -> str:
        """Why the ticket failed."""
        if self.acknowledged(ticket) is not False:
            return ""
        return "the decode refused the blob or released its slot"

    def forget(self, ticket: Ticket) -> None:
        """Nothing is kept on this side."""

    def close(self) -> None:
        """Unmap the segment."""
        self._memory.close()

    def _check(self, ticket: Ticket) -> None:
        if not 0 <= ticket.slot < self._memory.slots:
            raise HandoffError(f"slot {ticket.slot} is outside 0..{self._memory.slots - 1}")
        if self._memory.get(ticket.slot, FENCE) > ticket.generation:
            raise StaleTicketError(
                f"slot {ticket.slot} was taken from room {ticket.room}; nothing was written"
            )

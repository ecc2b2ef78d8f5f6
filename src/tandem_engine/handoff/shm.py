"""Hand-off through shared memory: a segment of slots that a decode owns and prefills write into.

The segment is a file of its own under `/dev/shm` (`multiprocessing.shared_memory` unlinks it in the
process that attaches, before Python 3.13). Its first page names the owner; then one control block
per slot; then the slots. A prefill exports KV straight into the slot, so nothing is copied twice.

Completion and acknowledgement are words in the control block, each written by one side only, as
with an RDMA write that carries its notification. What follows is what follows there: a prefill that
keeps the segment of a dead decode mapped writes into it successfully, and nobody ever acknowledges.
A writer is refused only by a fence that is *newer* than its ticket, which a dead segment never has.

Stores reach the other process in program order on x86; elsewhere the blob's checksum is what
catches a blob announced too early.

For: both sides on one host.
Not for: noticing that the other side died; that is `peers.py` and the bootstrap.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_engine.handoff import (
    Arrival,
    Export,
    HandoffError,
    StaleTicketError,
    Ticket,
)
from tandem_engine.handoff.header import HEADER_BYTES, Header, pack

FOLDER: Final = Path("/dev/shm")
DRAIN_S: Final = 30.0
"""How long a released slot waits for a writer that began before (SGLang waits as long)."""

_NAME: Final = re.compile(r"tandem-kv-[0-9A-Za-z-]{1,64}")
_PAGE: Final = 4096
_OWNER: Final = struct.Struct("<8sIIQQ")
"""Magic, layout version, owner's pid, slots, bytes of a slot."""
_MAGIC: Final = b"TANDEMSG"
_LAYOUT: Final = 1
_UNFINISHED_S: Final = 60.0

# The words of a control block. Written by the decode:
_FENCE = 0  # the newest generation given out for this slot, or reserved for nobody
_ROOM = 1  # for people who look
_OUTCOMES = 8  # the newest outcomes: generation * 2 + consumed
# Written by the prefill:
_WRITING = 2  # the generation being written, 0 when none is
_READY = 3  # the generation last written whole
_READY_BYTES = 4
_FAILED = 5  # the generation last given up

_OUTCOMES_KEPT = 16
_BLOCK_WORDS = _OUTCOMES + _OUTCOMES_KEPT
_BLOCK_BYTES = _BLOCK_WORDS * 8


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
        self,
        path: Path,
        descriptor: int,
        memory: mmap.mmap,
        slots: int,
        slot_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """`Segment.create` is the way to get one."""
        self.address = f"shm:{path}"
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._path = path
        self._descriptor = descriptor
        self._map = _Map(memory, slots, slot_bytes)
        self._clock = clock
        self._slots = [_Slot() for _ in range(slots)]
        self._free = deque(range(slots))
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
        path = folder / f"tandem-kv-{agent_id}"
        if not _NAME.fullmatch(path.name):
            raise HandoffError(f"the agent id {agent_id!r} is not letters, digits and dashes")
        slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        size_bytes = _slots_offset(slots) + slots * slot_bytes
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise HandoffError(
                f"{path} cannot be created ({error.strerror}); hand over by TCP on this machine"
            ) from error
        try:
            # The lock says "alive": the kernel drops it with the process, whatever its end.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Reserve every page now: a full /dev/shm would be a SIGBUS in the middle of a write.
            os.posix_fallocate(descriptor, 0, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            if error.errno != errno.ENOSPC:
                raise HandoffError(f"{path} cannot be set up ({error.strerror})") from error
            raise HandoffError(
                f"{folder} has no room for {slots} slots of {slot_bytes} bytes; "
                "ask for fewer slots or a shorter context, or enlarge it"
            ) from error
        segment = cls(path, descriptor, memory, slots, slot_bytes, clock)
        _OWNER.pack_into(memory, 0, _MAGIC, _LAYOUT, os.getpid(), slots, slot_bytes)
        return segment

    def reserve(self, room: int) -> Ticket | None:
        """Give a free slot to a room; None when every slot is in use."""
        self._end_drains()
        if not self._free:
            return None
        slot = self._free.popleft()
        ticket = Ticket(slot, room, self._next_generation())
        self._slots[slot].ticket = ticket
        self._slots[slot].settled = False
        self._map.set(slot, _ROOM, room)
        self._map.set(slot, _FENCE, ticket.generation)
        return ticket

    def poll(self) -> list[Arrival]:
        """The reserved slots whose writer is done and that were not settled yet."""
        arrivals = []
        for slot, state in enumerate(self._slots):
            if state.ticket is None or state.settled:
                continue
            if self._map.get(slot, _READY) == state.ticket.generation:
                arrivals.append(Arrival(state.ticket, failed=False))
            elif self._map.get(slot, _FAILED) == state.ticket.generation:
                arrivals.append(Arrival(state.ticket, failed=True))
        return arrivals

    def view(self, ticket: Ticket) -> memoryview:
        """The arrived blob; raises `HandoffError` before it is whole."""
        self._present(ticket)
        if self._map.get(ticket.slot, _READY) != ticket.generation:
            raise HandoffError(f"the KV of room {ticket.room} has not arrived; poll first")
        size_bytes = min(self._map.get(ticket.slot, _READY_BYTES), self.slot_bytes)
        return self._map.slot(ticket.slot)[:size_bytes].toreadonly()

    def acknowledge(self, ticket: Ticket, *, consumed: bool = True) -> None:
        """Write the outcome where the prefill looks for it."""
        state = self._present(ticket)
        if state.settled:
            return
        state.settled = True
        word = _OUTCOMES + state.outcomes % _OUTCOMES_KEPT
        state.outcomes += 1
        self._map.set(ticket.slot, word, ticket.generation * 2 + consumed)

    def release(self, ticket: Ticket) -> None:
        """Free the slot; a writer that already began delays its next use, at most `DRAIN_S`."""
        state = self._slots[ticket.slot]
        if state.ticket != ticket:
            return
        state.ticket = None
        # Reserved for nobody: from here on a late writer finds a newer fence.
        self._map.set(ticket.slot, _FENCE, self._next_generation())
        self._map.set(ticket.slot, _ROOM, 0)
        if self._map.get(ticket.slot, _WRITING):
            state.drain_until_s = self._clock() + DRAIN_S
        else:
            self._free.append(ticket.slot)

    def close(self) -> None:
        """Unlink the file and let go of the memory."""
        self._path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._descriptor)

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
            if not self._map.get(slot, _WRITING) or self._clock() >= state.drain_until_s:
                self._map.set(slot, _WRITING, 0)
                state.drain_until_s = None
                self._free.append(slot)


class Attachment:
    """The prefill's side: a `Sender` into the segment of one decode."""

    def __init__(self, memory: mmap.mmap, slots: int, slot_bytes: int) -> None:
        """`Attachment.open` is the way to get one."""
        self._map = _Map(memory, slots, slot_bytes)
        self._slots = slots
        self._slot_bytes = slot_bytes

    @classmethod
    def open(cls, path: Path, *, folder: Path = FOLDER) -> "Attachment":
        """Map a decode's segment; raises `HandoffError` for anything that is not one of ours."""
        if path.parent != folder or not _NAME.fullmatch(path.name):
            raise HandoffError(f"{path} is no segment of {folder}/tandem-kv-...; not opened")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise HandoffError(
                f"{path} cannot be opened ({error.strerror}); its decode is gone, or is another "
                "user's"
            ) from error
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size < _PAGE:
                raise HandoffError(f"{path} is no segment: {facts.st_size} bytes")
            owner = os.pread(descriptor, _OWNER.size, 0)
            magic, layout, _pid, slots, slot_bytes = _OWNER.unpack(owner)
            expected_bytes = _slots_offset(slots) + slots * slot_bytes
            if (magic, layout, facts.st_size) != (_MAGIC, _LAYOUT, expected_bytes):
                raise HandoffError(
                    f"{path} is no segment of layout {_LAYOUT}: run both sides from one version"
                )
            memory = mmap.mmap(descriptor, facts.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
        return cls(memory, slots, slot_bytes)

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """Export into the slot, then announce it; see `Sender.write`."""
        slot, _room, generation = ticket
        self._check(ticket)
        if HEADER_BYTES + size_bytes > self._slot_bytes:
            self.fail(ticket)
            raise HandoffError(
                f"the KV of room {ticket.room} is {size_bytes} bytes and the decode's slot takes "
                f"{self._slot_bytes - HEADER_BYTES}; give both sides one context length"
            )
        self._map.set(slot, _WRITING, generation)
        announced = False
        try:
            # Again, now that the decode can see us: it either sees a writer, or we see its fence.
            self._check(ticket)
            blob = self._map.slot(slot)
            written = export(blob[HEADER_BYTES : HEADER_BYTES + size_bytes])
            payload = blob[HEADER_BYTES : HEADER_BYTES + written]
            blob[:HEADER_BYTES] = pack(header.sealed(payload))
            self._map.set(slot, _READY_BYTES, HEADER_BYTES + written)
            self._map.set(slot, _READY, generation)
            announced = True
        finally:
            if not announced:
                self.fail(ticket)
            self._map.set(slot, _WRITING, 0)

    def fail(self, ticket: Ticket) -> None:
        """Tell the decode that no blob will come."""
        if self._map.get(ticket.slot, _FENCE) <= ticket.generation:
            self._map.set(ticket.slot, _FAILED, ticket.generation)

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """Read the outcome the decode wrote; None while there is none."""
        # The fence first: the decode writes the outcome before it moves the fence.
        fence = self._map.get(ticket.slot, _FENCE)
        for word in range(_OUTCOMES, _OUTCOMES + _OUTCOMES_KEPT):
            outcome = self._map.get(ticket.slot, word)
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
        self._map.close()

    def _check(self, ticket: Ticket) -> None:
        if not 0 <= ticket.slot < self._slots:
            raise HandoffError(f"slot {ticket.slot} is outside 0..{self._slots - 1}")
        if self._map.get(ticket.slot, _FENCE) > ticket.generation:
            raise StaleTicketError(
                f"slot {ticket.slot} was taken from room {ticket.room}; nothing was written"
            )


def sweep(folder: Path = FOLDER) -> list[Path]:
    """Unlink the segments whose owner is dead; the paths removed. Never waits."""
    removed = []
    for path in sorted(folder.glob("tandem-kv-*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone since
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file without its first page may be in the middle of its creation.
            finished = os.pread(descriptor, len(_MAGIC), 0) == _MAGIC
            age_s = time.time() - os.fstat(descriptor).st_mtime
            if finished or age_s > _UNFINISHED_S:
                path.unlink(missing_ok=True)
                removed.append(path)
        except OSError:
            continue  # the owner holds the lock: alive
        finally:
            os.close(descriptor)
    return removed


class _Map:
    """The words and slots of a mapped segment."""

    def __init__(self, memory: mmap.mmap, slots: int, slot_bytes: int) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._words = self._view[_PAGE : _PAGE + slots * _BLOCK_BYTES].cast("Q")
        self._slots_start = _slots_offset(slots)
        self._slot_bytes = slot_bytes

    def get(self, slot: int, word: int) -> int:
        return self._words[slot * _BLOCK_WORDS + word]

    def set(self, slot: int, word: int, value: int) -> None:
        self._words[slot * _BLOCK_WORDS + word] = value

    def slot(self, slot: int) -> memoryview:
        start = self._slots_start + slot * self._slot_bytes
        return self._view[start : start + self._slot_bytes]

    def close(self) -> None:
        self._words.release()
        self._view.release()
        # A view that somebody still holds keeps the pages until it goes; the file is unlinked.
        with contextlib.suppress(BufferError):
            self._memory.close()


def _slots_offset(slots: int) -> int:
    return _PAGE + -(-slots * _BLOCK_BYTES // _PAGE) * _PAGE

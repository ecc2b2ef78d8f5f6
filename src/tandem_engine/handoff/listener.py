"""The decode's side of the hand-off through TCP: blobs are received straight into their slots.

For: a `Landing` that listens, with an event loop on a thread of its own.
Not for: the frames and the sending side (`tcp.py`).
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tandem_engine.handoff import Arrival, HandoffError, StaleTicketError, Ticket
from tandem_engine.handoff.header import HEADER_BYTES
from tandem_engine.handoff.tcp import (
    FRAME_TIMEOUT_S,
    GO,
    HEAD,
    MAGIC,
    REASON_BYTES_MAX,
    REFUSED,
    TAKEN,
)

_START_TIMEOUT_S: Final = 5.0
_CONNECTIONS_PER_SLOT: Final = 4


@dataclass(slots=True)
class _Slot:
    memory: memoryview
    ticket: Ticket | None = None
    settled: bool = False
    arrived_bytes: int | None = None
    failed: bool = False
    writer: "_Receiver | None" = None


class TcpLanding:
    """The decode's side: a `Landing` that listens. A thread of its own runs the event loop."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """`TcpLanding.create` is the way to get one."""
        self.address = ""
        self.slots = slots
        self.slot_bytes = slot_bytes
        # bytearray writes its zeros, so the pages are touched before the first blob.
        self._slots = [_Slot(memoryview(bytearray(slot_bytes))) for _ in range(slots)]
        self._free = deque(range(slots))
        self._generation = time.time_ns()
        self._lock = threading.Lock()
        self._receivers: set[_Receiver] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-landing", daemon=True)

    @classmethod
    def create(
        cls, *, slots: int, slot_bytes: int, host: str = "127.0.0.1", port: int = 0
    ) -> "TcpLanding":
        """Listen on `host:port` (0: any free one); raises `HandoffError`."""
        landing = cls(slots, slot_bytes)
        try:
            listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            landing._loop.close()
            raise HandoffError(
                f"the KV landing cannot listen on {host}:{port} ({error.strerror}); "
                "free the port or give another"
            ) from error
        landing.address = f"tcp:{host}:{listener.getsockname()[1]}"
        landing._thread.start()
        asyncio.run_coroutine_threadsafe(landing._listen(listener), landing._loop).result(
            _START_TIMEOUT_S
        )
        return landing

    def reserve(self, room: int) -> Ticket | None:
        """Give a free slot to a room; None when every slot is in use."""
        with self._lock:
            if not self._free:
                return None
            self._generation += 1
            slot = self._free.popleft()
            ticket = Ticket(slot, room, self._generation)
            self._slots[slot] = _Slot(self._slots[slot].memory, ticket)
            return ticket

    def poll(self) -> list[Arrival]:
        """The reserved slots whose writer is done and that were not settled yet."""
        with self._lock:
            return [
                Arrival(state.ticket, failed=state.failed)
                for state in self._slots
                if state.ticket is not None
                and not state.settled
                and (state.failed or state.arrived_bytes is not None)
            ]

    def view(self, ticket: Ticket) -> memoryview:
        """The arrived blob; raises `HandoffError` before it is whole."""
        with self._lock:
            state = self._present(ticket)
            if state.arrived_bytes is None:
                raise HandoffError(f"the KV of room {ticket.room} has not arrived; poll first")
            return state.memory[: state.arrived_bytes].toreadonly()

    def acknowledge(self, ticket: Ticket, *, consumed: bool = True) -> None:
        """Answer the waiting sender."""
        with self._lock:
            state = self._present(ticket)
            if state.settled:
                return
            state.settled = True
            self._answer(state, "" if consumed else "the decode refused the blob")

    def release(self, ticket: Ticket) -> None:
        """Free the slot; a writer in the middle of it is cut off first."""
        with self._lock:
            state = self._slots[ticket.slot]
            if state.ticket != ticket:
                return
            state.ticket = None
            writer = state.writer
            if writer is None or state.settled:
                self._free.append(ticket.slot)
            elif state.arrived_bytes is not None:
                self._answer(state, "the decode released the slot")
                self._free.append(ticket.slot)
            else:
                # Freed by `_detached`, when the loop is certain to write no more into it.
                self._call(writer.cut)

    def close(self) -> None:
        """Stop listening, cut every connection and end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(_START_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_TIMEOUT_S)

    # --- On the loop's thread ---

    def admit(self, receiver: "_Receiver") -> None:
        """A connection came; one too many is cut at once."""
        self._receivers.add(receiver)
        if len(self._receivers) > self.slots * _CONNECTIONS_PER_SLOT:
            receiver.cut()

    def begin(self, receiver: "_Receiver", ticket: Ticket, size_bytes: int) -> memoryview | str:
        """A frame's head came: the memory to receive into, or why not."""
        if not 0 <= ticket.slot < self.slots:
            return f"slot {ticket.slot} is outside 0..{self.slots - 1}"
        if size_bytes > self.slot_bytes:
            return f"a blob of {size_bytes} bytes exceeds the slot's {self.slot_bytes}"
        with self._lock:
            state = self._slots[ticket.slot]
            if state.ticket != ticket or state.writer is not None or state.settled:
                return f"slot {ticket.slot} is not reserved for room {ticket.room}"
            if size_bytes < HEADER_BYTES:
                state.failed = True
                return "the prefill gave up"
            state.writer = receiver
            return state.memory[:size_bytes]

    def arrived(self, ticket: Ticket, size_bytes: int) -> None:
        """The last byte of a blob came."""
        with self._lock:
            state = self._slots[ticket.slot]
            if state.ticket == ticket:
                state.arrived_bytes = size_bytes

    def detached(self, receiver: "_Receiver", ticket: Ticket | None) -> None:
        """A connection is over; a blob in the middle of arriving has failed."""
        self._receivers.discard(receiver)
        if ticket is None:
            return
        with self._lock:
            state = self._slots[ticket.slot]
            if state.writer is not receiver:
                return
            state.writer = None
            if state.ticket is None and state.arrived_bytes is None:
                self._free.append(ticket.slot)
            elif state.ticket == ticket and state.arrived_bytes is None:
                state.failed = True

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await self._loop.create_server(lambda: _Receiver(self), sock=listener)

    async def _shut(self) -> None:
        self._server.close()
        for receiver in list(self._receivers):
            receiver.cut()
        # Let the connections tell that they are lost.
        await asyncio.sleep(0)

    def _present(self, ticket: Ticket) -> _Slot:
        state = self._slots[ticket.slot]
        if state.ticket != ticket:
            raise StaleTicketError(
                f"room {ticket.room} no longer holds slot {ticket.slot}; it was released before"
            )
        return state

    def _answer(self, state: _Slot, refusal: str) -> None:
        if state.writer is not None:
            writer = state.writer
            self._call(lambda: writer.answer(refusal))

    def _call(self, action: Callable[[], None]) -> None:
        # The loop is gone when the landing was closed: nobody is left to answer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)


class _Receiver(asyncio.BufferedProtocol):
    """One connection of a sender: a head, then a blob straight into its slot."""

    def __init__(self, landing: TcpLanding) -> None:
        self._landing = landing
        self._head = bytearray(HEAD.size)
        self._target = memoryview(self._head)
        self._filled = 0
        self._ticket: Ticket | None = None
        self._whole = False
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):  # pragma: no cover - TCP gives these
            transport.close()
            return
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(FRAME_TIMEOUT_S, self.cut)
        self._landing.admit(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        # After the blob nothing may come; what does lands in one spare byte and ends it.
        return memoryview(bytearray(1)) if self._whole else self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._whole:
            self.cut()
            return
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        if self._ticket is None:
            self._begin()
        else:
            self._whole = True
            self._end_deadline()
            self._landing.arrived(self._ticket, self._filled)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        self._landing.detached(self, self._ticket)

    def cut(self) -> None:
        """Close without an answer."""
        if self._transport is not None:
            self._transport.abort()

    def answer(self, refusal: str) -> None:
        """Say how it ended, and close."""
        if self._transport is not None and not self._transport.is_closing():
            reason = refusal.encode()[:REASON_BYTES_MAX]
            self._transport.write(REFUSED + reason if refusal else TAKEN)
            self._transport.close()

    def _begin(self) -> None:
        magic, slot, room, generation, size_bytes = HEAD.unpack(self._head)
        if magic != MAGIC:
            self.answer("this is not a KV hand-off")
            return
        ticket = Ticket(slot, room, generation)
        target = self._landing.begin(self, ticket, size_bytes)
        if isinstance(target, str):
            self.answer(target)
            return
        self._ticket, self._target, self._filled = ticket, target, 0
        if self._transport is not None:
            self._transport.write(GO)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

"""Hand-off through TCP, for two hosts: the landing listens, a sender connects once per blob.

The sender writes a head (slot, room, generation, bytes; no bytes say that no blob will come), waits
for the landing's go, writes the blob, and then waits without blocking for one byte: taken, once the
decode has it. Instead of either byte the landing may refuse with a reason, and nothing of a blob
that is too large or too late is moved. A connection that closes early is a failed hand-off: unlike
shared memory, TCP tells.

For: the frames and the prefill's side. Trusted networks only: nothing is encrypted.
Not for: the decode's side (`listener.py`); retries, a failed room is the client's to send again.
"""

import contextlib
import queue
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from tandem_engine.handoff import Export, HandoffError, Ticket
from tandem_engine.handoff.header import HEADER_BYTES, Header, pack

FRAME_TIMEOUT_S: Final = 30.0
"""How long each part of one blob's way may take: the go, and the blob."""
CONNECT_TIMEOUT_S: Final = 5.0
STAGE_TIMEOUT_S: Final = 2.0
"""How long `TcpSender.write` may wait for a staging buffer."""
STAGES: Final = 8

HEAD: Final = struct.Struct("!8sIQQQ")
MAGIC: Final = b"TANDEMTC"
TAKEN: Final = b"\x01"
REFUSED: Final = b"\x00"
GO: Final = b"\x02"
REASON_BYTES_MAX: Final = 512


@dataclass(slots=True)
class _Transfer:
    """One blob on its way; `failure` is written by the sending thread last."""

    link: socket.socket | None = None
    sent: threading.Event = field(default_factory=threading.Event)
    failure: str = ""
    taken: bool | None = None
    forgotten: bool = False


class TcpSender:
    """The prefill's side: a `Sender` to one landing. One thread of its own sends, blob by blob."""

    def __init__(self, host: str, port: int, *, timeout_s: float = FRAME_TIMEOUT_S) -> None:
        """Nothing is connected yet; a dead landing shows at the first blob."""
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._stages: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(STAGES):
            self._stages.put(bytearray())
        self._transfers: dict[Ticket, _Transfer] = {}
        self._sending = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-sender")

    def write(self, ticket: Ticket, header: Header, size_bytes: int, export: Export) -> None:
        """Export into a staging buffer and have it sent; see `Sender.write`."""
        try:
            stage = self._stages.get(timeout=STAGE_TIMEOUT_S)
        except queue.Empty:
            raise HandoffError(
                f"no staging buffer became free in {STAGE_TIMEOUT_S:.0f} s for room {ticket.room}: "
                f"{self._host}:{self._port} takes KV too slowly"
            ) from None
        try:
            if len(stage) < HEADER_BYTES + size_bytes:
                stage = bytearray(HEADER_BYTES + size_bytes)
            with memoryview(stage) as blob:
                written = export(blob[HEADER_BYTES : HEADER_BYTES + size_bytes])
                total_bytes = HEADER_BYTES + written
                with blob[HEADER_BYTES:total_bytes] as payload:
                    blob[:HEADER_BYTES] = pack(header.sealed(payload))
        # Whatever the export met, the buffer is free again and the decode hears of it.
        except BaseException:
            self._stages.put(stage)
            self.fail(ticket)
            raise
        transfer = self._transfers[ticket] = _Transfer()
        self._sending.submit(self._send, ticket, transfer, stage, total_bytes)

    def fail(self, ticket: Ticket) -> None:
        """Tell the decode that no blob will come."""
        self._sending.submit(self._send, ticket, _Transfer(), None, 0)

    def acknowledged(self, ticket: Ticket) -> bool | None:
        """Look for the landing's answer; a ticket that was never written has failed."""
        transfer = self._transfers.get(ticket)
        if transfer is None:
            return False
        if transfer.taken is None and transfer.sent.is_set():
            self._read_answer(transfer)
        return transfer.taken

    def reason(self, ticket: Ticket) -> str:
        """Why the ticket failed."""
        if self.acknowledged(ticket) is not False:
            return ""
        transfer = self._transfers.get(ticket)
        return transfer.failure if transfer is not None else "it was never written"

    def forget(self, ticket: Ticket) -> None:
        """Close the ticket's connection; a blob in the middle of being sent is cut off."""
        transfer = self._transfers.pop(ticket, None)
        if transfer is not None:
            transfer.forgotten = True
            _close(transfer.link)

    def close(self) -> None:
        """Close every connection; the sending thread ends by itself, within its timeouts."""
        for ticket in list(self._transfers):
            self.forget(ticket)
        self._sending.shutdown(wait=False, cancel_futures=True)

    def _send(
        self, ticket: Ticket, transfer: _Transfer, stage: bytearray | None, total_bytes: int
    ) -> None:
        try:
            transfer.link = link = socket.create_connection(
                (self._host, self._port), CONNECT_TIMEOUT_S
            )
            if transfer.forgotten:
                raise OSError("the room ended before")
            link.settimeout(self._timeout_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(HEAD.pack(MAGIC, *ticket, total_bytes))
            if stage is not None:
                answer = link.recv(1)
                if answer != GO:
                    raise OSError(_refusal(answer + link.recv(REASON_BYTES_MAX)))
                with memoryview(stage) as blob, blob[:total_bytes] as sent:
                    link.sendall(sent)
            link.settimeout(0)
        except OSError as error:
            transfer.failure = f"{self._host}:{self._port} did not take the KV: {error}"
            transfer.taken = False
        finally:
            if stage is not None:
                self._stages.put(stage)
            if stage is None or transfer.forgotten or transfer.failure:
                _close(transfer.link)
            transfer.sent.set()

    def _read_answer(self, transfer: _Transfer) -> None:
        if transfer.link is None:
            return
        try:
            answer = transfer.link.recv(1 + REASON_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            transfer.failure = f"the connection to {self._host}:{self._port} broke: {error}"
            transfer.taken = False
        else:
            transfer.taken = answer == TAKEN
            if not transfer.taken:
                transfer.failure = _refusal(answer)
        _close(transfer.link)


def _refusal(answer: bytes) -> str:
    return answer[1:].decode(errors="replace") or "the connection closed without an answer"


def _close(link: socket.socket | None) -> None:
    if link is not None:
        # Wakes a thread that is inside a call on it; a link that is down already does not mind.
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()

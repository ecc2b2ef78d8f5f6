"""The transports by name and by address: the one place that knows which there are.

For: a decode at its start (`open_landing`), a prefill that hears of a decode (`open_sender`).
Not for: choosing; the decode's `--disaggregation-transfer-backend` does that.
"""

from pathlib import Path
from typing import Literal

from tandem_engine.handoff import HandoffError, Landing, Sender
from tandem_engine.handoff.header import HEADER_BYTES
from tandem_engine.handoff.listener import TcpLanding
from tandem_engine.handoff.shm import Attachment, Segment
from tandem_engine.handoff.tcp import TcpSender


def open_landing(
    transport: Literal["shm", "tcp"],
    *,
    agent_id: str,
    slots: int,
    kv_bytes_max: int,
    host: str = "127.0.0.1",
) -> Landing:
    """A decode's landing, each slot fit for `kv_bytes_max` (`Model.kv_bytes_max`).

    Raises `HandoffError`.
    """
    slot_bytes = HEADER_BYTES + kv_bytes_max
    if transport == "shm":
        return Segment.create(agent_id, slots=slots, slot_bytes=slot_bytes)
    return TcpLanding.create(slots=slots, slot_bytes=slot_bytes, host=host)


def open_sender(address: str) -> Sender:
    """A prefill's sender to the landing at `address`; raises `HandoffError`."""
    transport, _, rest = address.partition(":")
    if transport == "shm":
        return Attachment.open(Path(rest))
    host, _, port = rest.rpartition(":")
    if transport == "tcp" and host and port.isdecimal() and 0 < int(port) < 65536:
        return TcpSender(host, int(port))
    raise HandoffError(
        f"{address!r} is no landing address; a decode announces shm:/dev/shm/... or tcp:HOST:PORT"
    )

"""The CPU group of one engine's ranks: rank 0 broadcasts a batch, all gather each other's batch id.

One socket pair per follower, a message per datagram. Nobody goes on before everybody said which
batch it computed, so a rank that is elsewhere holds all of them, and ranks that computed different
batches end loudly, as with SGLang's tensor-parallel ranks over gloo.

For: the messages, and both ends (`Hub` in rank 0, `Spoke` in the others).
Not for: what a rank computes (`lockstep.py`, `follower.py`).
"""

import contextlib
import socket
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from tandem_engine.model import Feed

GATHER_S = 1800.0
"""How long a rank waits for the others inside a collective: gloo's 30 minutes."""
IDLE_S = 60.0
"""How often a rank that waits for the next batch looks whether it should; no limit in itself."""
MESSAGE_BYTES_MAX = 1 << 18

Apart = Literal["", "leaves", "spins"]
"""What a rank does instead of joining; only faults say anything here."""


class CollectiveError(Exception):
    """The ranks do not agree or do not answer; the engine must end."""


class Sizes(msgspec.Struct, frozen=True, tag="sizes"):
    """First message of rank 0: sizes of the follower's model, in tokens."""

    context_length: int
    sequences_max: int
    cells: int


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """One step: (sequence, position, tokens) per feed."""

    number: int
    feeds: list[tuple[int, int, list[int]]]
    apart: tuple[int, Apart] = (0, "")
    """Which rank does what instead of joining."""


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """KV that arrived for a sequence: its length, and a digest that stands for its bytes."""

    sequence: int
    tokens: int
    digest: bytes


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """A sequence begins with what another one holds."""

    source: int
    target: int
    tokens: int


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """A sequence keeps only its first tokens."""

    sequence: int
    tokens: int


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """What one rank brings to the gather."""

    rank: int
    batch: str
    outcome: str
    """Empty, or the name of the error that the batch gave."""


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """What every rank brought."""

    ranks: list[Joined]


Order = Sizes | Batch | Filled | Shared | Cut
_orders = msgspec.msgpack.Decoder(Order)
_joined = msgspec.msgpack.Decoder(Joined)
_gathered = msgspec.msgpack.Decoder(Gathered)


def batch_of(number: int, feeds: Sequence[Feed], apart: tuple[int, Apart] = (0, "")) -> Batch:
    """The message for one step."""
    return Batch(number, [(f.sequence, f.position, list(f.tokens)) for f in feeds], apart)


def batch_id(batch: Batch) -> str:
    """Number and content of a batch in a few characters."""
    content = msgspec.msgpack.encode(batch.feeds)
    return f"{batch.number}:{blake2b(content, digest_size=4).hexdigest()}"


def agree(ranks: Sequence[Joined]) -> None:
    """Raise `CollectiveError` unless all ranks computed the same batch with the same outcome."""
    first = ranks[0]
    for other in ranks[1:]:
        if (other.batch, other.outcome) != (first.batch, first.outcome):
            raise CollectiveError(
                f"rank {other.rank} computed batch {other.batch} ({other.outcome or 'done'}) while "
                f"rank {first.rank} computed {first.batch} ({first.outcome or 'done'}); "
                "restart the engine"
            )


class Hub:
    """Rank 0's end of the group."""

    def __init__(self, spokes: Sequence[socket.socket]) -> None:
        """One socket per follower, rank 1 first."""
        self._spokes = list(spokes)
        for spoke in self._spokes:
            spoke.settimeout(GATHER_S)

    @property
    def ranks(self) -> int:
        """How many there are, rank 0 included."""
        return len(self._spokes) + 1

    def broadcast(self, order: Order) -> None:
        """Send to every follower."""
        self._send(msgspec.msgpack.encode(order))

    def all_gather(self, own: Joined) -> list[Joined]:
        """Wait until every rank has joined; raises `CollectiveError` when one cannot or differs."""
        ranks = [own]
        for rank, spoke in enumerate(self._spokes, start=1):
            ranks.append(_joined.decode(_received(spoke, f"rank {rank}")))
        self._send(msgspec.msgpack.encode(Gathered(ranks)))
        agree(ranks)
        return ranks

    def _send(self, data: bytes) -> None:
        for rank, spoke in enumerate(self._spokes, start=1):
            try:
                spoke.send(data)
            except OSError as problem:
                raise CollectiveError(f"rank {rank} is gone: {problem}") from problem

    def close(self) -> None:
        """Close the group, from any thread: followers end, and a gather that waits fails."""
        for spoke in self._spokes:
            with contextlib.suppress(OSError):
                spoke.shutdown(socket.SHUT_RDWR)
            spoke.close()


class Spoke:
    """A follower's end of the group."""

    def __init__(self, hub: socket.socket) -> None:
        """`hub` is the socket to rank 0."""
        self._hub = hub

    def broadcast(self) -> Order | None:
        """Wait for what rank 0 says next; None when rank 0 is gone."""
        self._hub.settimeout(IDLE_S)
        while True:
            try:
                data = self._hub.recv(MESSAGE_BYTES_MAX)
            except TimeoutError:
                continue
            return _orders.decode(data) if data else None

    def all_gather(self, own: Joined) -> list[Joined]:
        """Say what was computed, and wait for what the others did; see `Hub.all_gather`."""
        self._hub.settimeout(GATHER_S)
        try:
            self._hub.send(msgspec.msgpack.encode(own))
        except OSError as problem:
            raise CollectiveError(f"rank 0 is gone: {problem}") from problem
        ranks = _gathered.decode(_received(self._hub, "rank 0")).ranks
        agree(ranks)
        return ranks


def _received(end: socket.socket, who: str) -> bytes:
    try:
        data = end.recv(MESSAGE_BYTES_MAX)
    except TimeoutError as problem:
        raise CollectiveError(f"{who} did not join within {GATHER_S:.0f} s") from problem
    except OSError as problem:
        raise CollectiveError(f"{who} is gone: {problem}") from problem
    if not data:
        raise CollectiveError(f"{who} is gone: its end of the group is closed")
    return data

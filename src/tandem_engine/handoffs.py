"""The prefill's side of every room: who asked for its KV, where it goes, and whether it was taken.

A room takes one of a bounded number of slots when it leaves bootstrapping and holds it until the
decode acknowledged its KV or the room failed. Under `leases` (`peers.py`) a room fails at once when
its decode is gone or gives up; in the two historical kinds of memory only an acknowledgement frees
a slot.

For: agents, senders, room metadata, slots. On the scheduler's thread.
Not for: requests, prompts and steps (`prefill.py`).
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from tandem_engine.faults import Switchboard
from tandem_engine.faults.handoff import Carrier
from tandem_engine.handoff import Export, HandoffError, Sender, Ticket
from tandem_engine.handoff.header import Header
from tandem_engine.peers import Peer, Peers
from tandem_engine.wire import Abort, AbortAck, Announce, RoomFailed, RoomMetadata, ToDecode

log = logging.getLogger(__name__)
EARLY_MAX = 4096
"""Rooms known by their decode only; routers send both sides within milliseconds."""
ENDED_MAX = 4096
"""Rooms that failed here a while ago: what a late decode is told at once."""

TOLD_ANEW_MAX = 256
"""Of these, how many a decode is told that connects."""

ABORTED_BY_DECODE = "Aborted by decode-side abort notification."
DECODE_DEAD = "Decode instance could be dead"


def timed_out(room: int, after_s: float, state: str) -> str:
    """SGLang's sentence for a room that waited too long in a `KVPoll` state."""
    return f"Request {room} timed out after {after_s:.1f}s in KVPoll.{state}"


@dataclass(slots=True, eq=False)
class Handoff:
    """One room whose decode said where its KV goes."""

    room: int
    asked_by: str
    peer: Peer
    ticket: Ticket
    since_s: float
    size_bytes: int = 0
    written_s: float | None = None
    """Monotonic time the KV was posted; None while it is not."""
    sender: Sender | None = None
    """How the KV goes, once it does."""

    @property
    def stuck(self) -> bool:
        """Whether the transfer can neither end nor be cancelled."""
        return isinstance(self.sender, Carrier) and self.sender.stuck


@dataclass(frozen=True, slots=True)
class Settled:
    """A posted room that ended."""

    room: int
    taken: bool
    size_bytes: int
    took_s: float


class Handoffs:
    """All rooms of one prefill that have to do with a decode."""

    def __init__(
        self,
        *,
        slots: int,
        faults: Switchboard,
        open_sender: Callable[[str], Sender],
        tell: Callable[[str, ToDecode], None],
        cut: Callable[[str], None],
        failed: Callable[[int, str], None],
    ) -> None:
        """`tell` and `cut` reach an agent's connection; `failed` hears of rooms that end by it."""
        self._slots = slots
        self._faults = faults
        self._memory = faults.peers.memory
        self._open_sender = open_sender
        self._tell = tell
        self._cut = cut
        self._failed = failed
        self.peers = Peers(self._memory)
        self._senders: dict[str, Sender] = {}
        self._asked: OrderedDict[int, Handoff] = OrderedDict()
        self._held: dict[int, Handoff] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()
        self._leaked = 0

    # What the control connections bring.

    def announce(self, message: Announce) -> None:
        """A decode says who it is and where its landing is."""
        if message.agent not in self._senders:
            try:
                self._senders[message.agent] = self._open_sender(message.landing)
            except HandoffError as problem:
                log.warning("Cannot reach the landing of decode %s: %s", message.address, problem)
                return
        self._faults.peers.registered(message.agent)
        self._lose(self.peers.announce(message, time.monotonic()))
        # What ended while nobody was connected was told to nobody, and may be queued there.
        for room, reason in list(self._ended.items())[-TOLD_ANEW_MAX:]:
            self._tell_everybody(room, reason, [message.agent])

    def renewed(self, agent: str) -> None:
        """A decode renewed its lease."""
        self.peers.renew(agent, time.monotonic())

    def disconnected(self, agent: str) -> None:
        """The connection of a decode closed."""
        self._lose(self.peers.disconnected(agent))

    def metadata(self, message: RoomMetadata) -> None:
        """A decode says where the KV of a room goes; may come before the request itself."""
        room = message.room
        if room in self._ended:
            self._say_failed(message.agent, room, self._ended[room])
            return
        peer = self.peers.choose(message.agent, room)
        if peer is None or room in self._held or room in self._asked:
            reason = "is in use already" if peer is not None else "comes from an unknown agent"
            self._tell(message.agent, RoomFailed(room, f"Room {room} {reason}"))
            return
        ticket = Ticket(message.slot, room, message.generation)
        peer.rooms.add(room)
        self._asked[room] = Handoff(room, message.agent, peer, ticket, time.monotonic())
        if len(self._asked) > EARLY_MAX:
            oldest = next(iter(self._asked))
            self.drop(oldest, f"More than {EARLY_MAX} rooms wait for their request")

    def aborted(self, message: Abort, reason: str = "") -> None:
        """A decode gave a room up, or was refused and cannot take it."""
        room, reason = message.room, reason or ABORTED_BY_DECODE
        handoff = self._held.get(room)
        if handoff is not None and self.pinned(room):
            # Posted: only an acknowledgement frees it. The decode may have its slot back when the
            # KV goes, or went, elsewhere.
            if handoff.peer.agent != message.agent or handoff.written_s is not None:
                self._tell(message.agent, AbortAck(room))
            return
        self.drop(room, reason, tell=False)
        self._failed(room, reason)
        self._tell(message.agent, AbortAck(room))

    # What the prefill asks.

    def why_ended(self, room: int) -> str | None:
        """Why a room ended before its request came, or None."""
        return self._ended.get(room)

    def asked_for(self, room: int) -> bool:
        """Whether the decode said where the KV of this room goes."""
        return room in self._asked

    def holds(self, room: int) -> bool:
        """Whether this room holds a slot."""
        return room in self._held

    def pinned(self, room: int) -> bool:
        """Whether this room holds a slot that nothing but its decode's acknowledgement frees."""
        handoff = self._held.get(room)
        return handoff is not None and (self.acknowledgement_only or handoff.stuck)

    @property
    def acknowledgement_only(self) -> bool:
        """Whether nothing but an acknowledgement frees any posted room."""
        return self._memory() != "leases"

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._held) + self._leaked

    @property
    def inflight(self) -> int:
        """Rooms whose KV was posted and not acknowledged."""
        return sum(handoff.written_s is not None for handoff in self._held.values())

    @property
    def asked(self) -> int:
        """Rooms with metadata and without a slot."""
        return len(self._asked)

    def take_slot(self, room: int) -> float | None:
        """Give a room a slot: since when its metadata is here, or None when it must wait."""
        if self.held >= self._slots or room not in self._asked:
            return None
        handoff = self._held[room] = self._asked.pop(room)
        return handoff.since_s

    def write(self, room: int, header: Header, size_bytes: int, export: Export) -> None:
        """Post the KV of a room that holds a slot; raises `HandoffError`."""
        handoff = self._held[room]
        handoff.size_bytes = size_bytes
        begun_s, agent = time.monotonic(), handoff.peer.agent
        if self._faults.peers.held_for_dead(agent):
            raise HandoffError(f"{DECODE_DEAD}, remote mooncake session {agent} is not alive")
        sender = self._faults.handoff.carry(self._senders[agent], header.tokens, begun_s)
        handoff.sender = sender
        try:
            sender.write(handoff.ticket, header, size_bytes, export)
        except HandoffError:
            self._faults.peers.transfer_failed(agent)
            # A handle to a peer that is no more reads "in progress", and nothing else.
            if self._memory() == "leases":
                raise
        handoff.written_s = begun_s

    def settled(self) -> list[Settled]:
        """The posted rooms that ended since the last call; their slots are free again."""
        ended: list[Settled] = []
        now_s = time.monotonic()
        self._faults.handoff.land(now_s, self._senders.values())
        for room, handoff in list(self._held.items()):
            sender = handoff.sender
            if handoff.written_s is None or sender is None:
                continue
            taken = sender.acknowledged(handoff.ticket)
            if taken is False and self.acknowledgement_only and not handoff.peer.connected:
                continue  # a broken connection is no acknowledgement
            if taken is not None:
                if not taken:
                    self._faults.peers.transfer_failed(handoff.peer.agent)
                self._free(handoff)
                self._leaked += bool(taken) and self._faults.resources.leaks_slot()
                sender.forget(handoff.ticket)
                ended.append(Settled(room, taken, handoff.size_bytes, now_s - handoff.written_s))
        return ended

    def drop(self, room: int, reason: str, *, tell: bool = True) -> None:
        """A room ended without success: free what it holds and have its decode know."""
        self._ended[room] = reason
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        handoff = self._asked.pop(room, None) or self._held.get(room)
        if handoff is None:
            if tell:
                self._tell_everybody(room, reason, self._senders)
            return
        self._free(handoff)
        if handoff.sender is not None:
            handoff.sender.forget(handoff.ticket)
        if tell and self._memory() == "leases":
            self._say_failed(handoff.asked_by, room, reason)

    def expire(self, now_s: float, early_s: float, waiting: Container[int]) -> None:
        """Lose agents whose lease ran out, and metadata whose request never came.

        A room whose request is in `waiting` only waits for a slot: nothing times it out, as in
        SGLang.
        """
        self._lose(self.peers.expire(now_s))
        if self._leaked and self._faults.resources.frees_slots:
            self._leaked = 0
        for room, handoff in list(self._asked.items()):
            waited_s = now_s - handoff.since_s
            if waited_s <= early_s:
                break
            if room not in waiting:
                self.drop(room, timed_out(room, waited_s, "Bootstrapping"))

    def close(self) -> None:
        """Let go of every landing."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _tell_everybody(self, room: int, reason: str, agents: Iterable[str]) -> None:
        """No decode asked for this room yet: the one that has it must not queue for it."""
        if self._memory() == "leases" and not self._faults.peers.switches.abort_kills_bootstrap:
            for agent in agents:
                self._say_failed(agent, room, reason)

    def _say_failed(self, agent: str, room: int, reason: str) -> None:
        if not self._faults.peers.switches.abort_not_propagated:
            self._tell(agent, RoomFailed(room, reason))

    def _free(self, handoff: Handoff) -> None:
        self._held.pop(handoff.room, None)
        handoff.peer.rooms.discard(handoff.room)

    def _lose(self, peers: list[Peer]) -> None:
        for peer in peers:
            for room in list(peer.rooms):
                self.drop(room, DECODE_DEAD, tell=False)
                self._failed(room, DECODE_DEAD)
            sender = self._senders.pop(peer.agent, None)
            if sender is not None:
                sender.close()
            # If it lives after all, it connects and announces itself again.
            self._cut(peer.agent)

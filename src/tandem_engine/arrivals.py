"""The decode's rooms whose KV is still to come: landing slots from reservation to release.

A slot is reserved before its prefill hears of the room, and is free again only when the KV was
taken, or when nobody will write to it: the prefill said so, is gone, or 30 s passed (SGLang's
deferred release).

For: `decode.py`, on the scheduler's thread. Nothing here touches the model.
Not for: how KV arrives (`handoff/`).
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tandem_engine import scoring
from tandem_engine.faults import Switchboard
from tandem_engine.handoff import Landing, Ticket
from tandem_engine.handoff.header import HEADER_BYTES, Header, open_blob
from tandem_engine.links import Links
from tandem_engine.model import Identity, KvMismatchError
from tandem_engine.request import Phase, Request
from tandem_engine.wire import Abort, RoomMetadata

log = logging.getLogger(__name__)
DEFERRED_RELEASE_S = 30.0
"""SGLang's `DEFERRED_DECODE_KV_RELEASE_TIMEOUT`."""


@dataclass(slots=True, eq=False)
class Awaited:
    """A room whose KV is on its way."""

    request: Request
    ticket: Ticket
    since_s: float


@dataclass(slots=True, eq=False)
class Landed:
    """A room whose KV arrived and was found good."""

    request: Request
    ticket: Ticket
    header: Header
    payload: memoryview


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A slot nobody waits for, that may still be written."""

    ticket: Ticket
    bootstrap: str
    since_s: float
    sequence: int
    """Whose cells were to take it; somebody else's by now."""


class Arrivals:
    """Every landing slot in use, and why."""

    def __init__(
        self,
        landing: Landing,
        links: Links,
        identity: Identity,
        failed: Callable[[Request, str], None],
        faults: Switchboard,
    ) -> None:
        """`failed` hears of a room that ends without KV; it calls `give_up` in turn."""
        self._landing = landing
        self._links = links
        self._identity = identity
        self._failed = failed
        self._faults = faults
        self.awaited: dict[int, Awaited] = {}
        self.landed: deque[Landed] = deque()
        self._given_up: dict[int, GivenUp] = {}
        self._leaked: list[Ticket] = []
        self.moved_s = 0.0
        """Monotonic time something last arrived or was asked for."""

    @property
    def slots_held(self) -> int:
        """Landing slots in use."""
        return len(self.awaited) + len(self._given_up) + len(self.landed) + len(self._leaked)

    @property
    def polled(self) -> bool:
        """Whether anything may arrive."""
        return bool(self.awaited or self._given_up)

    def reserve(self, request: Request, now_s: float) -> bool:
        """Take a slot for a room and tell its prefill; False when every slot is in use."""
        ticket = self._landing.reserve(request.room)
        if ticket is None:
            return False
        request.enter(Phase.TRANSFER, now_s)
        self.awaited[request.room] = Awaited(request, ticket, now_s)
        self.moved_s = now_s
        self._links.send(
            request.bootstrap,
            RoomMetadata(self._links.agent, request.room, ticket.slot, ticket.generation),
        )
        return True

    def give_up(self, request: Request, now_s: float) -> None:
        """Nobody waits for this room any more; its prefill is told, if it can be."""
        awaited = self.awaited.pop(request.room)
        self._given_up[request.room] = GivenUp(
            awaited.ticket, request.bootstrap, now_s, request.sequence
        )
        if not self._faults.corruption.switches.aborted_cells_reused:
            self.refuse(request.room, request.bootstrap)

    def refuse(self, room: int, bootstrap: str) -> None:
        """Tell a prefill that nobody waits for a room."""
        if not self._faults.peers.switches.abort_not_propagated:
            self._links.send(bootstrap, Abort(self._links.agent, room))

    def let_go(self, room: int) -> None:
        """Nothing will be written for a room that was given up: free its slot."""
        given_up = self._given_up.pop(room, None)
        if given_up is not None:
            self._landing.release(given_up.ticket)

    def fail(self, room: int, reason: str) -> None:
        """No KV will come for a room."""
        awaited = self.awaited.get(room)
        if awaited is not None:
            self._failed(awaited.request, reason)
        self.let_go(room)

    def lost(self, bootstrap: str, reason: str) -> None:
        """A prefill is gone: its rooms fail, and nothing of them will be written."""
        for room, awaited in list(self.awaited.items()):
            if awaited.request.bootstrap == bootstrap:
                self.fail(room, reason)
        for room, given_up in list(self._given_up.items()):
            if given_up.bootstrap == bootstrap:
                self.let_go(room)

    def poll(self, now_s: float) -> None:
        """Take note of what arrived."""
        for arrival in self._landing.poll():
            room, ticket = arrival.ticket.room, arrival.ticket
            self.moved_s = now_s
            awaited = self.awaited.get(room)
            if awaited is not None and awaited.ticket == ticket:
                if arrival.failed:
                    self.fail(room, "Failed to get kvcache from prefill instance")
                else:
                    self._check(awaited, now_s)
            elif room in self._given_up:
                if not arrival.failed:
                    blob = self._landing.view(ticket)
                    sequence = self._given_up[room].sequence
                    self._faults.corruption.land_late(sequence, blob[HEADER_BYTES:])
                self._landing.acknowledge(ticket)
                self.let_go(room)
        while self._leaked and self._faults.resources.frees_slots:
            self._landing.release(self._leaked.pop())
        for room, given_up in list(self._given_up.items()):
            if now_s - given_up.since_s > DEFERRED_RELEASE_S:
                log.warning("Deferred KV release for room %d timed out", room)
                self.let_go(room)

    def _check(self, awaited: Awaited, now_s: float) -> None:
        """Verify an arrived blob: milliseconds, so beside the step if there is one."""
        request, ticket = awaited.request, awaited.ticket
        try:
            header, payload = open_blob(
                self._landing.view(ticket),
                identity=self._identity,
                room=request.room,
                tokens=len(request.prompt),
            )
            request.first_score = scoring.unpacked(header.extra)
        except (KvMismatchError, msgspec.MsgspecError) as problem:
            self._landing.acknowledge(ticket, consumed=False)
            self.fail(request.room, f"the KV that arrived was refused: {problem}")
            return
        del self.awaited[request.room]
        request.enter(Phase.RUNNING, now_s)
        self.landed.append(Landed(request, ticket, header, payload))

    def settle(self, landed: Landed, *, taken: bool) -> None:
        """Tell the prefill what became of its KV, and free the slot."""
        self._landing.acknowledge(landed.ticket, consumed=taken)
        landed.payload.release()
        if taken and self._faults.resources.leaks_slot():
            self._leaked.append(landed.ticket)
            return
        self._landing.release(landed.ticket)

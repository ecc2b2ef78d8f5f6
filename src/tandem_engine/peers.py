"""What a prefill remembers of its decodes.

For: which transfer agent a room is written to, and which agents are gone. Three kinds of memory,
because the incident this engine rehearses was never traced to one (issue 2):

- `leases` (the default): one live agent per decode address. A new incarnation replaces the old one
  at
  once; an agent whose connection closed or whose lease ran out is gone. Rooms of a gone agent fail.
- `stale`: per address every agent that ever announced itself, in order; nothing removes one, and a
  room
  uses one of them by hash of the room.
- `orphaned`: new rooms use the newest agent of the address; an agent that is gone stays as it was
  for the
  rooms that already use it, and these never learn that it is gone.

Not for: sockets (`control.py`), KV bytes (`handoff/`), or what becomes of a room (`prefill.py`).
Pure: the time is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tandem_engine.wire import Announce

Memory = Literal["leases", "stale", "orphaned"]
MEMORIES: tuple[Memory, ...] = ("leases", "stale", "orphaned")


@dataclass(slots=True, eq=False)
class Peer:
    """One transfer agent: one incarnation of a decode."""

    agent: str
    address: str
    started_s: float
    landing: str
    lease_s: float
    renewed_s: float
    """Monotonic time of the announcement or the last renewal."""
    connected: bool = True
    rooms: set[int] = field(default_factory=set)
    """Rooms that were told to be written to this agent and have not ended."""


class Peers:
    """The agents a prefill knows, under one kind of memory.

    Every call that can end agents returns those that are gone by it; the caller fails their rooms
    and lets go of their memory.
    """

    def __init__(self, memory: Callable[[], Memory]) -> None:
        """`memory` is asked at every call, so that it can change while the worker runs."""
        self._memory = memory
        self._at: dict[str, list[Peer]] = {}

    def __len__(self) -> int:
        """Agents remembered over all addresses."""
        return sum(len(peers) for peers in self._at.values())

    def announce(self, message: Announce, now_s: float) -> list[Peer]:
        """Remember an agent; the agents of the same address that it replaces are gone.

        An agent that announces itself again (a new connection of the same incarnation) is renewed.
        Under leases a late announcement of an older incarnation is remembered as gone at once.
        """
        peers = self._at.setdefault(message.address, [])
        known = next((peer for peer in peers if peer.agent == message.agent), None)
        if known is not None:
            known.connected, known.renewed_s, known.landing = True, now_s, message.landing
            return []
        new = Peer(
            message.agent,
            message.address,
            message.started_s,
            message.landing,
            message.lease_s,
            now_s,
        )
        if self._memory() == "leases" and any(p.started_s > new.started_s for p in peers):
            return [new]
        peers.append(new)
        return self._forget(lambda peer: peer.address == new.address and peer is not new)

    def renew(self, agent: str, now_s: float) -> bool:
        """Prolong a lease; False when this agent is not known (it must announce itself again)."""
        peer = self.find(agent)
        if peer is None:
            return False
        peer.renewed_s = now_s
        return True

    def disconnected(self, agent: str) -> list[Peer]:
        """The control connection of an agent closed."""
        peer = self.find(agent)
        if peer is None:
            return []
        peer.connected = False
        return self._forget(lambda other: other is peer)

    def expire(self, now_s: float) -> list[Peer]:
        """The agents whose lease ran out, or that are known to be gone already."""
        return self._forget(
            lambda peer: not peer.connected or now_s - peer.renewed_s > peer.lease_s
        )

    def find(self, agent: str) -> Peer | None:
        """The agent of this name, dead or alive."""
        for peers in self._at.values():
            for peer in peers:
                if peer.agent == agent:
                    return peer
        return None

    def choose(self, agent: str, room: int) -> Peer | None:
        """The agent a room is written to, given the one that asked for it; None when it is gone."""
        asked = self.find(agent)
        if asked is None or self._memory() != "stale":
            return asked
        known = self._at[asked.address]
        return known[hash_of(room) % len(known)]

    def _forget(self, gone: Callable[[Peer], bool]) -> list[Peer]:
        memory = self._memory()
        if memory == "stale":
            return []
        lost: list[Peer] = []
        for address, peers in list(self._at.items()):
            for peer in list(peers):
                if gone(peer) and (memory == "leases" or not peer.rooms):
                    peers.remove(peer)
                    lost.append(peer)
            if not peers:
                del self._at[address]
        return lost


def hash_of(room: int) -> int:
    """Spread rooms over agents, also rooms that are counted up (Fibonacci hashing)."""
    return (room * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 32

"""Faults between a prefill and its decodes: who knows whom, and who believes whom alive.

For: the switches, their texts, and what the mechanisms remember.
Not for: connections (`rank.py`, `links.py`) or agents (`tandem_engine.peers`).
"""

from tandem_engine.faults.family import Family, Switches, Text
from tandem_engine.peers import Memory


class PeerSwitches(Switches, frozen=True):
    """The switches of this family."""

    peer_memory: Memory = "leases"
    """How a prefill remembers its decodes (`tandem_engine.peers`)."""


class PeerFaults(Family[PeerSwitches]):
    """The family in one worker."""

    name = "peers"
    kind = PeerSwitches
    catalogue = {
        "peer_memory=stale": Text(
            "Per decode address the prefill keeps every agent that ever announced itself and picks "
            "one by hash of the room. After k decode-only restarts k of k+1 rooms are written to "
            "the memory of a dead decode: their requests never end, "
            "num_prefill_inflight_queue_reqs rises by one for each and never falls, until no slot "
            "is left and the pair is silent. Nothing is logged; /health is 200 everywhere.",
            "Restarting prefill and decode.",
        ),
        "peer_memory=orphaned": Text(
            "Rooms in flight when their decode dies stay in flight for ever and hold their slots; "
            "new rooms use the new decode and flow. Every decode-only restart under load pins more "
            "of num_prefill_inflight_queue_reqs, until the pair is silent. Nothing is logged; "
            "/health is 200 everywhere.",
            "Restarting prefill and decode.",
        ),
    }

    def memory(self) -> Memory:
        """How this prefill remembers its decodes."""
        return self.switches.peer_memory

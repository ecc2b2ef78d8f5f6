"""Faults between a prefill and its decodes: who knows whom, and who believes whom alive.

For: the switches, their texts, and what the mechanisms remember.
Not for: connections (`rank.py`, `links.py`) or agents (`tandem_engine.peers`).
"""

from tandem_engine.faults.family import Family, Switches, Text
from tandem_engine.peers import Memory


class PeerSwitches(Switches, frozen=True):
    """The switches of this family."""

    peer_memory: Memory = "leases"
    """Prefill: how it remembers its decodes (`tandem_engine.peers`)."""
    stale_endpoint: bool = False
    """Decode: a prefill's endpoint is believed in as long as its rendezvous answers (SGLang up to
    0.5.18)."""
    abort_kills_bootstrap: bool = False
    """Prefill: one ABORT frame ends the thread that hears decodes (SGLang 0.5.13 to
    0.5.15.post1, NIXL)."""
    abort_not_propagated: bool = False
    """Either: a room that ends here is not told to the other side."""
    sticky_blacklist: bool = False
    """Prefill: one failed transfer to a session, and no other is tried (SGLang issue 13054)."""
    blocks_on_dead_peer: bool = False
    """Decode: the scheduler sends to a prefill itself, without a bound (SGLang issue 31144)."""


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
            "Restarting prefill and decode, both down before one is up: else the new prefill "
            "remembers the old decode.",
        ),
        "peer_memory=orphaned": Text(
            "Rooms in flight when their decode dies stay in flight for ever and hold their slots; "
            "new rooms use the new decode and flow. Every decode-only restart under load pins more "
            "of num_prefill_inflight_queue_reqs, until the pair is silent. Nothing is logged; "
            "/health is 200 everywhere.",
            "Restarting prefill and decode.",
        ),
        "stale_endpoint": Text(
            "After a prefill restart that was faster than two missed heartbeats no request passes "
            "any more: the prefill's rooms time out in KVPoll.Bootstrapping, the decode's in "
            "KVPoll.WaitingForInput, with nothing logged before. /health and the bootstrap's "
            "/health are 200; another decode works with that prefill.",
            "Restarting the decode, or keeping the prefill down for two heartbeats.",
        ),
        "abort_kills_bootstrap": Text(
            "After one client left early every request to that prefill sits in its bootstrap queue "
            "until KVPoll.Bootstrapping times out, and in the decode's transfer queue until "
            "KVPoll.WaitingForInput does; /health and the bootstrap's /health are 200. Its log has "
            "one AssertionError of bootstrap_thread, from the moment of the abort.",
            "Restarting the prefill; restarting the decode changes nothing.",
        ),
        "abort_not_propagated": Text(
            "A request that ends on one side leaves its other half waiting: it fails only at its "
            "own timeout, and its age then is exactly that timeout. After many aborts slots run "
            "out and throughput collapses far below the load.",
            "Ending the aborts and waiting out the timeouts.",
        ),
        "sticky_blacklist": Text(
            "After one failed transfer every request of that prefill and that decode fails at once "
            "with HTTP 500, 'Decode instance could be dead, remote mooncake session ... is not "
            "alive' in the prefill's log, though the decode lives and serves other prefills.",
            "Restarting the prefill that says so, or the decode (it registers anew).",
        ),
        "blocks_on_dead_peer": Text(
            "Once a prefill died and a request names it, or one was on its way from it, the "
            "decode's scheduler is inside a send to it: nothing decodes, streams of all other "
            "prefills stop, gauges freeze, /health answers 503 after its 20 s. Its stack shows "
            "the send. It stays so when the prefill is back.",
            "Restarting the decode, with the dead prefill out of the router.",
        ),
    }

    def __init__(self) -> None:
        """Nobody is held for dead."""
        super().__init__()
        self._dead_sessions: set[str] = set()

    def turn(self, switches: PeerSwitches) -> None:
        """A list that is not kept is empty."""
        super().turn(switches)
        if not switches.sticky_blacklist:
            self._dead_sessions.clear()

    def memory(self) -> Memory:
        """How this prefill remembers its decodes."""
        return self.switches.peer_memory

    def transfer_failed(self, agent: str) -> None:
        """A transfer to this agent failed."""
        if self.switches.sticky_blacklist:
            self._dead_sessions.add(agent)

    def registered(self, agent: str) -> None:
        """This agent announced itself (again)."""
        self._dead_sessions.discard(agent)

    def held_for_dead(self, agent: str) -> bool:
        """Whether nothing is sent to this agent any more."""
        return agent in self._dead_sessions

"""Agents remembered in three ways, over a clock that is given."""

import pytest

from tandem_engine.peers import Peers, hash_of
from tandem_engine.wire import Announce

LEASE_S = 3.0


def announced(agent: str, started_s: float, address: str = "d:1") -> Announce:
    """An announcement of one incarnation."""
    return Announce(agent, address, started_s, LEASE_S, f"shm:{agent}")


def names(peers):
    """Agents by name."""
    return [peer.agent for peer in peers]


class TestLeases:
    def test_a_new_incarnation_replaces_the_old_one(self):
        """The old agent of the same address is gone at once."""
        peers = Peers(lambda: "leases")
        peers.announce(announced("a", 1), 0)

        assert names(peers.announce(announced("b", 2), 1)) == ["a"]
        assert peers.choose("a", 7) is None
        assert peers.choose("b", 7).agent == "b"

    def test_a_late_announcement_of_the_dead_changes_nothing(self):
        """An older incarnation that speaks last is gone, not the living one."""
        peers = Peers(lambda: "leases")
        peers.announce(announced("b", 2), 0)

        assert names(peers.announce(announced("a", 1), 1)) == ["a"]
        assert peers.choose("b", 7).agent == "b"

    def test_addresses_do_not_replace_each_other(self):
        """Two decodes live side by side."""
        peers = Peers(lambda: "leases")
        peers.announce(announced("a", 1), 0)

        assert peers.announce(announced("b", 2, "d:2"), 0) == []
        assert len(peers) == 2

    def test_a_lease_runs_out_unless_renewed(self):
        """An agent that is silent for its lease is gone; a renewal prolongs it."""
        peers = Peers(lambda: "leases")
        peers.announce(announced("a", 1), 0)
        assert peers.renew("a", 2)

        assert peers.expire(2 + LEASE_S) == []
        assert names(peers.expire(2 + LEASE_S + 0.1)) == ["a"]
        assert not peers.renew("a", 6)

    def test_a_closed_connection_ends_the_agent(self):
        """Nobody waits for the lease then."""
        peers = Peers(lambda: "leases")
        peers.announce(announced("a", 1), 0)

        assert names(peers.disconnected("a")) == ["a"]
        assert len(peers) == 0

    def test_the_same_agent_may_announce_itself_again(self):
        """A new connection of one incarnation replaces nothing."""
        peers = Peers(lambda: "leases")
        peers.announce(announced("a", 1), 0)

        assert peers.announce(announced("a", 1), 1) == []
        assert len(peers) == 1


class TestStale:
    def test_every_agent_is_kept_and_picked_by_hash(self):
        """Nothing removes an agent, and rooms spread over the living and the dead."""
        peers = Peers(lambda: "stale")
        for number, agent in enumerate("abc"):
            peers.announce(announced(agent, number), number)
            peers.disconnected(agent)
        peers.expire(1000)
        picked = [peers.choose("c", room).agent for room in range(300)]

        assert len(peers) == 3
        assert picked == ["abc"[hash_of(room) % 3] for room in range(300)]
        assert {"a", "b", "c"} == set(picked)


class TestOrphaned:
    def test_an_agent_stays_for_its_rooms_and_new_rooms_use_the_new_one(self):
        """The dead agent is never gone while a room uses it."""
        peers = Peers(lambda: "orphaned")
        peers.announce(announced("a", 1), 0)
        peers.find("a").rooms.add(7)
        assert peers.disconnected("a") == []

        assert peers.announce(announced("b", 2), 1) == []
        assert peers.choose("b", 8).agent == "b"
        assert names(peers.expire(1)) == []

    def test_an_agent_without_rooms_is_forgotten(self):
        """Nothing hangs on it."""
        peers = Peers(lambda: "orphaned")
        peers.announce(announced("a", 1), 0)

        assert names(peers.disconnected("a")) == ["a"]


@pytest.mark.parametrize("before", ["stale", "orphaned"])
def test_going_back_to_leases_ends_the_dead(before):
    """Once the memory is right again, what is gone is gone."""
    memory = [before]
    peers = Peers(lambda: memory[0])
    peers.announce(announced("a", 1), 0)
    peers.find("a").rooms.add(7)
    peers.disconnected("a")
    peers.announce(announced("b", 2), 1)
    memory[0] = "leases"

    assert names(peers.expire(1)) == ["a"]
    assert len(peers) == 1

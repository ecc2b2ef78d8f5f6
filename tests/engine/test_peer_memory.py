"""What a prefill remembers of its decodes, seen from outside: leases heal, history does not."""

import asyncio
import json

import pytest

from engine.pairs import ROOMS, Pair, held, pair, until
from tandem_engine.info import load_of
from tandem_engine.peers import hash_of


def switched(tmp_path, memory):
    """A faults file that says how the prefill remembers."""
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"peer_memory": memory}))
    return {"enable_faults": str(path)}


def ask(two: Pair, room: int | None = None) -> list[asyncio.Task]:
    """A request to both sides, not waited for: the prefill's and the decode's reply."""
    body = {"text": "a prompt of a client", "sampling_params": {"max_new_tokens": 4}}
    body |= two.meeting(room)
    return [
        asyncio.create_task(two.post(worker, "/generate", body))
        for worker in (two.prefill, two.decode)
    ]


def pinned(two: Pair) -> int:
    """Rooms of the prefill that were posted and are not acknowledged."""
    return load_of(two.prefill).disaggregation.prefill_inflight_queue_reqs


async def only_stuck(
    two: Pair, rooms: list[int], requests: list[list[asyncio.Task]], agents: int
) -> int:
    """Wait until just the rooms that hash to one of the dead agents are left; how many they are."""
    stuck = sum(hash_of(room) % agents != agents - 1 for room in rooms)
    await until(
        lambda: (
            (pinned(two), sum(prefill.done() for prefill, _ in requests))
            == (stuck, len(requests) - stuck)
        ),
        two.prefill,
    )
    return stuck


async def leave(requests: list[asyncio.Task]) -> None:
    """The client goes away."""
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


class TestStale:
    @pytest.mark.shows("peer_memory=stale")
    async def test_rooms_of_a_dead_agent_stay_in_flight(self, tmp_path, caplog):
        """After a decode-only restart some rooms are never acknowledged and others flow."""
        async with pair(prefill=switched(tmp_path, "stale")) as two:
            assert (await two.generate()).status == 200
            await two.restart_decode()
            rooms = [next(ROOMS) for _ in range(12)]
            requests = [ask(two, room) for room in rooms]
            stuck = await only_stuck(two, rooms, requests, agents=2)
            statuses = [(await two.get(w, "/health")).status for w in (two.prefill, two.decode)]
            await asyncio.gather(*(leave(pair) for pair in requests))
            await two.prefill.turn()

            assert 0 < stuck < 12
            assert statuses == [200, 200]
            assert stuck == pinned(two)
            assert not [r for r in caplog.records if "Prefill" in r.getMessage()]

    async def test_the_pair_falls_silent_when_the_slots_run_out(self, tmp_path):
        """With every slot pinned no room is served, both sides are healthy, nothing fails."""
        flags = switched(tmp_path, "stale") | {"disaggregation_max_inflight": 3}
        async with pair(prefill=flags) as two:
            await two.generate()
            for _ in range(3):
                await two.restart_decode()
            requests = []
            while pinned(two) < 3:
                requests.append(ask(two))
                await asyncio.wait(requests[-1], timeout=0.05)
            late = ask(two)
            done, _ = await asyncio.wait(late, timeout=0.3)
            statuses = [(await two.get(w, "/health")).status for w in (two.prefill, two.decode)]

            assert not done
            assert statuses == [200, 200]
            assert two.metric(two.prefill, "num_transfer_failed_reqs_total") == 0
            for one in [*requests, late]:
                await leave(one)

    @pytest.mark.heals("peer_memory=stale", by="restart")
    async def test_restarting_both_heals(self, tmp_path):
        """The memory of the prefill is gone with it, though the mode is still on."""
        async with pair(prefill=switched(tmp_path, "stale")) as two:
            await two.generate()
            await two.restart_decode()
            rooms = [next(ROOMS) for _ in range(8)]
            requests = [ask(two, room) for room in rooms]
            assert await only_stuck(two, rooms, requests, agents=2) > 0
            await two.decode.stop()
            await two.restart_prefill(clean=True)
            await two.restart_decode()
            answers = await asyncio.gather(*(two.generate() for _ in range(8)))
            await two.idle()

            assert [answer.status for answer in answers] == [200] * 8
            assert two.prefill.switchboard.peers.memory() == "stale"
            for one in requests:
                await leave(one)


class TestOrphaned:
    @pytest.mark.shows("peer_memory=orphaned")
    @pytest.mark.heals("peer_memory=orphaned", by="restart")
    async def test_a_room_in_flight_at_the_restart_keeps_its_slot(self, tmp_path):
        """Old rooms hang for ever, new rooms flow, and a client that leaves changes nothing.

        Restarting both lets go of them, though the prefill remembers as before.
        """
        async with pair(prefill=switched(tmp_path, "orphaned")) as two:
            await two.generate()
            two.blind_decode()
            requests = ask(two)
            await until(lambda: pinned(two) == 1, two.prefill)
            await two.restart_decode()
            await leave(requests)
            answers = await asyncio.gather(*(two.generate() for _ in range(6)))
            await until(lambda: not held(two.decode), two.decode)

            assert [answer.status for answer in answers] == [200] * 6
            assert pinned(two) == 1
            assert len(two.prefill.rooms) == 1
            await two.decode.stop()
            await two.restart_prefill()
            await two.restart_decode()
            assert (await two.generate()).status == 200
            await two.idle()


class TestLeases:
    @pytest.mark.parametrize("moment", ["in flight", "before"])
    async def test_a_decode_restart_leaves_nothing_behind(self, moment):
        """Rooms of the dead decode fail at once and every later room is served."""
        async with pair() as two:
            await two.generate()
            if moment == "in flight":
                two.blind_decode()
                requests = ask(two)
                await until(lambda: pinned(two) == 1, two.prefill)
            await two.restart_decode()
            answers = await asyncio.gather(*(two.generate() for _ in range(6)))
            await two.idle()

            assert [answer.status for answer in answers] == [200] * 6
            failed = two.metric(two.prefill, "num_transfer_failed_reqs_total")
            assert failed == (1 if moment == "in flight" else 0)
            if moment == "in flight":
                assert (await requests[0]).status == 500
                await leave(requests)

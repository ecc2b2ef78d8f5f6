"""Faults of what is held: each exhausts or leaks for real, and each heals."""

import asyncio
from dataclasses import replace

import psutil
import pytest

from engine.pairs import FAST, Pair, greedy, held, pair, until
from tandem_engine.info import load_of

SMALL = {"max_total_tokens": 512, "num_reserved_decode_tokens": 1, "disable_overlap_schedule": True}


async def flows(two: Pair) -> bool:
    """Whether a request passes once the two sides have found each other again."""
    links = two.decode.core.role._links
    link = f"127.0.0.1:{two.prefill.settings.disaggregation_bootstrap_port}"
    links.want(link)
    await until(lambda: links.up(link), two.decode)
    return (await two.generate("again")).json["output_ids"] == greedy("again", 4)


class TestExhaustion:
    @pytest.mark.shows("kv_exhaustion=deadlocks")
    @pytest.mark.heals("kv_exhaustion=deadlocks", by="{cure}")
    @pytest.mark.parametrize("cure", ["cure", "off", "restart"])
    async def test_retracted_requests_and_hand_offs_wait_for_each_other(self, cure):
        """A long request is retracted while KV arrives: nothing runs, until the cycle is broken."""
        # A restarted decode asks for none of the rooms that only waited at the old one.
        timeouts = replace(FAST, bootstrap_s=1.0 if cure == "restart" else 10.0)
        async with pair(decode=SMALL, timeouts=timeouts) as two:
            decode = two.decode
            decode.switchboard.switch(kv_exhaustion="deadlocks")
            decode.model._step_cost_s = 0.004
            long = asyncio.create_task(two.generate("g" * 200, tokens=200))
            await until(lambda: load_of(decode).num_running_reqs, decode)
            two.prefill.switchboard.switch(forward="blocks")  # their KV comes when it may
            asks = [
                asyncio.create_task(two.generate(f"{n}" * 120, rid=f"held-{n}")) for n in (1, 2)
            ]
            await until(lambda: load_of(decode).queues.retracted, decode)
            two.prefill.switchboard.switch(forward="returns")
            await until(lambda: len(decode.core.phase.arrivals.landed) == 2, decode)
            before = decode.core.scheduler.outputs
            late = asyncio.create_task(two.generate("late"))
            await until(lambda: load_of(decode).disaggregation.decode_prealloc_queue_reqs, decode)
            load, other = await two.load(decode), await two.load(two.prefill)

            assert load["decode_retracted_queue_reqs"] == 1
            assert other["prefill_inflight_queue_reqs"] == 2
            assert (load_of(decode).num_running_reqs, decode.core.scheduler.outputs) == (0, before)
            assert (await two.get(decode, "/health")).status == 200
            if cure == "off":
                decode.switchboard.switch(kv_exhaustion="resolves")
            elif cure == "cure":
                await two.post(decode, "/abort_request", {"rid": "held-"})
            else:
                await two.restart_decode()
            answers = await asyncio.gather(long, *asks, late, return_exceptions=True)
            if cure != "restart":
                assert answers[0].json["output_ids"] == greedy("g" * 200, 200)
                assert answers[-1].json["output_ids"] == greedy("late", 4)
            await two.idle()
            assert (await two.generate("again")).json["output_ids"] == greedy("again", 4)


class TestLeaks:
    @pytest.mark.shows("leaked_slot_every")
    @pytest.mark.heals("leaked_slot_every", by="{cure}")
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    @pytest.mark.parametrize("cure", ["off", "restart"])
    async def test_slots_leak_until_none_is_left(self, side, cure):
        """Three hand-offs go well and the fourth waits for ever with nothing in flight."""
        flags = {"disaggregation_max_inflight": 3} if side == "prefill" else {}
        other = {"max_running_requests": 3} if side == "decode" else {}
        # A restarted decode asks for none of the rooms that only waited at the old one.
        timeouts = replace(FAST, bootstrap_s=1.0 if cure == "restart" else 10.0)
        async with pair(prefill=flags, decode=other, timeouts=timeouts) as two:
            worker = getattr(two, side)
            worker.switchboard.switch(leaked_slot_every=1)
            answers = [(await two.generate(f"request {n}")).status for n in range(3)]
            stuck = asyncio.create_task(two.generate("stuck"))
            queue = {
                "prefill": "prefill_bootstrap_queue_reqs",
                "decode": "decode_prealloc_queue_reqs",
            }
            await until(lambda: getattr(load_of(worker).disaggregation, queue[side]), worker)
            await until(lambda: held(worker).get("slots") == 3, worker)
            load = await two.load(two.prefill)

            assert answers == [200] * 3
            assert (load["prefill_inflight_queue_reqs"], stuck.done()) == (0, False)
            assert (await two.get(worker, "/health")).status == 200
            if cure == "off":
                worker.switchboard.switch(leaked_slot_every=0)
                assert (await stuck).status == 200
            else:
                await (two.restart_prefill() if side == "prefill" else two.restart_decode())
                await asyncio.gather(stuck, return_exceptions=True)
                assert await flows(two)
                getattr(two, side).switchboard.switch(leaked_slot_every=0)
            await two.idle()

    @pytest.mark.shows("leaked_room_every")
    @pytest.mark.heals("leaked_room_every", by="{cure}")
    @pytest.mark.parametrize("cure", ["off", "restart"])
    async def test_rooms_leak_while_all_flows(self, cure):
        """The inflight queue has a floor, no slot is held, and nobody waits."""
        async with pair() as two:
            two.prefill.switchboard.switch(leaked_room_every=2)
            answers = [(await two.generate(f"request {n}")).status for n in range(6)]
            await until(lambda: held(two.prefill).get("rooms") == 3, two.prefill)
            load = await two.load(two.prefill)
            gauge = two.metric(two.prefill, "num_prefill_inflight_queue_reqs")

            assert answers == [200] * 6
            assert (load["prefill_inflight_queue_reqs"], "slots" in held(two.prefill)) == (3, False)
            assert gauge >= 2
            if cure == "off":
                two.prefill.switchboard.switch(leaked_room_every=0)
            else:
                await two.restart_prefill()
                assert await flows(two)
            await two.idle()

    @pytest.mark.shows("leaked_mb_per_request")
    @pytest.mark.heals("leaked_mb_per_request", by="off")
    async def test_memory_leaks_with_every_request(self):
        """Resident memory grows by so much a request, and comes back when it is switched off."""
        process = psutil.Process()
        async with pair() as two:
            await two.generate("warm")
            two.decode.switchboard.switch(leaked_mb_per_request=16)
            before = process.memory_info().rss
            for n in range(6):
                await two.generate(f"request {n}")
            await two.idle()
            await two.decode.turn()  # a room is gone a moment before it leaks
            grown = process.memory_info().rss - before
            two.decode.switchboard.switch(leaked_mb_per_request=0)
            left = process.memory_info().rss - before

        assert grown > 64 << 20
        assert left < grown - (64 << 20)

"""Faults of what a worker says of itself, each beside the truth."""

import asyncio
from dataclasses import replace

import pytest

from engine.pairs import DEADLINE_S, FAST, pair, until
from tandem_engine.info import load_of

IMPATIENT = replace(FAST, health_s=0.5, waiting_s=60, bootstrap_s=60)


class TestHealth:
    @pytest.mark.shows("health=always_green")
    @pytest.mark.heals("health=always_green", by="off")
    async def test_green_while_dead(self):
        """200 at once from a worker that gives nothing, and no token moves by it."""
        async with pair(timeouts=IMPATIENT) as two:
            two.decode.switchboard.switch(health="always_green")
            before = two.metric(two.decode, "realtime_tokens_total")
            alive = (await two.get(two.decode, "/health")).status
            still = two.metric(two.decode, "realtime_tokens_total")
            two.decode.switchboard.switch(forward="blocks")
            hanging = asyncio.create_task(two.generate())
            await until(lambda: two.decode.core.scheduler.stepping, two.decode)
            green = (await two.get(two.decode, "/health")).status
            two.decode.switchboard.switch(health="honest")
            red = (await two.get(two.decode, "/health")).status
            two.decode.switchboard.switch(forward="returns")

            assert ((await hanging).status, before) == (200, still)
            assert (alive, green, red) == (200, 200, 503)

    @pytest.mark.shows("health=own_probe_only")
    @pytest.mark.heals("health=own_probe_only", by="off")
    async def test_red_while_useful(self):
        """503 during a long prefill that progresses and ends well; honest, it is 200 then."""
        async with pair(prefill={"chunked_prefill_size": 8}, timeouts=IMPATIENT) as two:
            prefill, answers = two.prefill, []
            prefill.model._step_cost_s = 0.02
            for health in ("honest", "own_probe_only", "honest"):
                prefill.switchboard.switch(health=health)
                long = asyncio.create_task(two.generate(health * 30))
                await until(lambda: prefill.core.phase.running, prefill)
                before = two.metric(prefill, "realtime_tokens_total")
                status = (await two.get(prefill, "/health")).status
                rose = two.metric(prefill, "realtime_tokens_total") > before
                answers.append((status, rose, (await long).status))
            await two.idle()

        assert answers == [(200, True, 200), (503, True, 200), (200, True, 200)]


class TestNumbers:
    @pytest.mark.shows("gauges=frozen")
    @pytest.mark.heals("gauges=frozen", by="off")
    async def test_gauges_freeze(self):
        """The page keeps what it said; counters and `/v1/loads` move; off, it is written again."""
        async with pair(decode={"decode_log_steps": 1}) as two:
            decode = two.decode
            await two.generate(tokens=3)
            decode.switchboard.switch(gauges="frozen")
            seen, live = [], []
            for gauges in ("frozen", "written"):
                await two.idle()
                decode.switchboard.switch(gauges=gauges)
                decode.model._step_cost_s = 0.002
                long = asyncio.create_task(two.generate("x" * 200, tokens=100))
                await until(lambda: load_of(decode).num_used_tokens > 250, decode)
                seen.append(two.metric(decode, "num_used_tokens") > 200)
                live.append((await two.get(decode, "/v1/loads")).json["loads"][0])
                await long
            counted = two.metric(decode, "realtime_tokens_total")
            decode.switchboard.switch(gauges="frozen")
            await two.restart_decode()
            await two.generate(tokens=3)
            page = two.decode.exposed_metrics()

        assert seen == [False, True]
        assert [load["num_used_tokens"] > 200 for load in live] == [True, True]
        assert counted == 2 + 99 + 99
        assert ("sglang:realtime_tokens_total{" in page, "num_used_tokens{" in page) == (
            True,
            False,
        )

    @pytest.mark.shows("failure_counters=unwired")
    @pytest.mark.heals("failure_counters=unwired", by="off")
    async def test_failure_counters_are_not_wired(self, caplog):
        """Rooms fail, with their log lines, and the counter stays; off, it counts."""
        async with pair() as two:
            two.blind_decode()
            counted = []
            for wiring in ("unwired", "wired"):
                two.prefill.switchboard.switch(failure_counters=wiring)
                async with asyncio.timeout(DEADLINE_S):
                    body = {"text": "hello", "rid": wiring} | two.meeting()
                    asks = [
                        asyncio.create_task(two.post(worker, "/generate", body))
                        for worker in (two.prefill, two.decode)
                    ]
                    await until(
                        lambda: load_of(two.prefill).disaggregation.prefill_inflight_queue_reqs,
                        two.prefill,
                    )
                    await two.post(two.prefill, "/abort_request", {"rid": wiring})
                    answers = await asyncio.gather(*asks)
                counted.append(two.metric(two.prefill, "num_transfer_failed_reqs_total"))
                assert [answer.status for answer in answers] == [500, 500]
            await two.idle()

        assert counted == [0, 1]
        said = [r for r in caplog.records if "Prefill transfer failed" in r.getMessage()]
        assert len(said) == 2

"""KV that is lost, late, slow, stuck or refused on its way, seen from outside."""

import asyncio
from dataclasses import replace

import pytest

from engine.pairs import FAST, Pair, greedy, held, pair, until
from tandem_engine.info import load_of

BODY = {"text": "a prompt", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
SHORT = replace(FAST, waiting_s=0.6)


def inflight(two: Pair) -> int:
    """Rooms of the prefill that were posted and are not acknowledged."""
    return load_of(two.prefill).disaggregation.prefill_inflight_queue_reqs


async def healthy(two: Pair) -> list[int]:
    """What `/health` says on both sides."""
    return [(await two.get(worker, "/health")).status for worker in (two.prefill, two.decode)]


async def heals(two: Pair) -> bool:
    """Whether nothing is held any more, and the pair says what one model alone would."""
    await two.idle()
    return (await two.generate("after all")).json["output_ids"] == greedy("after all", 4)


class TestDropped:
    @pytest.mark.shows("handoff_dropped")
    @pytest.mark.heals("handoff_dropped", by="off")
    @pytest.mark.parametrize("transport", ["shm", "tcp"])
    async def test_both_sides_wait_out_the_decode(self, transport):
        """A room that is posted and never written ends by the decode's timeout, on both sides."""
        decode = {"disaggregation_transfer_backend": transport}
        async with pair(decode=decode, timeouts=SHORT) as two:
            two.prefill.switchboard.switch(handoff_dropped=True)
            asked = asyncio.gather(*(two.post(w, "/generate", b) for w, b in both(two)))
            await until(lambda: inflight(two) == 1, two.prefill)
            statuses = await healthy(two)
            prefill, decode = await asked
            two.prefill.switchboard.switch(handoff_dropped=False)

            assert statuses == [200, 200]
            assert "KVPoll.WaitingForInput" in decode.text
            assert "decode-side abort" in prefill.text
            assert await heals(two)


class TestStalls:
    @pytest.mark.shows("handoff_stalls")
    @pytest.mark.heals("handoff_stalls", by="off")
    async def test_the_prefill_keeps_its_slot_when_all_is_over(self):
        """The decode's client hears of a timeout; the prefill's half hangs until it is off."""
        async with pair(timeouts=SHORT) as two:
            two.prefill.switchboard.switch(handoff_stalls=True)
            (one, body), (other, _) = both(two)
            prefill = asyncio.create_task(two.post(one, "/generate", body))
            decode = await two.post(other, "/generate", body)
            await two.prefill.turn()
            statuses, stuck, done = await healthy(two), inflight(two), prefill.done()
            two.prefill.switchboard.switch(handoff_stalls=False)

            assert "KVPoll.WaitingForInput" in decode.text
            assert (statuses, stuck, done) == ([200, 200], 1, False)
            assert (await prefill).status == 500
            assert await heals(two)

    @pytest.mark.heals("handoff_stalls", by="restart")
    async def test_a_prefill_restart_frees_it(self):
        """The room is gone with it, and the next one stalls as before."""
        async with pair(timeouts=SHORT) as two:
            two.prefill.switchboard.switch(handoff_stalls=True)
            (one, body), (other, _) = both(two)
            prefill = asyncio.create_task(two.post(one, "/generate", body))
            await two.post(other, "/generate", body)
            await two.restart_prefill()
            await asyncio.gather(prefill, return_exceptions=True)
            await two.idle()
            links = two.decode.core.role._links
            link = f"127.0.0.1:{two.prefill.settings.disaggregation_bootstrap_port}"
            await until(lambda: links.up(link), two.decode)
            again = asyncio.create_task(two.generate())
            await until(lambda: inflight(two) == 1, two.prefill)
            again.cancel()

    @pytest.mark.heals("handoff_stalls", by="cure")
    async def test_a_decode_restart_frees_it(self):
        """Its agent is gone, and with it the transfer."""
        async with pair(timeouts=SHORT) as two:
            two.prefill.switchboard.switch(handoff_stalls=True)
            (one, body), (other, _) = both(two)
            prefill = asyncio.create_task(two.post(one, "/generate", body))
            await two.post(other, "/generate", body)
            await two.restart_decode()
            again = asyncio.create_task(two.generate())

            assert "Decode instance could be dead" in (await prefill).text
            await until(lambda: inflight(two) == 1, two.prefill)
            again.cancel()


class TestFailsFromALength:
    @pytest.mark.shows("handoff_fails_from_tokens")
    @pytest.mark.heals("handoff_fails_from_tokens", by="off")
    async def test_short_prompts_pass_and_long_ones_fail_at_once(self):
        """The length alone decides, and both clients hear of it."""
        async with pair() as two:
            two.prefill.switchboard.switch(handoff_fails_from_tokens=100)
            short = await two.generate("x" * 50)
            (prefill, decode) = await two.both("/generate", BODY | {"text": "x" * 100})
            failed = [
                two.metric(worker, "num_transfer_failed_reqs_total")
                for worker in (two.prefill, two.decode)
            ]
            two.prefill.switchboard.switch(handoff_fails_from_tokens=0)

            assert short.json["output_ids"] == greedy("x" * 50, 4)
            assert (prefill.status, decode.status, failed) == (500, 500, [1, 1])
            assert "Failed to send kv chunk" in prefill.text
            assert (await two.generate("x" * 100)).json["output_ids"] == greedy("x" * 100, 4)
            await two.idle()


class TestLate:
    @pytest.mark.shows("{slow}")
    @pytest.mark.heals("{slow}", by="off")
    @pytest.mark.parametrize("transport", ["shm", "tcp"])
    @pytest.mark.parametrize(
        ("slow", "amount"), [("handoff_delay_ms", 150), ("handoff_mb_per_s", 64 * 8 / 150e3)]
    )
    async def test_the_transfer_takes_as_long(self, transport, slow, amount):
        """A delay, or 512 bytes at 3.4 kB/s, shows in the metrics of the transfer."""
        async with pair(decode={"disaggregation_transfer_backend": transport}) as two:
            two.prefill.switchboard.switch(**{slow: amount})
            answer = await two.generate("a prompt", 4)
            took_ms = (await two.load(two.prefill))["kv_transfer_latency_ms"]
            two.prefill.switchboard.switch(**{slow: 0})
            await two.generate("a prompt", 4)

            assert answer.json["output_ids"] == greedy("a prompt", 4)
            assert took_ms >= 150
            assert (await two.load(two.prefill))["kv_transfer_latency_ms"] < took_ms
            assert await heals(two)

    async def test_a_room_that_ends_meanwhile_does_not_take_it_back(self):
        """What was posted lands on a fence and harms nobody."""
        async with pair(timeouts=SHORT) as two:
            two.prefill.switchboard.switch(handoff_delay_ms=900)
            prefill, decode = await two.both("/generate", BODY)
            two.prefill.switchboard.switch(handoff_delay_ms=0)

            assert (prefill.status, decode.status) == (500, 500)
            assert await heals(two)


class TestForeignLayout:
    @pytest.mark.shows("foreign_layout={field}")
    @pytest.mark.heals("foreign_layout={field}", by="off")
    @pytest.mark.parametrize("field", ["page_size", "kv_dtype", "model_hash", "library_build"])
    async def test_it_is_refused_by_name_before_anything_is_computed(self, field, tmp_path):
        """Both clients hear the field and both values at once; no token is computed, none held."""
        path = tmp_path / "faults.json"
        path.write_text(f'{{"foreign_layout": "{field}"}}')
        async with pair(decode={"enable_faults": str(path)}) as two:
            prefill, decode = await two.both("/generate", BODY)
            steps = two.prefill.core.scheduler.outputs
            await two.idle()
            again = await two.both("/generate", BODY)
            path.unlink()
            two.decode.switchboard.switch(foreign_layout="own")
            await two.restart_decode()

            for answer in (prefill, decode, *again):
                assert answer.status == 500
                assert f"{field} is " in answer.text
            assert steps == 0
            assert await heals(two)

    @pytest.mark.parametrize("change", [{"context_length": 256}, {"model_path": "toy:1"}])
    async def test_another_context_or_model_is_refused_as_well(self, change):
        """These differ by their flags, without any fault."""
        async with pair(decode=change) as two:
            prefill, decode = await two.both("/generate", BODY)
            await two.idle()

            name = "context_length" if "context_length" in change else "model_hash"
            for answer in (prefill, decode):
                assert (answer.status, f"{name} is " in answer.text) == (500, True)
            assert not held(two.prefill)


def both(two: Pair):
    """The two workers with one body for a new room."""
    body = BODY | two.meeting()
    return [(two.prefill, body), (two.decode, body)]

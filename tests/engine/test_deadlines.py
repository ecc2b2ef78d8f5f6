"""Rooms that nobody ends: timeouts and leases, on both sides."""

import asyncio
import threading

import pytest

from engine.pairs import DEADLINE_S, pair, until
from tandem_engine.config import Timeouts
from tandem_engine.info import load_of

SHORT = Timeouts(bootstrap_s=0.3, heartbeat_s=0.1)
PROMPT = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}


class TestTimeouts:
    async def test_a_prefill_alone_gives_up_in_bootstrapping(self):
        """Without metadata the room fails after SGLang's bootstrap timeout, with its sentence."""
        async with pair(timeouts=SHORT) as two:
            answer = await two.post(two.prefill, "/generate", PROMPT | two.meeting())
            await two.idle()
            failed = two.metric(two.prefill, "num_bootstrap_failed_reqs_total")

        assert answer.status == 500
        assert "in KVPoll.Bootstrapping" in answer.json["error"]["message"]
        assert failed == 1

    async def test_a_decode_alone_gives_up_waiting_for_input(self):
        """Without a prefill request the room fails on the decode, and the metadata is forgotten."""
        async with pair(timeouts=Timeouts(waiting_s=0.3, heartbeat_s=0.1)) as two:
            answer = await two.post(two.decode, "/generate", PROMPT | two.meeting())
            await two.idle()
            failed = two.metric(two.decode, "num_transfer_failed_reqs_total")

        assert answer.status == 500
        assert "in KVPoll.WaitingForInput" in answer.json["error"]["message"]
        assert failed == 1

    async def test_a_room_that_waits_for_a_slot_is_not_timed_out(self):
        """With its metadata here a room waits silently, however long: that is SGLang's rule."""
        timeouts = Timeouts(bootstrap_s=0.2, waiting_s=30, heartbeat_s=0.1)
        async with pair(prefill={"disaggregation_max_inflight": 1}, timeouts=timeouts) as two:
            two.blind_decode()
            asks = []
            for _ in range(2):
                body = PROMPT | two.meeting()
                asks += [
                    asyncio.create_task(two.post(worker, "/generate", body))
                    for worker in (two.prefill, two.decode)
                ]
            await until(lambda: two.prefill.core.role._handoffs.asked == 1, two.prefill)
            done, _ = await asyncio.wait(asks, timeout=0.6)
            queues = load_of(two.prefill).disaggregation
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)

        assert not done
        assert queues.prefill_bootstrap_queue_reqs == 1
        assert queues.prefill_inflight_queue_reqs == 1


class TestLeases:
    async def test_a_decode_that_falls_silent_loses_its_rooms_and_comes_back(self):
        """No renewal for a lease ends its rooms; when it speaks again it is taken anew."""
        async with pair(timeouts=Timeouts(heartbeat_s=0.05)) as two:
            await two.generate()
            two.blind_decode()
            body = PROMPT | two.meeting()
            asks = [
                asyncio.create_task(two.post(worker, "/generate", body))
                for worker in (two.prefill, two.decode)
            ]
            await until(
                lambda: load_of(two.prefill).disaggregation.prefill_inflight_queue_reqs, two.prefill
            )
            gate = threading.Event()
            two.decode.core.role._links._thread.call(gate.wait, DEADLINE_S)
            prefill = await asks[0]
            gate.set()
            decode = await asks[1]
            del two.decode.core.role._landing.poll
            link = f"127.0.0.1:{two.prefill.settings.disaggregation_bootstrap_port}"
            await until(lambda: two.decode.core.role._links.up(link), two.decode)
            await two.idle()
            again = await two.generate()

        assert "Decode instance could be dead" in prefill.text
        assert (prefill.status, decode.status) == (500, 500)
        assert again.status == 200

    async def test_a_prefill_that_falls_silent_fails_the_rooms_of_its_decode(self):
        """Missed beats end the link, and with it every room on that prefill."""
        async with pair(timeouts=Timeouts(heartbeat_s=0.05)) as two:
            await two.generate()
            gate = threading.Event()
            two.prefill.core.scheduler.post(gate.wait, DEADLINE_S)
            two.prefill.core.role._rank._thread.call(gate.wait, DEADLINE_S)
            decode = await two.post(two.decode, "/generate", PROMPT | two.meeting())
            gate.set()
            await two.idle()

        assert decode.status == 500
        assert "Lost connection with prefill instance" in decode.text


class TestMismatch:
    @pytest.mark.parametrize("model", ["toy:1"])
    async def test_another_model_is_refused_by_the_name_of_the_field(self, model):
        """KV of another model is not taken; both clients hear why."""
        async with pair(decode={"model_path": model}) as two:
            prefill, decode = await two.both("/generate", PROMPT)
            await two.idle()

        assert (prefill.status, decode.status) == (500, 500)
        assert "model_hash" in decode.text

"""Who believes whom alive, and what comes of it, seen from outside."""

import asyncio
import sys
import threading
from dataclasses import replace

import pytest

from engine.pairs import DEADLINE_S, Pair, greedy, pair, until
from tandem_engine.config import Timeouts
from tandem_engine.info import load_of
from tandem_engine.worker import Worker

SHORT = Timeouts(bootstrap_s=0.6, waiting_s=0.6, heartbeat_s=0.1, health_s=0.3)
BUSY = replace(SHORT, heartbeat_misses_max=50)
SLOW_BEAT = Timeouts(bootstrap_s=0.6, waiting_s=0.6, heartbeat_s=1.0, health_s=5.0)
BODY = {"text": "a prompt", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
BOOTSTRAPPING, WAITING = "in KVPoll.Bootstrapping", "in KVPoll.WaitingForInput"


async def statuses(two: Pair) -> list[int]:
    """`/health` of both, and of the rendezvous."""
    port = two.prefill.settings.disaggregation_bootstrap_port
    async with two.http.get(f"http://127.0.0.1:{port}/health") as reply:
        return [*[(await two.get(w, "/health")).status for w in (two.prefill, two.decode)],
                reply.status]  # fmt: skip


async def serves(two: Pair) -> bool:
    """Whether a request passes and says what one model alone would, with nothing held after it."""
    link = f"127.0.0.1:{two.prefill.settings.disaggregation_bootstrap_port}"
    links = two.decode.core.role._links
    links.want(link)
    await until(lambda: link in links._writers, two.decode)
    answer = await two.generate("after all")
    await two.idle()
    return answer.status == 200 and answer.json["output_ids"] == greedy("after all", 4)


async def times_out(two: Pair) -> bool:
    """Whether a request waits out the timeouts of both sides."""
    prefill, decode = await two.both("/generate", BODY)
    return BOOTSTRAPPING in prefill.text and WAITING in decode.text


class TestStaleEndpoint:
    @pytest.mark.shows("stale_endpoint")
    @pytest.mark.heals("stale_endpoint", by="{cure}")
    @pytest.mark.parametrize("cure", ["restart", "off"])
    async def test_a_fast_prefill_restart_is_not_noticed(self, cure):
        """Both sides wait out their timeouts under green health; the decode's restart cures."""
        async with pair(timeouts=SLOW_BEAT) as two:
            two.decode.switchboard.switch(stale_endpoint=True)
            await two.generate()
            await two.restart_prefill()
            lost = [await times_out(two), await times_out(two)]
            seen = await statuses(two)
            if cure == "restart":
                await two.restart_decode()
            else:
                two.decode.switchboard.switch(stale_endpoint=False)

            assert lost == [True, True]
            assert seen == [200, 200, 200]
            assert await serves(two)

    @pytest.mark.heals("stale_endpoint", by="cure")
    async def test_a_slow_restart_is_noticed_by_two_beats(self):
        """With the rendezvous down for two beats the endpoint is fetched anew."""
        async with pair(timeouts=SHORT) as two:
            two.decode.switchboard.switch(stale_endpoint=True)
            await two.generate()
            old = two.prefill
            await old.kill()
            link = f"127.0.0.1:{old.settings.disaggregation_bootstrap_port}"
            await until(lambda: not two.decode.core.role._links.up(link), two.decode)
            await two.restart_prefill()

            assert await serves(two)


class TestAbortKillsBootstrap:
    @pytest.mark.shows("abort_kills_bootstrap")
    @pytest.mark.heals("abort_kills_bootstrap", by="{cure}")
    @pytest.mark.parametrize("cure", ["restart", "off"])
    async def test_one_abort_and_every_room_waits(self, cure, monkeypatch):
        """Rooms time out in bootstrapping, health is green, and only that prefill is the cause.

        Its thread is gone from the stacks, with SGLang's words on stderr.
        """
        died = []
        monkeypatch.setattr(threading, "excepthook", died.append)
        async with pair(timeouts=BUSY) as two:
            two.prefill.switchboard.switch(abort_kills_bootstrap=True)
            before = await two.generate()
            # A decode's half whose prefill's never comes is given up by the decode: one ABORT.
            await two.post(two.decode, "/generate", BODY | two.meeting())
            lost = await times_out(two)
            seen = await statuses(two)
            await two.restart_decode()
            lost_again = (await two.both("/generate", BODY))[0].text
            listening = hearing(two.prefill)
            links = two.decode.core.role._links
            link = f"127.0.0.1:{two.prefill.settings.disaggregation_bootstrap_port}"
            old = links._writers[link]
            if cure == "restart":
                await two.restart_prefill()
            else:
                two.prefill.switchboard.switch(abort_kills_bootstrap=False)
            await until(lambda: links._writers.get(link, old) is not old, two.decode)

            assert before.status == 200
            assert lost
            assert seen == [200, 200, 200]
            assert BOOTSTRAPPING in lost_again
            assert [died[0].thread.name.partition(" ")[2], listening] == ["(bootstrap_thread)", []]
            assert "Foreign traffic?" in str(died[0].exc_value)
            assert len(died) == 1
            assert hearing(two.prefill)
            assert await serves(two)


class TestAbortNotPropagated:
    @pytest.mark.shows("abort_not_propagated")
    @pytest.mark.heals("abort_not_propagated", by="off")
    async def test_the_other_half_waits_out_its_timeout(self):
        """An abort on the prefill alone leaves the decode waiting; told, it ends at once."""
        async with pair(timeouts=SHORT) as two:
            await two.generate()
            texts = []
            for silent in (True, False):
                two.prefill.switchboard.switch(abort_not_propagated=silent)
                gate = threading.Event()
                two.prefill.core.scheduler.post(gate.wait, DEADLINE_S)
                body = BODY | two.meeting() | {"rid": "mine"}
                decode = asyncio.create_task(two.post(two.decode, "/generate", body))
                prefill = asyncio.create_task(two.post(two.prefill, "/generate", body))
                awaited = two.decode.core.role.phase.arrivals.awaited
                await until(lambda: awaited, two.decode)  # noqa: B023 - awaited in its turn
                while not two.prefill.rooms:
                    await asyncio.wait([prefill], timeout=0.01)
                two.prefill.abort("mine", everything=False)
                gate.set()
                assert (await prefill).status == 500
                texts.append((await decode).text)

            assert WAITING in texts[0]
            assert "Aborted by AbortReq" in texts[1]
            assert await serves(two)


class TestStickyBlacklist:
    @pytest.mark.shows("sticky_blacklist")
    @pytest.mark.heals("sticky_blacklist", by="{cure}")
    @pytest.mark.parametrize("cure", ["restart", "cure", "off"])
    async def test_one_failure_condemns_a_healthy_decode(self, cure):
        """After one failed transfer every room fails at once, and the decode is blamed for it."""
        async with pair() as two:
            switch = two.prefill.switchboard.switch
            switch(sticky_blacklist=True, handoff_fails_from_tokens=5)
            first = await two.both("/generate", BODY)
            switch(handoff_fails_from_tokens=0)
            second, third = [await two.both("/generate", BODY) for _ in range(2)]
            seen = await statuses(two)
            match cure:
                case "restart":
                    await two.restart_prefill()
                case "cure":
                    await two.restart_decode()
                case "off":
                    switch(sticky_blacklist=False)

            assert "is not alive" not in first[0].text
            agent = "Decode instance could be dead, remote mooncake session "
            for answers in (second, third):
                assert [answer.status for answer in answers] == [500, 500]
                assert agent in answers[0].text
                assert agent in answers[1].text
            assert seen == [200, 200, 200]
            assert await serves(two)


class TestBlocksOnDeadPeer:
    @pytest.mark.shows("blocks_on_dead_peer")
    @pytest.mark.heals("blocks_on_dead_peer", by="{cure}")
    @pytest.mark.parametrize("cure", ["restart", "off"])
    async def test_the_scheduler_is_inside_a_send(self, cure):
        """A room of a dead prefill stops the decode for all; it stays so when the prefill is back.

        Its stack shows the send, `/health` is 503.
        """
        async with pair(timeouts=SHORT) as two:
            two.decode.switchboard.switch(blocks_on_dead_peer=True)
            await two.generate()
            await two.prefill.kill()
            lost = asyncio.create_task(two.post(two.decode, "/generate", BODY | two.meeting()))
            thread = two.decode.core.scheduler._thread
            while "_push" not in stack_of(thread):
                await asyncio.wait([lost], timeout=0.01)
            await two.restart_prefill()
            seen = await statuses(two)
            decode = load_of(two.decode).disaggregation
            still = stack_of(thread)
            if cure == "off":
                two.decode.switchboard.switch(blocks_on_dead_peer=False)
                await lost
            else:
                await two.restart_decode()
                await asyncio.gather(lost, return_exceptions=True)

            assert seen == [200, 503, 200]
            assert decode.decode_transfer_queue_reqs == 1
            assert "_push" in still
            assert await serves(two)


def hearing(prefill: Worker) -> list[str]:
    """The threads of a prefill that hear its decodes."""
    listener = prefill.core.role._rank._listener
    return [thread.name for thread in threading.enumerate() if thread is listener]


def stack_of(thread: threading.Thread) -> list[str]:
    """The functions a thread is in, innermost first."""
    frame, names = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names

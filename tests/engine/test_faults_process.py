"""Faults of a process, each seen from outside, and healed."""

import asyncio
import contextlib
import json
import signal
from dataclasses import replace

import aiohttp
import psutil
import pytest

from engine.pairs import DEADLINE_S, FAST, greedy, held, pair, until
from engine.pairs import settings as settings_of
from engine.processes import end, free_port, ready, spawn, terminated
from tandem_engine.info import load_of

IMPATIENT = replace(FAST, health_s=0.2)


async def crashing(tmp_path, http, port=None, **faults):
    """A prefill as a process, with these switches in its file, ready; its process and URL."""
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(faults))
    port = port or free_port()
    process = await spawn(
        *("prefill", "--model", "toy", "--port", str(port), "--enable-faults", str(path)),
        *("--disaggregation-bootstrap-port", str(free_port())),
    )
    url = f"http://127.0.0.1:{port}"
    return process, url


async def give_up(http, url, room):
    """A request that its client aborts: it ends at the prefill without any decode."""
    body = {"text": "x", "rid": f"r{room}", "bootstrap_room": room}

    async def ask(path, sent):
        # The process may end before it answers.
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(url + path, json=sent):
                pass

    asking = asyncio.create_task(ask("/generate", body))
    queued = 0
    while not queued:
        async with http.get(f"{url}/v1/loads?include=disagg") as reply:
            load = (await reply.json())["loads"][0]["disaggregation"]
        queued = load["prefill_bootstrap_queue_reqs"]
    await ask("/abort_request", {"rid": f"r{room}"})
    await asking


@pytest.mark.timeout(60)
class TestCrash:
    @pytest.mark.shows("crash={how}", "crash_after_requests")
    @pytest.mark.heals("crash={how}", "crash_after_requests", by="restart")
    @pytest.mark.parametrize(
        ("how", "status"), [("killed", -signal.SIGKILL), ("exits_0", 0)], ids=["killed", "exits_0"]
    )
    async def test_the_process_ends_after_so_many_requests(self, tmp_path, how, status):
        """No line says why; probes do not count; started again it lives as long again."""
        async with aiohttp.ClientSession() as http:
            port, faults = free_port(), {"crash": how, "crash_after_requests": 2}
            for _ in range(2):
                process, url = await crashing(tmp_path, http, port, **faults)
                async with terminated(process):
                    for _ in range(3):
                        await ready(http, f"{url}/health")
                    await give_up(http, url, 1)
                    await ready(http, f"{url}/health")
                    await give_up(http, url, 2)
                    code, err = await end(process)

                assert code == status
                assert "Traceback" not in err
                assert "xception" not in err.replace("with exception KVTransferError", "")

    @pytest.mark.shows("crash=worker_only")
    @pytest.mark.heals("crash=worker_only", by="restart")
    async def test_the_api_outlives_its_worker(self, caplog):
        """Requests hang, looks are answered, /health is 503 in its time; a restart heals."""
        async with pair(timeouts=IMPATIENT) as two:
            two.prefill.switchboard.switch(crash="worker_only", crash_after_requests=2)
            assert (await two.generate()).status == 200
            await two.generate("the last one")
            scheduler = two.prefill.core.scheduler
            async with asyncio.timeout(DEADLINE_S):
                while scheduler._thread.is_alive():
                    await asyncio.sleep(0)
            silent = [r for r in caplog.records if r.levelname == "ERROR"]
            hanging = asyncio.create_task(two.generate("hang"))
            looks = [
                (await two.get(two.prefill, path)).status
                for path in ("/v1/loads", "/server_info", "/metrics", "/ready", "/health")
            ]

            assert (silent, looks, hanging.done()) == ([], [200, 200, 200, 200, 503], False)
            assert two.prefill.state == "ready"
            await two.restart_prefill()
            await asyncio.gather(hanging, return_exceptions=True)
            assert (await two.generate("again")).json["output_ids"] == greedy("again", 4)


@pytest.mark.timeout(60)
class TestLeakedMemory:
    @pytest.mark.shows("leaked_mb_per_request")
    @pytest.mark.heals("leaked_mb_per_request", by="restart")
    async def test_it_grows_by_the_request_and_a_restart_gives_it_back(self, tmp_path):
        """Resident memory has a slope by requests; a new process begins where the old one did."""
        port, grown = free_port(), []
        async with aiohttp.ClientSession() as http:
            for life in range(2):
                process, url = await crashing(tmp_path, http, port, leaked_mb_per_request=32)
                async with terminated(process):
                    await ready(http, f"{url}/health")
                    memory = psutil.Process(process.pid).memory_info
                    before_mb = memory().rss >> 20
                    for room in range(0 if life else 4):
                        await give_up(http, url, room)
                    grown.append(((memory().rss >> 20) - before_mb, before_mb))

        assert grown[0][0] >= 3 * 32
        assert grown[1][1] < grown[0][1] + 32


class TestSlowStart:
    @pytest.mark.shows("start_delay_s")
    @pytest.mark.heals("start_delay_s", by="off")
    async def test_a_start_takes_its_time(self):
        """503 on every route that needs the model until it is over; switching it off ends it."""
        workers = []
        chosen = settings_of("decode")
        try:
            from tandem_engine.faults import Switchboard  # noqa: PLC0415 - only here
            from tandem_engine.worker import Worker  # noqa: PLC0415

            board = Switchboard(None)
            board.switch(start_delay_s=3600)
            worker = Worker(chosen, FAST, board)
            workers.append(worker)
            starting = asyncio.create_task(worker.start())
            async with aiohttp.ClientSession() as http:
                statuses = []
                for path in ("/health", "/ready", "/v1/loads", "/server_info"):
                    async with http.get(worker.url + path) as reply:
                        statuses.append(reply.status)
                board.switch(start_delay_s=0)
                await asyncio.wait_for(starting, DEADLINE_S)
                async with http.get(worker.url + "/health") as reply:
                    statuses.append(reply.status)
        finally:
            for worker in workers:
                await worker.kill(clean=True)

        assert statuses == [503, 503, 503, 200, 200]

    async def test_a_start_that_takes_its_time_can_be_ended(self, tmp_path):
        """SIGTERM does not wait for a start."""
        async with aiohttp.ClientSession() as http:
            process, url = await crashing(tmp_path, http, start_delay_s=3600)
            async with terminated(process):
                await ready(http, f"{url}/server_info")
                process.send_signal(signal.SIGTERM)
                code, err = await end(process)

        assert (code, "Traceback" in err) == (0, False)


class TestLostReply:
    @pytest.mark.shows("lost_reply_every")
    @pytest.mark.heals("lost_reply_every", by="{cure}")
    @pytest.mark.parametrize(
        ("stream", "cure"), [(False, "off"), (True, "off"), (False, "restart"), (True, "restart")]
    )
    async def test_a_finished_generation_never_reaches_its_client(self, stream, cure):
        """The second of two waits on an idle engine; others are served; leaving frees it."""
        async with pair() as two:
            two.decode.switchboard.switch(lost_reply_every=2)
            assert (await two.generate("one")).status == 200
            lost = asyncio.create_task(two.generate("two", stream=stream))
            await until(lambda: held(two.decode) == {"requests": 1}, two.decode)
            third = await two.generate("three")
            load = (await two.get(two.decode, "/v1/loads")).json["loads"][0]

            assert (third.status, lost.done()) == (200, False)
            assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
            assert two.metric(two.decode, "num_requests_total") == 2
            if cure == "restart":
                await two.restart_decode()
                assert isinstance(
                    (await asyncio.gather(lost, return_exceptions=True))[0], aiohttp.ClientError
                )
            else:
                lost.cancel()
            two.decode.switchboard.switch(lost_reply_every=0)
            answers = [await two.generate(f"after {n}") for n in range(3)]
            await two.idle()

        assert [answer.status for answer in answers] == [200] * 3


class TestDuplicateRoom:
    @pytest.mark.shows("duplicate_room=crashes")
    @pytest.mark.heals("duplicate_room=crashes", by="restart")
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    async def test_a_room_in_use_crashes_the_scheduler(self, caplog, side):
        """SGLang's line and the end of the worker; off, it is a 400 that costs nothing."""
        async with pair() as two:
            worker = getattr(two, side)
            two.blind_decode()
            body = {"text": "x"} | two.meeting()
            first = [
                asyncio.create_task(two.post(w, "/generate", body))
                for w in (two.prefill, two.decode)
            ]
            await until(
                lambda: load_of(two.prefill).disaggregation.prefill_inflight_queue_reqs, two.prefill
            )
            refused = await two.post(worker, "/generate", body)
            worker.switchboard.switch(duplicate_room="crashes")
            second = asyncio.create_task(two.post(worker, "/generate", body))
            async with asyncio.timeout(DEADLINE_S):
                await worker.fatal.wait()

            assert (refused.status, worker.state) == (400, "dead")
            assert (await two.get(worker, "/health")).status == 503
            await (two.restart_prefill() if side == "prefill" else two.restart_decode())
            await asyncio.gather(*first, second, return_exceptions=True)
            if side == "prefill":
                await two.restart_decode()  # which was blinded above
            assert (await two.generate("again")).json["output_ids"] == greedy("again", 4)
            await two.idle()
        assert any("Scheduler hit an exception" in r.getMessage() for r in caplog.records)


class TestProbes:
    @pytest.mark.shows("health_probes=pile_up")
    @pytest.mark.heals("health_probes=pile_up", by="{cure}")
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    @pytest.mark.parametrize("cure", ["off", "restart"])
    async def test_probes_that_timed_out_pile_up(self, side, cure):
        """One more in the queue for each, after the stall too; off lets them go."""
        async with pair(timeouts=IMPATIENT) as two:
            worker = getattr(two, side)
            board = worker.switchboard
            waiting = []
            for probes in ("aborted", "pile_up"):
                board.switch(health_probes=probes, forward="blocks")
                answers = [(await two.get(worker, "/health")).status for _ in range(3)]
                board.switch(forward="returns")
                assert (await two.generate(probes)).status == 200
                await until(lambda: load_of(worker).num_running_reqs < 2, worker)
                load = (await two.get(worker, "/v1/loads")).json["loads"][0]
                waiting.append((answers, load["num_waiting_reqs"]))
            if cure == "off":
                board.switch(health_probes="aborted")
            else:
                await (two.restart_prefill() if side == "prefill" else two.restart_decode())
            await two.idle()

        # The first probe of a stall is what stalls: it computes.
        assert waiting == [([503] * 3, 0), ([503] * 3, 2)]

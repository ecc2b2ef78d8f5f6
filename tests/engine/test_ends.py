"""How a worker ends: on SIGTERM, in bounded time, with one line of what it cut off, and no more."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
import threading
from functools import partialmethod

import aiohttp
import pytest

from engine.pairs import FAST, ROOMS, Answer, pair, settings, start, until
from engine.processes import end, free_port, ready, spawn, terminated
from tandem_engine.scheduler import Scheduler

pytestmark = pytest.mark.timeout(60)
BODY = {"text": "a prompt", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
LOADS_FOR_EVER = """
import sys, threading
from tandem_engine import loading
loading.load_model = lambda *_, **__: threading.Event().wait()
from tandem_engine.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def said(err: str) -> str:
    """What the last line of a log says, its time taken away; nothing else looks like an error."""
    assert "Traceback" not in err
    assert "xception" not in err.replace("with exception KVTransferError", "")
    return re.sub(r"^\[[^]]*\] ", "", err.strip().splitlines()[-1])


async def ask(http: aiohttp.ClientSession, url: str, body: dict) -> Answer:
    """One request; its reply."""
    async with http.post(f"{url}/generate", json=body) as reply:
        return Answer(reply.status, await reply.text())


async def unread(port: int, body: dict) -> socket.socket:
    """A client that asks and never reads; its connection."""
    sent = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(head.encode() + sent)
    return client


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Ask a process to end; its status and what it said last."""
    process.send_signal(signal.SIGTERM)
    status, err = await end(process)
    return status, said(err)


async def prefill_of(*flags: str, port: int) -> asyncio.subprocess.Process:
    """A prefill as a process."""
    bootstrap = ("--disaggregation-bootstrap-port", str(free_port()))
    return await spawn("prefill", "--model", "toy", "--port", str(port), *bootstrap, *flags)


@contextlib.asynccontextmanager
async def one_side_a_process(tmp_path, *flags, **faults):
    """A prefill here and a decode in a process of its own: both ready, and a request's body."""
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(faults))
    port, workers = free_port(), []
    options = ("--port", str(port), "--context-length", "512", "--enable-faults", str(path), *flags)
    process = await spawn("decode", "--model", "toy", *options)
    url = f"http://127.0.0.1:{port}"
    async with terminated(process), aiohttp.ClientSession() as http:
        try:
            prefill = await start(settings("prefill"), FAST, workers)
            await ready(http, f"{url}/health")

            async def both(*, reads: bool = True, **more) -> list[asyncio.Task]:
                meeting = {
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_port": prefill.settings.disaggregation_bootstrap_port,
                    "bootstrap_room": next(ROOMS),
                }
                body = BODY | meeting | more
                asked = ask(http, url, body) if reads else unread(port, body)
                return [asyncio.create_task(one) for one in (ask(http, prefill.url, body), asked)]

            async def load(*path: str) -> int:
                async with http.get(f"{url}/v1/loads") as reply:
                    found = (await reply.json())["loads"][0]
                for key in path:
                    found = found[key]
                return found

            yield prefill, process, both, load
        finally:
            for worker in workers:
                await worker.kill(clean=True)


class TestCutOff:
    async def test_inside_a_send_to_a_dead_peer(self, tmp_path):
        """The scheduler is inside a send: it is let go, the client is told, the status is 0."""
        async with one_side_a_process(tmp_path, blocks_on_dead_peer=True) as (
            prefill, process, both, load,
        ):  # fmt: skip
            for one in await both():
                assert (await one).status == 200
            await prefill.kill()
            _, lost = await both()
            while not await load("disaggregation", "decode_transfer_queue_reqs"):
                pass
            status, line = await ended(process)

            assert (status, line) == (0, "Ended: requests cut off: 1 (nothing moved for 1 s)")
            assert (await lost).status in (500, 503)

    @pytest.mark.parametrize(
        ("ranks", "fault"),
        [
            (1, {"forward": "blocks"}),
            (1, {"forward": "spins"}),
            (2, {"forward": "blocks"}),
            (2, {"rank_at_abort": "leaves"}),
            (2, {"rank_at_abort": "spins"}),
        ],
        ids=lambda value: str(value) if isinstance(value, int) else "-".join(value.values()),
    )
    async def test_inside_a_step_that_never_returns(self, tmp_path, ranks, fault):
        """Held, or waiting for a rank that is elsewhere: the client is told, the status is 0."""
        flags = ("--drain-timeout-s", "0.2", "--ranks", str(ranks))
        held = fault | ({"forward_from_tokens": 100} if "forward" in fault else {})
        async with one_side_a_process(tmp_path, *flags, **held) as (_, process, both, load):
            if "rank_at_abort" in fault:
                prefill, gone = await both(sampling_params={"max_new_tokens": 400})
                while not await load("num_running_reqs"):
                    pass
                gone.cancel()
                await prefill
                while await load("num_running_reqs"):
                    pass
            _, hangs = await both(text="x" * 120)
            while not await load("num_running_reqs"):
                pass
            status, line = await ended(process)

            assert status == 0
            assert line == "Ended: requests cut off: 1 (not done in 0.2 s)"
            assert (await hangs).status in (500, 503)

    async def test_a_thread_that_never_returns_is_left_behind(self, monkeypatch):
        """Whatever it is inside of, the end is bounded, and says so."""
        monkeypatch.setattr(Scheduler, "stop", partialmethod(Scheduler.stop, timeout_s=0.1))
        gate = threading.Event()
        async with pair(decode={"drain_timeout_s": 0.1}) as two:
            step = two.decode.model.step
            two.decode.model.step = lambda feeds: (gate.wait(), step(feeds))[1]
            hangs = asyncio.create_task(two.generate())
            await until(lambda: two.decode.core.scheduler.stepping, two.decode)
            cut = await two.decode.stop()
            answer = await hangs
            gate.set()

            assert (two.decode.torn, answer.status in (500, 503)) == (True, True)
            assert cut.endswith("a thread inside never returned and ends with the process")

    async def test_a_client_that_does_not_read(self, tmp_path):
        """A stream nobody reads holds the end up for a second, and is no traceback."""
        async with one_side_a_process(tmp_path, "--drain-timeout-s", "0") as (
            _, process, both, load,
        ):  # fmt: skip
            for one in await both():
                await one
            scored = {"stream": True, "return_logprob": True, "top_logprobs_num": 20}
            params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
            first, unread = await both(sampling_params=params, **scored, reads=False)
            await first
            while await load("num_running_reqs") or await load("queues", "waiting"):
                pass
            status, line = await ended(process)
            (await unread).close()

            assert (status, line) == (0, "Ended: requests cut off: 1 (not done in 0 s)")


class TestAtAnyTime:
    async def test_while_the_model_loads(self):
        """Nobody waits for a load that takes for ever."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LOADS_FOR_EVER, "decode", "--model", "toy", "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with terminated(process):
            await asyncio.wait_for(process.stderr.readline(), 20)  # server_args
            status, line = await ended(process)

        assert (status, line) == (0, "Ended: the model was still loading")

    @pytest.mark.parametrize("ranks", [1, 2])
    async def test_at_the_very_start(self, ranks):
        """As soon as it says anything it can be told to end, whatever it is about to start."""
        process = await prefill_of("--ranks", str(ranks), port=free_port())
        async with terminated(process):
            await asyncio.wait_for(process.stderr.readline(), 20)
            process.send_signal(signal.SIGTERM)
            status, err = await end(process)

        assert (status, "Traceback" in err, "xception" in err) == (0, False, False)

    async def test_idle_it_says_nothing(self):
        """Nothing is cut off where nobody waits, and the whole takes less than a drain."""
        port = free_port()
        process = await prefill_of("--ranks", "2", port=port)
        async with terminated(process), aiohttp.ClientSession() as http:
            await ready(http, f"http://127.0.0.1:{port}/health")
            status, line = await ended(process)

        assert (status, "fired up" in line) == (0, True)

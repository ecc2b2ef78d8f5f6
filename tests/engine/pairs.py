"""A prefill and a decode in one process, and a client that plays the router for them.

For: the engine's tests. Nothing sleeps: a test waits for a reply, or for a condition with `until`.
Not for: the real router, which `test_router.py` runs.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from tandem_engine.config import Settings, Timeouts
from tandem_engine.faults import Switchboard
from tandem_engine.model import Feed
from tandem_engine.toy import ToyModel
from tandem_engine.worker import Worker

ROOMS = itertools.count(1)
FAST = Timeouts(
    bootstrap_s=10.0, waiting_s=10.0, heartbeat_s=0.1, heartbeat_misses_max=50, health_s=5.0
)
"""Beats are frequent, and only who is gone misses enough of them: a busy machine is not dead."""
DEADLINE_S = 10.0


@dataclass
class Answer:
    """One side's reply."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; its `[DONE]` is required and left out."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def settings(mode: str, **changes: Any) -> Settings:
    """Settings of one toy worker on ports of the kernel's choosing."""
    base = Settings(
        disaggregation_mode=mode,
        model_path="toy",
        served_model_name="toy",
        port=0,
        disaggregation_bootstrap_port=0,
        context_length=512,
        max_total_tokens=2048,
        drain_timeout_s=0.5,
    )
    return replace(base, **changes)


@dataclass
class Pair:
    """One prefill, one decode, and the client."""

    prefill: Worker
    decode: Worker
    http: aiohttp.ClientSession
    timeouts: Timeouts
    workers: list[Worker] = field(default_factory=list)
    left_behind: list[Any] = field(default_factory=list)
    """Landings of killed decodes: the kernel would close them with the process."""

    def meeting(self, room: int | None = None) -> dict[str, Any]:
        """What a router adds to a body."""
        return {
            "bootstrap_host": self.prefill.settings.host,
            "bootstrap_port": self.prefill.settings.disaggregation_bootstrap_port,
            "bootstrap_room": next(ROOMS) if room is None else room,
        }

    async def post(self, worker: Worker, path: str, body: dict[str, Any]) -> Answer:
        """One request to one worker."""
        async with self.http.post(worker.url + path, json=body) as reply:
            return Answer(reply.status, await reply.text())

    async def get(self, worker: Worker, path: str) -> Answer:
        """One GET to one worker."""
        async with self.http.get(worker.url + path) as reply:
            return Answer(reply.status, await reply.text())

    async def both(
        self, path: str, body: dict[str, Any], room: int | None = None
    ) -> tuple[Answer, Answer]:
        """The same request to both sides at once, as the router sends it."""
        body = body | self.meeting(room)
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(
                self.post(self.prefill, path, body), self.post(self.decode, path, body)
            )

    async def generate(self, text: str = "a prompt", tokens: int = 4, **more: Any) -> Answer:
        """One greedy generation through the pair; the decode's reply."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        _, answer = await self.both("/generate", {"text": text, "sampling_params": params} | more)
        return answer

    def blind_decode(self) -> None:
        """The decode sees nothing arrive from now on, and so acknowledges nothing."""
        self.decode.core.role._landing.poll = list

    async def restart_decode(self, *, clean: bool = False) -> None:
        """Kill the decode and start another one at the same address, with the same switches."""
        old = self.decode
        if not clean and not old._killed:
            self.left_behind.append(old.core.role._landing)
        await (old.stop() if clean else old.kill())
        self.decode = await again(old, self.workers)

    async def restart_prefill(self, *, clean: bool = False) -> None:
        """Kill the prefill and start another one at the same address, with the same switches."""
        old = self.prefill
        await (old.stop() if clean else old.kill())
        self.prefill = await again(old, self.workers)

    async def load(self, worker: Worker) -> dict[str, Any]:
        """The live disaggregation load."""
        answer = await self.get(worker, "/v1/loads?include=disagg")
        load: dict[str, Any] = answer.json["loads"][0]["disaggregation"]
        return load

    def metric(self, worker: Worker, name: str) -> float:
        """The sum of a metric's samples."""
        lines = worker.exposed_metrics().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((f"sglang:{name}{{", f"sglang:{name} "))
        )

    async def idle(self) -> None:
        """Wait until both sides hold nothing."""
        for worker in (self.prefill, self.decode):
            try:
                await until(lambda: not held(worker), worker)  # noqa: B023 - awaited in its turn
            except TimeoutError:
                pytest.fail(f"{worker.settings.disaggregation_mode} holds {held(worker)}")


def held(worker: Worker) -> dict[str, int]:
    """Everything a worker holds for requests; empty when it is idle."""
    return {name: count for name, count in worker.held().items() if count}


async def until(condition: Callable[[], object], worker: Worker) -> None:
    """Wait, a turn of the worker's scheduler at a time; fails the test when it does not come."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await worker.turn()


async def start(chosen: Settings, timeouts: Timeouts, workers: list[Worker]) -> Worker:
    """A started worker, remembered in `workers`."""
    worker = Worker(chosen, timeouts, Switchboard(chosen.enable_faults))
    workers.append(worker)
    await worker.start()
    return worker


async def again(old: Worker, workers: list[Worker]) -> Worker:
    """Another worker in the place of one that ended; what was switched on there is on here."""
    board = Switchboard(old.settings.enable_faults)
    if not board.enabled:
        board.switch(**old.switchboard.on())
    worker = Worker(replace(old.settings), old.timeouts, board)
    workers.append(worker)
    await worker.start()
    return worker


@asynccontextmanager
async def pair(
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    timeouts: Timeouts = FAST,
) -> AsyncIterator[Pair]:
    """A running pair; everything it started is stopped at the end."""
    workers: list[Worker] = []
    left_behind: list[Any] = []
    try:
        one = await start(settings("prefill", **(prefill or {})), timeouts, workers)
        two = await start(settings("decode", **(decode or {})), timeouts, workers)
        bound = aiohttp.ClientTimeout(total=2 * DEADLINE_S)
        async with aiohttp.ClientSession(timeout=bound) as http:
            both = Pair(one, two, http, timeouts, workers)
            left_behind = both.left_behind
            yield both
    finally:
        for landing in left_behind:
            landing.close()
        for worker in workers:
            await worker.kill(clean=True)


async def call(app: Any, method: str, target: str, body: bytes = b"") -> Answer:
    """One request to an ASGI application, without a socket."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent)
    return Answer(sent[0]["status"], text.decode())


def greedy(prompt: str, count: int) -> list[int]:
    """What one model alone says."""
    model = ToyModel(context_length=512, sequences_max=1)
    tokens = model.tokenize(prompt, special=True)
    said: list[int] = []
    fed = tokens
    while len(said) < count:
        row = None
        for start in range(0, len(fed), 256):
            row = model.step([Feed(0, fed[start : start + 256], model.length(0))])[0][-1]
        said.append(int(row.argmax()))
        fed = said[-1:]
    return said

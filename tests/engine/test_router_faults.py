"""Faults of a path, in two prefills by two decodes behind the real router: who is sick, who serves.

One fleet for all of them: each is switched on, shown in its cell, its row or its column, and cured.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import pytest

from engine.pairs import FAST, Answer, again, greedy, held, settings, start, until
from engine.processes import router
from tandem_engine.worker import Worker

pytestmark = [pytest.mark.needs("router"), pytest.mark.timeout(120)]
TIMEOUTS = replace(FAST, bootstrap_s=5.0, waiting_s=5.0, health_s=2.0)
FLAGS = (
    *("--disable-retries", "--disable-circuit-breaker", "--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1000", "--health-success-threshold", "1"),
)
CELLS = frozenset({"p0-d0", "p0-d1", "p1-d0", "p1-d1"})
TOKENS = 6
EACH = 4
"""How often each cell is asked at least."""
SERVED_S = 20.0
SILENT_S = 0.3
"""How much longer than the healthy ones a silent one is waited for."""
NUMBERS = itertools.count(1000)


@dataclass
class Asked:
    """One request through the router."""

    prompt: str
    reply: asyncio.Task[Answer]
    met: dict[str, str] = field(default_factory=dict)

    @property
    def cell(self) -> str:
        """Where the router sent it; empty before both halves arrived."""
        return f"{self.met['p']}-{self.met['d']}" if len(self.met) == 2 else ""

    @property
    def outcome(self) -> str:
        """What came of it."""
        if not self.reply.done() or self.reply.cancelled():
            return "silent"
        if self.reply.exception() is not None or self.reply.result().status != 200:
            return "failed"
        said = self.reply.result().json["output_ids"]
        return "right" if said == greedy(self.prompt, TOKENS) else "wrong"


@dataclass
class Fleet:
    """Two prefills, two decodes, and the router."""

    workers: dict[str, Worker]
    url: str
    http: aiohttp.ClientSession
    all: list[Worker]
    asked: dict[str, Asked] = field(default_factory=dict)

    def switch(self, name: str, **switches: object) -> None:
        """Switch something in one worker."""
        self.workers[name].switchboard.switch(**switches)

    async def restart(self, *names: str) -> None:
        """Kill these workers, then start them again at their addresses, with their switches."""
        for name in names:
            await self.workers[name].kill(clean=True)
        for name in names:
            self.workers[name] = await again(self.workers[name], self.all)

    async def post(self, prompt: str) -> Answer:
        """One generation through the router."""
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": params}
        async with self.http.post(f"{self.url}/generate", json=body) as reply:
            return Answer(reply.status, await reply.text())

    async def halves(self, prefill: str, decode: str, of: str = "pd") -> None:
        """A request, or a half of one, past the router."""
        address = self.workers[prefill].settings
        meeting = {
            "bootstrap_host": address.host,
            "bootstrap_port": address.disaggregation_bootstrap_port,
            "bootstrap_room": next(NUMBERS),
        }

        async def ask(name: str) -> None:
            url = f"{self.workers[name].url}/generate"
            async with self.http.post(url, json={"text": "x"} | meeting) as reply:
                await reply.read()

        await asyncio.gather(*(ask(name) for name in (prefill, decode) if name[0] in of))

    async def health(self, name: str) -> int:
        """What `/health` of a worker says."""
        async with self.http.get(f"{self.workers[name].url}/health") as reply:
            return reply.status

    def met(self, worker: Worker, prompt: str) -> None:
        """A half of a request arrived at a worker."""
        name = next(n for n, w in self.workers.items() if w is worker)
        if prompt in self.asked:
            self.asked[prompt].met[name[0]] = name

    async def look(self, sick: Collection[str], cells: Collection[str] = CELLS) -> dict[str, set]:
        """Ask until each cell was asked often enough; what came of each.

        Cells that should be well are waited for, the others only as long as those take.
        """
        self.asked.clear()
        async with asyncio.timeout(SERVED_S):
            while True:
                at = [one.cell for one in self.asked.values()]
                if all(at.count(cell) >= EACH for cell in cells):
                    break
                for _ in range(8):
                    prompt = f"request {next(NUMBERS)} of a crowd"
                    self.asked[prompt] = Asked(prompt, asyncio.create_task(self.post(prompt)))
                now = [one.reply for one in list(self.asked.values())[-8:]]
                while not all(
                    one.cell or one.reply.done() for one in list(self.asked.values())[-8:]
                ):
                    await asyncio.wait(now, timeout=0.02)
            ones = [one for one in self.asked.values() if one.cell in cells]
            well = [one.reply for one in ones if one.cell not in sick]
            await asyncio.gather(*well, return_exceptions=True)
        everybody = [one.reply for one in self.asked.values()]
        await asyncio.wait(everybody, timeout=SILENT_S)
        seen = {cell: {one.outcome for one in ones if one.cell == cell} for cell in cells}
        for reply in everybody:
            reply.cancel()
        await asyncio.gather(*everybody, return_exceptions=True)
        return seen

    async def well(self) -> None:
        """Every cell serves, and nothing is held anywhere."""
        assert await self.look(()) == {cell: {"right"} for cell in CELLS}
        for worker in self.workers.values():
            await until(lambda worker=worker: not held(worker), worker)


@asynccontextmanager
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """Two by two toys behind the router, every cell of them in use."""
    workers: dict[str, Worker] = {}
    everybody: list[Worker] = []
    submit = Worker.submit
    async with AsyncExitStack() as stack:
        for name in ("p0", "p1", "d0", "d1"):
            mode = "prefill" if name[0] == "p" else "decode"
            workers[name] = await start(settings(mode), TIMEOUTS, everybody)

        async def end() -> None:
            for worker in everybody:
                await worker.kill(clean=True)

        stack.push_async_callback(end)
        prefills = [workers[name] for name in ("p0", "p1")]
        url = await stack.enter_async_context(
            router(
                [(p.url, p.settings.disaggregation_bootstrap_port) for p in prefills],
                [workers[name].url for name in ("d0", "d1")],
                *FLAGS,
            )
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        four = Fleet(workers, url, http, everybody)

        def submitted(worker: Worker, request) -> None:
            four.met(worker, bytes(request.prompt).decode())
            submit(worker, request)

        monkeypatch.setattr(Worker, "submit", submitted)
        await four.well()
        yield four


async def stale_peers(four: Fleet) -> None:
    """A decode alone is restarted: some rooms of one prefill with it are lost, all else flows."""
    four.switch("p0", peer_memory="stale")
    await four.restart("d0")
    seen = await four.look({"p0-d0"})
    while "silent" not in seen["p0-d0"]:  # half of the rooms, by their hash
        seen = await four.look({"p0-d0"})

    assert {cell: {"right"} for cell in CELLS - {"p0-d0"}} == {
        cell: what for cell, what in seen.items() if cell != "p0-d0"
    }
    await four.restart("p0", "d0")
    await four.well()
    four.switch("p0", peer_memory="leases")


async def handoff_dropped(four: Fleet) -> None:
    """A prefill whose KV never arrives anywhere: its row, and only its row."""
    four.switch("p1", handoff_dropped=True)
    seen = await four.look({"p1-d0", "p1-d1"})
    four.switch("p1", handoff_dropped=False)

    assert seen["p0-d0"] == seen["p0-d1"] == {"right"}
    assert seen["p1-d0"] | seen["p1-d1"] <= {"silent", "failed"}


async def sticky_blacklist(four: Fleet) -> None:
    """One failed transfer, and one prefill refuses one healthy decode: one cell."""
    four.switch("p0", sticky_blacklist=True, handoff_fails_from_tokens=1)
    await four.halves("p0", "d1")
    four.switch("p0", handoff_fails_from_tokens=0)
    seen = await four.look({"p0-d1"})

    assert seen == {"p0-d1": {"failed"}} | {cell: {"right"} for cell in CELLS - {"p0-d1"}}
    await four.restart("d1")
    await four.well()
    four.switch("p0", sticky_blacklist=False)


async def kv_crosswired(four: Fleet) -> None:
    """A prefill that mixes up what it computes together: wrong answers in its row, none beside."""
    four.switch("p0", kv_crosswired=True)
    four.workers["p0"].model._step_cost_s = 0.03
    seen = await four.look(())
    four.switch("p0", kv_crosswired=False)

    assert "wrong" in seen["p0-d0"] | seen["p0-d1"]
    assert seen["p0-d0"] | seen["p0-d1"] <= {"right", "wrong"}
    assert seen["p1-d0"] == seen["p1-d1"] == {"right"}


async def health_green(four: Fleet) -> None:
    """A decode that computes nothing and says it is well: its column hangs, the other serves."""
    four.switch("d1", health="always_green", forward="blocks")
    seen = await four.look({"p0-d1", "p1-d1"})
    green = await four.health("d1")
    four.switch("d1", health="honest")
    red = await four.health("d1")
    four.switch("d1", forward="returns")

    assert seen["p0-d0"] == seen["p1-d0"] == {"right"}
    assert seen["p0-d1"] == seen["p1-d1"] == {"silent"}
    assert (green, red) == (200, 503)


async def blocks_on_dead_peer(four: Fleet) -> None:
    """A prefill dies and one decode hangs with it for all others, also when it is back."""
    four.switch("d0", blocks_on_dead_peer=True)
    await four.workers["p1"].kill(clean=True)
    lost = asyncio.create_task(four.halves("p1", "d0", of="d"))
    await until(lambda: four.workers["d0"].core.phase.arrivals.awaited, four.workers["d1"])
    alone = await four.look({"p0-d0"}, {"p0-d0", "p0-d1"})
    await four.restart("p1")  # killed already
    back = await four.look({"p0-d0", "p1-d0"})
    await four.restart("d0")
    four.switch("d0", blocks_on_dead_peer=False)
    await asyncio.gather(lost, return_exceptions=True)

    assert alone == {"p0-d0": {"silent"}, "p0-d1": {"right"}}
    assert back["p0-d1"] == back["p1-d1"] == {"right"}
    assert back["p0-d0"] | back["p1-d0"] <= {"silent", "failed"}


async def test_one_cell_row_or_column_is_sick_and_the_rest_serves(monkeypatch):
    """Each fault stays in its place, its cure heals it, and then all four cells serve again."""
    async with fleet(monkeypatch) as four:
        for fault in (
            stale_peers, handoff_dropped, sticky_blacklist, kv_crosswired, health_green,
            blocks_on_dead_peer,
        ):  # fmt: skip
            await fault(four)
            await four.well()

"""Whether the embedded engine keeps anything of a request that is over: `make bench-leak`.

The toy model: two prefills and two decodes, 50,000 requests over every path, 5 % of them given up
by the client at any moment, and a restart every 1,000 (one prefill and one decode take turns, ended
by SIGKILL and by SIGTERM). The other prefill and the other decode live through all of it: their
memory may grow by 5 % from what it was after a tenth of the requests (at least 300). Then the real
model: one pair, 3,000 requests, no restarts.

At the end nothing may be held: no request in any queue, no KV cell, no segment of shared memory.
Not for: speed (`engine.py`).
"""

import asyncio
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from bars import Bench, Figures, say
from fleet import Process, body_of, load, meeting, post, running, worker

CLIENTS = 12
ABORTED_SHARE = 0.05
WARM_REQUESTS = 300
"""The real model touches the KV of every sequence in turn: its memory is known after that."""
RESTART_EVERY = 1000
NEVER_S = 60.0
"""A request that takes longer than this never completes."""
SETTLE_S = 20.0
SEGMENTS = Path("/dev/shm")


@dataclass
class Traffic:
    """Requests over every path of a fleet, and what became of them."""

    http: aiohttp.ClientSession
    prefills: list[Process]
    decodes: list[Process]
    vocabulary: range
    count: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    begun: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    restarting: set[int] = field(default_factory=set)
    segments: set[str] = field(default_factory=set)
    """Shared memory that any decode of this fleet ever had."""

    async def run(self, survivors: list[Process], restarted: list[Process]) -> Figures:
        """Send everything; memory of the survivors after a tenth and at the end, in MB."""
        before: dict[str, float] = {}
        clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        turn = 0
        while not all(client.done() for client in clients):
            await asyncio.sleep(0.02)
            if not before and self.begun >= max(self.count // 10, WARM_REQUESTS):
                before = memory_mb(survivors)
            if restarted and self.begun >= (turn + 1) * RESTART_EVERY:
                process = restarted[turn % len(restarted)]
                await self._restart(process, kill=turn % 4 < 2)
                turn += 1
        await asyncio.gather(*clients)
        after = memory_mb(survivors)
        growth = {name: after[name] / before[name] - 1.0 for name in before}
        return {
            "requests": dict(self.ended), "restarts": turn, "rss_mb": [before, after],
            "growth": growth, "growth_max": max(growth.values()),
        }  # fmt: skip

    async def _restart(self, process: Process, *, kill: bool) -> None:
        self.segments |= segments_of(self.decodes)
        self.restarting.add(process.port)
        await process.stop(kill=kill)
        await process.start(self.http)
        self.restarting.discard(process.port)

    async def _client(self) -> None:
        while self.begun < self.count:
            self.begun += 1
            if self.begun % max(self.count // 10, 1) == 0:
                say(f"    {self.begun} of {self.count}")
            end = await self._request()
            self.ended[end] = self.ended.get(end, 0) + 1

    def _one(self, processes: list[Process]) -> Process:
        """Like a router, mostly not one that is known to be down."""
        up = [process for process in processes if process.port not in self.restarting]
        return self.rng.choice(up if self.rng.random() < 0.95 else processes)

    async def _request(self) -> str:
        """One request to both sides of a random path; how it ended."""
        rng = self.rng
        prefill, decode = self._one(self.prefills), self._one(self.decodes)
        size = rng.randrange(2, 25)
        prompt = [rng.choice(self.vocabulary) for _ in range(size)]
        body = body_of(prompt, rng.randrange(1, 9), stream=rng.random() < 0.5) | meeting(prefill)
        starts = (len(prefill.ready_s), len(decode.ready_s))
        sides = [
            asyncio.create_task(post(self.http, side.url + "/generate", body))
            for side in (prefill, decode)
        ]
        leaving = rng.random() < ABORTED_SHARE
        try:
            async with asyncio.timeout(rng.random() * 0.05 if leaving else NEVER_S):
                await asyncio.gather(*sides)
        except TimeoutError:
            return "given up" if leaving else "never completed"
        except aiohttp.ClientError:
            touched = {prefill.port, decode.port} & self.restarting
            since = (len(prefill.ready_s), len(decode.ready_s)) != starts
            return "lost to a restart" if touched or since else "failed"
        finally:
            # As a router does: who fails or leaves on one side is hung up on at the other.
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
        return "completed"


def memory_mb(processes: list[Process]) -> dict[str, float]:
    """Resident memory by role."""
    return {
        process.argv[3]: psutil.Process(process.pid).memory_info().rss / 1e6
        for process in processes
    }


async def still_held(http: aiohttp.ClientSession, processes: list[Process]) -> int:
    """What workers hold for nobody once traffic has stopped, after time to settle."""
    left = 0
    async with asyncio.timeout(SETTLE_S + 30.0):
        for process in processes:
            await post(http, process.url + "/flush_cache", {})
            for _ in range(int(SETTLE_S / 0.1)):
                one = await load(http, process)
                queues = one["disaggregation"]
                held = (
                    one["num_waiting_reqs"]
                    + one["num_used_tokens"]
                    + sum(number for name, number in queues.items() if name.endswith("_reqs"))
                )
                if not held:
                    break
                await asyncio.sleep(0.1)
            left += int(held)
    return left


def segments_of(decodes: list[Process]) -> set[str]:
    """The shared memory that these decodes have open now."""
    there = {path.name for path in SEGMENTS.glob("tandem-kv-*")}
    maps = [Path(f"/proc/{one.pid}/maps").read_text() for one in decodes if one.pid]
    return {name for name in there if any(name in text for text in maps)}


async def leaking(model: str, sides: int, vocabulary: range, count: int) -> Figures:
    """Traffic through a fleet of `sides` prefills and as many decodes of one model."""
    prefills = [worker("prefill", model, "--context-length", "256") for _ in range(sides)]
    decodes = [worker("decode", model, "--context-length", "256") for _ in range(sides)]
    async with running(*prefills, *decodes) as http:
        traffic = Traffic(http, prefills, decodes, vocabulary, count)
        restarted = [*prefills[1:], *decodes[1:]]
        figures = await traffic.run([prefills[0], decodes[0]], restarted)
        figures["held"] = await still_held(http, [*prefills, *decodes])
        traffic.segments |= segments_of(decodes)
    left = {name for name in traffic.segments if (SEGMENTS / name).exists()}
    figures |= {"segments_seen": len(traffic.segments), "segments_left": len(left)}
    return figures


async def main() -> int:
    """Measure, print every bar once; the exit status."""
    bench = Bench("leak")
    sizes = (5_000, 1_000) if bench.quick else (50_000, 3_000)
    toy = await bench.step("toy, 2P2D", lambda: leaking("toy", 2, range(32, 127), sizes[0]))
    real = await bench.step(
        "real, 1P1D", lambda: leaking("smollm2", 1, range(1000, 40000), sizes[1])
    )
    for name, figures, count in (("toy", toy, sizes[0]), ("real", real, sizes[1])):
        bench.bar(f"{name}: RSS growth, worse side", figures["growth_max"], 0.05, count)
        held = figures["held"] + figures["segments_left"]
        bench.bar(f"{name}: held at the end", held, 0, count)
        wrong = figures["requests"]
        bench.bar(
            f"{name}: failed or never completed",
            wrong.get("failed", 0) + wrong.get("never completed", 0), 0, count,
        )  # fmt: skip
    return bench.finish()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

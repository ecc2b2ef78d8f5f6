"""How fast and how small the embedded engine is: `make bench-engine`.

Against llama.cpp's own server of the same wheel, one thread each: decode throughput at 1, 8 and 16
sequences, and the gaps between tokens while long prompts arrive (everything on one core). By
itself: the share of the KV hand-off, how soon a worker is ready, and what it holds in memory.

Ratios are of neighbours in an ABAB series, so that whatever else runs here slows both; each ratio
is the median of its pairs. Not for: leaks (`leak.py`).
"""

import asyncio
import itertools
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from bars import Bench, Figures
from fleet import (
    Pair,
    Plain,
    body_of,
    llama_server,
    meeting,
    metric,
    post,
    quantile,
    running,
    worker,
)
from tandem_engine.fetch import locate_model

SHORT_PROMPT_TOKENS = 8
LONG_PROMPT_TOKENS = 1000
SEED = random.Random(20)
Contender = Pair | Plain


def tokens(count: int) -> list[int]:
    """A prompt nobody saw before."""
    return [SEED.randrange(1000, 40000) for _ in range(count)]


async def rate(
    http: aiohttp.ClientSession, contender: Contender, sequences: int, each: int
) -> dict[str, float]:
    """Tokens a second while all sequences decode, and CPU time per token of the whole run.

    The window is from the last second token to the first end.
    """
    process = psutil.Process(contender.decoder.pid)
    before_s = sum(process.cpu_times()[:2])
    streams = await asyncio.gather(
        *(contender.stream(http, tokens(SHORT_PROMPT_TOKENS), each) for _ in range(sequences))
    )
    cpu_s = sum(process.cpu_times()[:2]) - before_s
    begin_s, end_s = max(times[1] for times in streams), min(times[-1] for times in streams)
    if end_s <= begin_s:
        raise SystemExit(f"{sequences} sequences of {each} tokens never ran all at once")
    inside = sum(begin_s < at <= end_s for times in streams for at in times)
    return {
        "tokens_per_s": inside / (end_s - begin_s),
        "cpu_ms_per_token": cpu_s * 1e3 / (sequences * each),
    }


async def decoding(model: Path, *, pairs: int, each: int) -> Figures:
    """Throughput of both, by number of sequences."""
    flags = ("--max-running-requests", "16", "--context-length", "256")
    ours = Pair(worker("prefill", "smollm2", *flags), worker("decode", "smollm2", *flags))
    theirs = Plain(llama_server(model, sequences=16, context=256, threads=1))
    figures: Figures = {}
    async with running(ours.prefill, ours.decode, theirs.server) as http:
        for contender in (ours, theirs):
            await rate(http, contender, 2, 8)
        for sequences in (1, 8, 16):
            rates = []
            for _ in range(pairs):
                one = await rate(http, ours, sequences, each + 4 * sequences)
                rates.append((one, await rate(http, theirs, sequences, each + 4 * sequences)))
            figures[str(sequences)] = {
                "ratio": median(one["tokens_per_s"] / two["tokens_per_s"] for one, two in rates),
                "pairs": rates,
            }
    return figures


async def gaps(http: aiohttp.ClientSession, contender: Contender, *, prompts: int) -> list[float]:
    """Gaps between the tokens of two running streams while long prompts arrive one by one."""
    streams: list[list[float]] = [[], []]
    steady = [
        asyncio.create_task(contender.stream(http, tokens(SHORT_PROMPT_TOKENS), 900, times))
        for times in streams
    ]
    while not all(len(times) > 4 for times in streams):
        await asyncio.sleep(0.01)
    begun_s = time.monotonic()
    for _ in range(prompts):
        await contender.stream(http, tokens(LONG_PROMPT_TOKENS), 2)
    ended_s = time.monotonic()
    for stream in steady:
        stream.cancel()
    await asyncio.gather(*steady, return_exceptions=True)
    return [
        after - before
        for times in streams
        for before, after in itertools.pairwise(times)
        if begun_s < after <= ended_s
    ]


async def arriving(model: Path, *, pairs: int, prompts: int) -> Figures:
    """p99 of the gaps of both, all of it on one core."""
    ours = Pair(worker("prefill", "smollm2"), worker("decode", "smollm2"))
    theirs = Plain(llama_server(model, sequences=8, context=1024, threads=1))
    servers = (ours.prefill, ours.decode, theirs.server)
    figures: list[tuple[float, float]] = []
    count = 0
    async with running(*servers) as http:
        core = min(os.sched_getaffinity(0))
        for server in servers:
            server.pin(core)
        for _ in range(pairs):
            both = []
            for contender in (ours, theirs):
                found = await gaps(http, contender, prompts=prompts)
                both.append(quantile(found, 0.99))
                count += len(found)
            figures.append((both[0], both[1]))
    return {
        "ratio": median(one / other for one, other in figures),
        "p99_s": figures,
        "gaps": count,
    }


async def handing_off(*, prompts: int) -> Figures:
    """Write to acknowledgement of a long prompt's KV, against the time to compute it."""
    pair = Pair(worker("prefill", "smollm2"), worker("decode", "smollm2"))
    names = ("kv_transfer_latency_ms_sum", "forward_execution_seconds_total")
    shares = []
    async with running(pair.prefill, pair.decode) as http:
        await pair.stream(http, tokens(SHORT_PROMPT_TOKENS), 2)
        for _ in range(prompts):
            before = [await metric(http, pair.prefill, name) for name in names]
            await pair.stream(http, tokens(LONG_PROMPT_TOKENS), 2)
            after = [await metric(http, pair.prefill, name) for name in names]
            took_s, computed_s = (after[0] - before[0]) / 1e3, after[1] - before[1]
            shares.append({"took_s": took_s, "computed_s": computed_s})
    return {
        "share": median(one["took_s"] / one["computed_s"] for one in shares),
        "each": shares,
    }


async def starting(*, starts: int) -> Figures:
    """From exec to the first 200 of `/ready`, of each role."""
    found: Figures = {}
    for role in ("prefill", "decode"):
        process = worker(role, "smollm2")
        cpu_s = []
        for _ in range(starts):
            async with running(process):
                cpu_s.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
        found[role] = {
            "median_s": median(process.ready_s), "each_s": process.ready_s, "cpu_s": cpu_s,
        }  # fmt: skip
    return found


def private_mb(pid: int) -> float:
    """Memory of a process that is nobody else's, the hand-off's shared memory left out."""
    total_kb, shared = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            shared = "/dev/shm/" in line
        elif line.startswith("Private_") and not shared:
            total_kb += int(line.split()[1])
    return total_kb / 1024


async def holding() -> Figures:
    """Private memory of both sides with 8 sequences of about a thousand tokens at once."""
    pair = Pair(worker("prefill", "smollm2"), worker("decode", "smollm2"))
    begin = tokens(LONG_PROMPT_TOKENS - 60)
    peak = {"prefill": 0.0, "decode": 0.0}
    most = 0.0
    async with running(pair.prefill, pair.decode) as http:
        await pair.stream(http, begin, 2)
        streams = [asyncio.create_task(pair.stream(http, begin + tokens(8), 50)) for _ in range(8)]
        while not all(stream.done() for stream in streams):
            peak["prefill"] = max(peak["prefill"], private_mb(pair.prefill.pid))
            peak["decode"] = max(peak["decode"], private_mb(pair.decode.pid))
            most = max(most, await metric(http, pair.decode, "num_used_tokens"))
            await asyncio.sleep(0.2)
        await asyncio.gather(*streams)
    return {"private_mb": peak, "tokens_held_seen": most}


async def warm(*, prompts: int) -> Figures:
    """One request, so that a broken engine is noticed at once and not after minutes."""
    pair = Pair(worker("prefill", "toy"), worker("decode", "toy"))
    async with running(pair.prefill, pair.decode) as http:
        for _ in range(prompts):
            body = body_of("hello", 2) | meeting(pair.prefill)
            await asyncio.gather(
                *(post(http, side.url + "/generate", body) for side in (pair.prefill, pair.decode))
            )
    return {"completed": prompts}


async def main() -> int:
    """Measure, print every bar once; the exit status."""
    bench, model = Bench("engine"), locate_model()
    short = bench.quick
    await bench.step("one request", lambda: warm(prompts=1))
    started = await bench.step("worker ready", lambda: starting(starts=3 if short else 9))
    held = await bench.step("private memory", holding)
    shared = await bench.step("KV hand-off", lambda: handing_off(prompts=2 if short else 10))
    decoded = await bench.step(
        "decode", lambda: decoding(model, pairs=2 if short else 8, each=48 if short else 128)
    )
    gapped = await bench.step(
        "long prompts", lambda: arriving(model, pairs=1 if short else 5, prompts=1 if short else 3)
    )
    for role, figures in started.items():
        bench.bar(
            f"{role} ready after exec, median, s", figures["median_s"], 1.5, len(figures["each_s"])
        )
    for role, figure in held["private_mb"].items():
        bench.bar(f"{role} private memory, 8 sequences of 1k, MB", figure, 300.0, 1)
    bench.bar(
        "KV hand-off by shared memory, share of a 1000-token prefill",
        shared["share"], 0.005, len(shared["each"]),
    )  # fmt: skip
    for sequences, least in (("1", 0.95), ("8", 1.0), ("16", 1.0)):
        figures = decoded[sequences]
        bench.bar(
            f"decode at {sequences}, ratio to llama.cpp's server",
            figures["ratio"], least, len(figures["pairs"]), least=True,
        )  # fmt: skip
    bench.bar(
        "inter-token p99 while long prompts arrive, ratio to llama.cpp's server",
        gapped["ratio"], 0.25, gapped["gaps"],
    )  # fmt: skip
    return bench.finish()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""What watching costs: probe tokens, CPU, memory, throughput, and the scanner's speed.

Throughput with and without the watch is an ABBA series in one run; neighbours of one kind are the
noise floor (A/A). "Without" is the same watch stopped by SIGSTOP, so that nothing else changes.

For: bars on cost on one small deployment. Not for: large ones (`watch_curve.py`).
"""

import asyncio
import itertools
import math
import os
import signal
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bars import Bench, Figures
from watch_clients import Clients
from watch_mechanisms import SITES, load_of
from watch_site import Site, up

WARM_S = 8.0
SKIP_S = 4.0
"""What follows a change is not measured: queues and caches settle."""
COUNTERS = ("prompt_tokens_total", "generation_tokens_total")


async def tokens(http: aiohttp.ClientSession, site: Site) -> float:
    """Prompt tokens the prefill took and tokens the decode gave, since their starts."""
    total = 0.0
    for member, name in zip(("prefill-0", "decode-0"), COUNTERS, strict=True):
        async with http.get(f"{site.url(member)}/metrics") as reply:
            for line in (await reply.text()).splitlines():
                if line.startswith(f"sglang:{name}{{"):
                    total += float(line.rpartition(" ")[2])
    return total


def probes(site: Site, since: float, until: float) -> tuple[float, dict[str, float]]:
    """Tokens of the watch's own probes in a stretch, and how many were sent on each path."""
    path = site.root / ".tandem" / "state.sqlite"
    query = (
        "SELECT subject, name, at, value FROM observations "
        "WHERE at <= ? AND name IN ('probe_tokens_total', 'probes_sent_total') ORDER BY id"
    )
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as base:
        rows = base.execute(query, (until,)).fetchall()
    before: dict[tuple[str, str], float] = {}
    after: dict[tuple[str, str], float] = {}
    for subject, name, at, value in rows:
        after[subject, name] = float(value)
        if at < since:
            before[subject, name] = float(value)
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    spent = sum(by for (_, name), by in grown.items() if name == "probe_tokens_total")
    return spent, {one: by for (one, name), by in grown.items() if name == "probes_sent_total"}


class _Use:
    """CPU time of a watch over a stretch."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.cpu_s, _ = site.watch_use()
        self.at = time.monotonic()

    def per_member_hour(self) -> float:
        """CPU seconds a member and hour, on three members."""
        cpu_s, _ = self.site.watch_use()
        return (cpu_s - self.cpu_s) / (time.monotonic() - self.at) * 3600.0 / 3


async def on_real(*, idle_s: float, steady_s: float, segments: int, segment_s: float) -> Figures:
    """One real pair: idle first, then saturated with the watch stopped and not, ABBA."""
    root = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    figures: Figures = {"members": 3}
    async with up(Site(root, **SITES["real"])) as site, aiohttp.ClientSession() as http:
        await asyncio.sleep(WARM_S)
        begun, use = time.time(), _Use(site)
        await asyncio.sleep(idle_s)
        spent, sent = probes(site, begun, time.time())
        minutes = (time.time() - begun) / 60.0
        figures["idle"] = {
            "minutes": minutes, "probe_tokens": spent,
            "probes_per_path_and_minute": {path: n / minutes for path, n in sent.items()},
            "cpu_s_per_member_hour": use.per_member_hour(), "rss_mb": site.watch_use()[1],
        }  # fmt: skip
        clients = Clients(site.url("router"), seed=5)
        await clients.open()
        clients.start(load_of("real", "saturated"))
        await asyncio.sleep(WARM_S)
        try:
            figures["steady"] = await _steady(http, site, steady_s)
            figures["saturated"] = await _saturated(http, site, segments, segment_s)
        finally:
            await clients.close()
        figures["saturated"]["rss_mb"] = site.watch_use()[1]
        figures["false"] = [one.summary for one in site.findings() if one.actionable]
    return figures


async def _steady(http: aiohttp.ClientSession, site: Site, seconds: float) -> Figures:
    """Saturated and watched without a pause: what probes take of what is computed."""
    # Probes that were sent before the load came are answered first.
    await asyncio.sleep(WARM_S)
    begun, use, count = time.time(), _Use(site), await tokens(http, site)
    await asyncio.sleep(seconds)
    spent, sent = probes(site, begun, time.time())
    computed = await tokens(http, site) - count
    return {
        "seconds": seconds, "tokens": computed, "probe_tokens": spent, "probes": sent,
        "probe_share": spent / max(computed, 1.0), "cpu_s_per_member_hour": use.per_member_hour(),
    }  # fmt: skip


async def _saturated(
    http: aiohttp.ClientSession, site: Site, segments: int, segment_s: float
) -> Figures:
    if site.watch is None:
        raise RuntimeError("nobody watches")
    kinds = [(False, True, True, False)[number % 4] for number in range(segments)]
    rates: list[tuple[bool, float]] = []
    for watching in kinds:
        os.kill(site.watch.pid, signal.SIGCONT if watching else signal.SIGSTOP)
        await asyncio.sleep(SKIP_S)
        count, clock = await tokens(http, site), time.monotonic()
        await asyncio.sleep(segment_s)
        rates.append((watching, (await tokens(http, site) - count) / (time.monotonic() - clock)))
    os.kill(site.watch.pid, signal.SIGCONT)
    with_, without = ([rate for on, rate in rates if on is kind] for kind in (True, False))
    neighbours = list(itertools.pairwise(rates))
    return {
        "tokens_per_s": rates,
        "capacity_tokens_per_s": median(without),
        "ratio": median(
            (one if on else other) / (other if on else one)
            for (on, one), (other_on, other) in neighbours
            if on is not other_on
        ),
        "ratio_of_medians": median(with_) / median(without),
        "noise": max(
            (abs(math.log(other / one)) for (on, one), (again, other) in neighbours if on is again),
            default=float("nan"),
        ),
        "pairs": sum(on is not again for (on, _), (again, _) in neighbours),
        "same": sum(on is again for (on, _), (again, _) in neighbours),
    }  # fmt: skip


async def scanning(*, rounds: int) -> Figures:
    """The selective scanner against the official parser, on one page of an engine in production."""
    from tandem.engines import sglang_names  # noqa: PLC0415 - found beside us by `watch_site`
    from watch_exporter import record  # noqa: PLC0415

    text = (await record())["prefill"]["/metrics"]
    page = text.encode()
    ratios = []
    ours_s: list[float] = []
    theirs_s: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _turn in range(5):
            sglang_names.SCANNER.scan(page)
        ours = (time.perf_counter() - begun) / 5
        begun = time.perf_counter()
        for family in text_string_to_metric_families(text):
            for _sample in family.samples:
                pass
        theirs = time.perf_counter() - begun
        ours_s.append(ours)
        theirs_s.append(theirs)
        ratios.append(theirs / ours)
    return {
        "page_kb": len(page) / 1024, "ratio": median(ratios), "rounds": rounds,
        "ours_ms": median(ours_s) * 1e3, "parser_ms": median(theirs_s) * 1e3,
    }  # fmt: skip


async def measure(bench: Bench) -> None:
    """All of it."""
    short = bench.quick
    await bench.step("scanner", lambda: scanning(rounds=5 if short else 25))
    await bench.step(
        "cost",
        lambda: on_real(
            idle_s=20.0 if short else 120.0,
            steady_s=20.0 if short else 180.0,
            segments=4 if short else 12, segment_s=6.0 if short else 20.0,
        ),
    )  # fmt: skip


def tell(bench: Bench, measured: dict[str, Figures]) -> None:
    """Its bars and figures."""
    scanner = measured["scanner"]
    bench.bar(
        f"scanner, times as fast as prometheus_client's parser on {scanner['page_kb']:.0f} KB",
        scanner["ratio"], 20.0, scanner["rounds"], least=True,
    )  # fmt: skip
    cost = measured["cost"]
    load, idle, steady = cost["saturated"], cost["idle"], cost["steady"]
    seconds = int(steady["seconds"])
    bench.bar("probe tokens, share of capacity under load", steady["probe_share"], 0.001, seconds)
    each = idle["probes_per_path_and_minute"]
    bench.note("probes per path and minute at idle", max(each.values(), default=0.0), len(each))
    bench.note("CPU-seconds per member-hour at idle", idle["cpu_s_per_member_hour"], 1)
    bench.note("CPU-seconds per member-hour under load", steady["cpu_s_per_member_hour"], 1)
    bench.note("resident memory of the watch, MB", load["rss_mb"], 1)
    bench.note("throughput with the watch, ratio to without", load["ratio"], load["pairs"])
    bench.note(
        "its noise floor, |ratio - 1| of neighbours of one kind", load["noise"], load["same"]
    )

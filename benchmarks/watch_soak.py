"""Real soak: deployments that are slow, bursty, idle, overloaded, cold, and never broken.

`watch_soak.py --minutes 10 --deployments 2` adds a slice to `results/watch-soak.json`; at most ten
minutes each, as often as one likes. Every third deployment runs a real model, the others the hash
model, and each runs through its own order of what looks alarming and is not. Any actionable finding
is false.

For: false findings. Not for: stalls (`watch_stalls.py`).
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from bars import RESULTS, Bench, Figures, machine, say
from watch_clients import Clients, Load
from watch_recorder import Recorder
from watch_site import Site, up
from watch_stalls import served

SLICES = RESULTS / "watch-soak.json"
HOURS = 2.0
MINUTES_MAX = 10.0
CONFIDENCE = 3.0
"""No event in T: at 95 % the rate is at most 3/T."""
DRAIN_S = 45.0
SITES: dict[str, dict[str, object]] = {
    "toy": {"context_length": 6144},
    "real": {
        "model": "smollm2", "context_length": 8192,
        "prefill_flags": ("--max-running-requests", "4", "--max-total-tokens", "16384"),
        "decode_flags": ("--max-running-requests", "4", "--max-total-tokens", "16384"),
    },
}  # fmt: skip
LONG_WORDS = {"toy": 700, "real": 5200}
"""Of the real model: a prefill of thirty seconds and more on a core of its own."""


class Soak:
    """One deployment and what it is put through."""

    def __init__(self, site: Site, kind: str, clients: Clients, rng: random.Random) -> None:
        """`rng` chooses the order."""
        self.site = site
        self.kind = kind
        self.clients = clients
        self.rng = rng
        self.toy = kind == "toy"

    def phases(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Everything once, in an order of its own."""
        every: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("idle gap", self.idle),
            ("light", self.light),
            ("burst", self.burst),
            ("long prefills", self.long_prefills),
            ("overload x2", self.overload),
            ("cold start", self.cold_start),
            ("slow disk", self.slow_disk),
            ("paused collector", self.paused_collector),
        ]
        if self.toy:
            every.append(("slow network", self.slow_network))
        self.rng.shuffle(every)
        return every

    async def idle(self) -> None:
        """Nobody asks."""
        await asyncio.sleep(self.rng.uniform(15, 40))

    async def light(self) -> None:
        """Now and then somebody asks."""
        self.clients.start(Load("light", per_s=2.0 if self.toy else 0.5, output_tokens=12))
        await asyncio.sleep(self.rng.uniform(25, 45))

    async def burst(self) -> None:
        """A crowd at once, then silence."""
        crowd = [self.clients.ask(12, 12) for _ in range(40 if self.toy else 24)]
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await asyncio.gather(*crowd)
        await asyncio.sleep(self.rng.uniform(5, 15))

    async def long_prefills(self) -> None:
        """Prompts so long that everything behind them waits, others among them."""
        long_ones = [self.clients.ask(LONG_WORDS[self.kind], 8) for _ in range(2)]
        self.clients.start(Load("light", per_s=0.5, output_tokens=8))
        with suppress(TimeoutError):
            async with asyncio.timeout(120.0):
                await asyncio.gather(*long_ones)

    async def overload(self) -> None:
        """Twice as many at once as the deployment can run, and a long line behind them."""
        count, words = (32, 40) if self.toy else (12, 60)
        self.clients.start(Load("overload", closed=count, words=words, output_tokens=48))
        await asyncio.sleep(self.rng.uniform(40, 60))

    async def cold_start(self) -> None:
        """The pair is restarted, and clients come at once."""
        self.clients.start(Load("light", per_s=1.0, output_tokens=8))
        await self.site.restart("prefill-0", "decode-0")
        await asyncio.sleep(20.0)

    async def slow_disk(self) -> None:
        """Somebody writes and syncs beside the store, under light load."""
        self.clients.start(Load("light", per_s=1.0 if self.toy else 0.4, output_tokens=8))
        done = asyncio.Event()
        writing = asyncio.create_task(asyncio.to_thread(_write, self.site.root / "bulk", done))
        await asyncio.sleep(30.0)
        done.set()
        await writing

    async def paused_collector(self) -> None:
        """The watch is stopped under load and goes on with a gap in its knowledge."""
        count = 8 if self.toy else 4
        self.clients.start(Load("busy", closed=count, words=20, output_tokens=32))
        await asyncio.sleep(8.0)
        if self.site.watch is not None:
            self.site.watch.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(10, 40))
            self.site.watch.send_signal(signal.SIGCONT)
        await asyncio.sleep(15.0)

    async def slow_network(self) -> None:
        """Hand-offs at a crawl: the queue of them does not empty, and each ends well."""
        await self.site.switch("prefill-0", handoff_mb_per_s=0.02)
        self.clients.start(Load("light", per_s=1.0, output_tokens=8))
        await asyncio.sleep(35.0)
        await self.site.switch("prefill-0", handoff_mb_per_s=0.0)

    async def run(self, until: float) -> list[Figures]:
        """Phase after phase until the time is over; what was when."""
        told: list[Figures] = []
        while time.time() < until:
            for name, phase in self.phases():
                if time.time() >= until:
                    break
                began = time.time()
                await phase()
                await self.drain()
                told.append({"phase": name, "began": began, "ended": time.time()})
        return told

    async def drain(self) -> None:
        """Nobody new comes; who waits is served to the end, or leaves when his patience ends."""
        await self.clients.leave_when_served(DRAIN_S)


def _write(path: Path, done: asyncio.Event) -> None:
    """Two megabytes and a sync, again and again."""
    block = os.urandom(2 << 20)
    with path.open("wb") as file:
        while not done.is_set():
            file.seek(0)
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)
    path.unlink()


async def one(number: int, minutes: float, seed: int, only: str | None) -> Figures:
    """One deployment's slice."""
    kind = only or ("toy" if number % 3 else "real")
    rng = random.Random(seed * 1000 + number)
    root = Path(tempfile.mkdtemp(prefix="tandem-soak-"))
    site = Site(root, **SITES[kind])  # type: ignore[arg-type]
    async with up(site):
        clients = Clients(site.url("router"), rng.randrange(1 << 30))
        await clients.open()
        recorder = Recorder(site)
        try:
            await served(clients, 30.0)
            began = time.time()
            recorder.start()
            phases = await Soak(site, kind, clients, rng).run(began + minutes * 60.0)
            # What the last phase might have caused would be told by now.
            await asyncio.sleep(15.0)
        finally:
            await recorder.stop()
            await clients.close()
        ended, found = time.time(), site.findings(began)
        cpu_s, rss_mb = site.watch_use()
        alarms = await asyncio.to_thread(recorder.alarms)
        site.keep = any(one.actionable for one in found)
        false = [asdict(one) | _during(phases, one.told_at) for one in found if one.actionable]
        return {
            "kind": kind, "began": began, "hours": (ended - began) / 3600.0, "phases": phases,
            "requests": len(clients.log), "completed": clients.completed(),
            "longest_ttft_s": max(clients.ttfts(), default=0.0),
            "false": false,
            "told": [f"{one.kind}: {one.summary}" for one in found if not one.actionable],
            "broke": [text for _, word, text in site.events(began) if word == "failed"],
            "others": {who: [_during(phases, at) for at in times] for who, times in alarms.items()},
            "watch_cpu_s": cpu_s, "watch_rss_mb": rss_mb,
        }  # fmt: skip


def _during(phases: list[Figures], at: float) -> dict[str, str]:
    begun = [one["phase"] for one in phases if one["began"] <= at]
    return {"phase": begun[-1] if begun else "before"}


def version() -> str:
    """The commit that soaks."""
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=folder, capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


async def slice_of(
    minutes: float, deployments: int, *, only: str | None = None, path: Path = SLICES
) -> None:
    """One slice of several deployments side by side, added to the results."""
    seed = len(_slices(path)) + 1
    came = await asyncio.gather(
        *(one(number, minutes, seed, only) for number in range(deployments)), return_exceptions=True
    )
    added = []
    for figures in came:
        if isinstance(figures, BaseException):
            say(f"    a deployment of the soak broke: {type(figures).__name__}: {figures}"[:400])
            continue
        command = f"watch_soak.py --minutes {minutes:g} --deployments {deployments}"
        more = {"code": version(), "machine": machine(), "seed": seed, "command": command}
        added.append(figures | more)
        said = ", ".join(f"{one['kind']} during {one['phase']}" for one in figures["false"])
        say(f"    soak: {figures['kind']}: {figures['hours'] * 60:.1f} min: {said or 'nothing'}")
    _keep(path, added)


def _slices(path: Path) -> list[Figures]:
    slices: list[Figures] = json.loads(path.read_text())["slices"] if path.is_file() else []
    return slices


def _keep(path: Path, added: list[Figures]) -> None:
    """Add to what is there now: another run may have added its own meanwhile."""
    path.parent.mkdir(exist_ok=True)
    record = {"slices": [*_slices(path), *added]}
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)


async def measure(bench: Bench) -> None:
    """One slice; the rest of the two hours is added by this file alone, slice by slice."""
    minutes = 1.0 if bench.quick else MINUTES_MAX

    async def run() -> Figures:
        await slice_of(minutes, 2)
        return {"minutes": minutes}

    await bench.step("soak", run)


def tell(bench: Bench, _: dict[str, Figures]) -> None:
    """False findings in everything soaked so far, and what it proves."""
    slices = _slices(SLICES)
    hours = sum(one["hours"] for one in slices)
    false = sum(len(one["false"]) for one in slices)
    bench.bar("soak, deployment-hours", hours, 0 if bench.quick else HOURS, len(slices), least=True)
    bench.bar("false findings in real soak", false, 0, len(slices))
    if hours and not false:
        bench.note("false findings an hour, at most (95 %)", CONFIDENCE / hours, len(slices))
    for who in ("a for: 2m rule", "the router's health", "the engine's /health"):
        count = sum(len(one["others"].get(who, ())) for one in slices)
        bench.note(f"false alarms in the same soak: {who}", count, math.ceil(hours))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Add a slice of soak to the results.")
    parser.add_argument("--minutes", type=float, default=MINUTES_MAX)
    parser.add_argument("--deployments", type=int, default=2)
    parser.add_argument("--only", choices=sorted(SITES), help="all of them of this kind")
    given = parser.parse_args()
    if not 0 < given.minutes <= MINUTES_MAX:
        parser.error(f"a slice is at most {MINUTES_MAX:g} minutes")

    def _interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(asyncio.run(slice_of(given.minutes, given.deployments, only=given.only)))

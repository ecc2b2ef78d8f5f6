"""What others would have seen: series as a Prometheus server scrapes them, health as it is asked.

Alarms of (1) a `for: 2m` rule, by promtool over the recorded series, (2) the router's health and
its word on its workers, (3) the engine's own `/health`, asked as a supervisor asks.

For: the side by side and the soak. Not for: what Tandem sees; nothing here is shared with it.
"""

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from watch_site import Site

SCRAPE_S = 5.0
HEALTH_EVERY_S = 10.0
HEALTH_TIMEOUT_S = 5.0
HEALTH_MISSES = 3
"""A supervisor's usual patience: three failed asks, ten seconds apart."""
ROUTER_TIMEOUT_S = 3.0
GAUGES = (
    "num_prefill_inflight_queue_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_running_reqs",
    "num_queue_reqs",
)
COUNTERS = ("num_requests_total",)
_LINE = re.compile(
    rf"^(sglang:(?:{'|'.join((*GAUGES, *COUNTERS))}))\{{[^}}]*\}} ([^ \n]+)", re.MULTILINE
)
HELD = " or ".join(f"sglang:{name} > 0" for name in GAUGES)
RULES = f"""\
groups:
  - name: pd
    rules:
      - alert: NothingCompletes
        expr: count({HELD}) > 0 and sum(rate(sglang:num_requests_total[1m])) == 0
        for: 2m
      - alert: HandoffsPinned
        expr: sglang:num_prefill_inflight_queue_reqs > 0
        for: 2m
"""
"""What a careful operator writes today: requests are held and none completes, or a queue of
hand-offs that never empties, each for two minutes."""


@dataclass
class Recorder:
    """Scrapes and asks one site until it is stopped."""

    site: Site
    began_at: float = 0.0
    scrapes: list[dict[str, float]] = field(default_factory=list)
    """One a scrape: `name{member}` to value."""
    health: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By engine: when asked, and the status (0: no answer)."""
    router: list[tuple[float, bool]] = field(default_factory=list)
    """When asked, and whether the router and all its workers are well, by its own word."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        """Begin."""
        self.began_at = time.time()
        engines = [*self.site.prefill_names, *self.site.decode_names]
        self._tasks = [asyncio.create_task(self._scrape(engines))]
        self._tasks += [asyncio.create_task(self._ask(name)) for name in engines]

    async def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _scrape(self, engines: list[str]) -> None:
        timeout = aiohttp.ClientTimeout(total=ROUTER_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            for number in range(1 << 30):
                await asyncio.sleep(self.began_at + number * SCRAPE_S - time.time())
                pages = await asyncio.gather(
                    *(_page(http, f"{self.site.url(name)}/metrics") for name in engines),
                    _page(http, f"{self.site.url('router')}/workers"),
                    _page(http, f"{self.site.url('router')}/health"),
                )
                seen = {}
                for name, page in zip(engines, pages, strict=False):
                    for series, value in _LINE.findall(page or ""):
                        key = f'{series}{{member="{name}"}}'
                        seen[key] = seen.get(key, 0.0) + float(value)
                self.scrapes.append(seen)
                unwell = re.search(r'"is_healthy": ?false', pages[-2] or "")
                well = pages[-1] is not None and unwell is None
                self.router.append((time.time(), well))

    async def _ask(self, name: str) -> None:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        looks = self.health.setdefault(name, [])
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            while True:
                begun = time.time()
                try:
                    async with http.get(f"{self.site.url(name)}/health") as reply:
                        looks.append((time.time(), reply.status))
                except (aiohttp.ClientError, TimeoutError, OSError):
                    looks.append((time.time(), 0))
                await asyncio.sleep(max(0.0, begun + HEALTH_EVERY_S - time.time()))

    def alarms(self) -> dict[str, list[float]]:
        """When each of the others began to ring, in unix seconds."""
        found: dict[str, list[float]] = {
            "the router's health": _rises([(at, not well) for at, well in self.router]),
            "the engine's /health": sorted(
                at for looks in self.health.values() for at in _rises(list(_missed(looks)))
            ),
        }
        if shutil.which("promtool"):
            found["a for: 2m rule"] = self._rule()
        return found

    def _rule(self) -> list[float]:
        """When an alert of the rules began, by promtool over the recorded series."""
        names = sorted({name for seen in self.scrapes for name in seen})
        if not names:
            return []
        series = [
            {"series": name, "values": " ".join(_value(seen.get(name)) for seen in self.scrapes)}
            for name in names
        ]
        step = int(SCRAPE_S)
        asked = [
            {"eval_time": f"{at * step}s", "alertname": alert, "exp_alerts": []}
            for at in range(len(self.scrapes))
            for alert in ("NothingCompletes", "HandoffsPinned")
        ]
        test = {
            "rule_files": ["rules.yml"], "evaluation_interval": f"{step}s",
            "tests": [
                {"interval": f"{step}s", "input_series": series, "alert_rule_test": asked}
            ],
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "rules.yml").write_text(RULES)
            (Path(folder) / "test.yml").write_text(json.dumps(test))  # JSON is YAML
            done = subprocess.run(
                ["promtool", "test", "rules", "test.yml"],
                cwd=folder, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
        said = done.stdout + done.stderr
        if "FAILED" not in said and "SUCCESS" not in said:
            raise RuntimeError(f"promtool: {said[-400:]}")
        ringing = {_seconds(time_) for time_ in re.findall(r"time: ((?:\d+[hms])+)", said)}
        looks = [
            (self.began_at + at * step, at * step in ringing) for at in range(len(self.scrapes))
        ]
        return _rises(looks)


async def _page(http: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with http.get(url) as reply:
            return await reply.text() if reply.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def _value(value: float | None) -> str:
    return "_" if value is None else f"{value:g}"


def _seconds(text: str) -> int:
    unit = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * unit[one] for number, one in re.findall(r"(\d+)([hms])", text))


def _missed(looks: list[tuple[float, int]]) -> Iterator[tuple[float, bool]]:
    """At each ask, whether it and those before failed often enough in a row."""
    row = 0
    for at, status in looks:
        row = 0 if status == 200 else row + 1
        yield at, row >= HEALTH_MISSES


def _rises(looks: list[tuple[float, bool]]) -> list[float]:
    """When an alarm began to ring."""
    before = False
    found = []
    for at, rings in looks:
        if rings and not before:
            found.append(at)
        before = rings
    return found

"""A real pair behind the real router, scraped by a real Prometheus: what is served is read."""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

import tidy
from exporters import free_port, prometheus
from tandem import fetch
from tandem.collect.incarnations import Incarnations
from tandem.collect.prometheus import PrometheusSource
from tandem.engines.sglang import SglangEngine
from tandem.records import Member, Role
from tandem.records import vocabulary as v
from tandem.routers.smg import SmgRouter

pytestmark = [
    pytest.mark.needs("prometheus", "router"),
    pytest.mark.timeout(180),
]
ONLY_MEMBERS_SAY = {v.LIVE_LOADS, v.SERVER_ARG, v.WORKER_HEALTHY, v.WORKER_STATUS}
"""What no metrics page has."""
MOVES = {v.PROGRESS_TOKENS_TOTAL}
"""Health checks of the router move it between two looks."""


def members():
    """A prefill, a decode and a router on free ports."""
    prefill, decode, router, metrics, bootstrap = (free_port() for _ in range(5))
    url = "http://127.0.0.1:{}".format
    return (
        Member(
            name="prefill-0", role=Role.PREFILL, url=url(prefill), engine="sglang",
            bootstrap_port=bootstrap,
        ),
        Member(name="decode-0", role=Role.DECODE, url=url(decode), engine="sglang"),
        Member(
            name="router", role=Role.ROUTER, url=url(router), engine="smg",
            metrics_url=f"{url(metrics)}/metrics",
        ),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(prefill, decode, router):
    """The three as processes."""
    port = {one.name: one.url.rpartition(":")[2] for one in (prefill, decode, router)}
    bootstrap = str(prefill.bootstrap_port)
    metrics = router.metrics_url.removesuffix("/metrics").rpartition(":")[2]
    smg = str(Path(sys.executable).with_name("smg"))
    commands = [
        [
            *(sys.executable, "-m", "tandem_engine", one.role.value, "--model-path", "toy"),
            *("--port", port[one.name], "--disaggregation-bootstrap-port", bootstrap),
        ]
        for one in (prefill, decode)
    ]
    commands.append(
        [
            *(smg, "launch", "--host", "127.0.0.1", "--port", port["router"]),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", metrics),
            *("--pd-disaggregation", "--policy", "random", "--prefill", prefill.url, bootstrap),
            *("--decode", decode.url, "--health-check-interval-secs", "1"),
        ]
    )
    processes = [
        await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(tidy.ROOT / "src")},
        )
        for command in commands
    ]
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def told(rows):
    """What was seen of members that a page can have: value, or None where it is missing."""
    return {
        (seen.subject, seen.name, seen.label): seen.value
        for seen in rows
        if seen.name not in ONLY_MEMBERS_SAY | MOVES and seen.source in ("metrics", "router")
    }


async def test_what_is_read_is_what_a_scrape_would_read(tmp_path, monkeypatch):
    """After real requests every counter, by way of Prometheus, is that of the page itself."""
    monkeypatch.setattr("tandem.collect.prometheus.RARE_EVERY_S", 1.0)
    prefill, decode, router = found = members()
    targets = [one.url.removeprefix("http://") for one in (prefill, decode)]
    pages = router.metrics_url.removeprefix("http://").removesuffix("/metrics")
    async with (
        running(*found),
        fetch.session() as session,
        prometheus(tmp_path, {"sglang": targets, "smg": [pages]}) as url,
    ):
        engine, smg = SglangEngine(session), SmgRouter(session, found)
        source = PrometheusSource(
            url,
            [(prefill, engine), (decode, engine), (router, smg)],
            session,
            Incarnations(),
            now=time.time,
        )
        async with asyncio.timeout(120):
            while not await smg.ready(router, 2.0):
                await asyncio.sleep(0.05)
            for _ in range(3):
                await smg.complete(
                    router, prompt="one two three", output_tokens=4, timeout_s=10.0, chat=False
                )
            direct = {}
            for adapter, member in ((engine, prefill), (engine, decode), (smg, router)):
                direct |= told((await adapter.observe(member, 5.0)).observations)
            by_way, read = {}, {}
            while any(by_way.get(key) != value for key, value in direct.items()):
                harvest = await source.collect()
                read |= {(one.subject, one.name): one for one in harvest.observations}
                by_way |= told(harvest.observations)
                await asyncio.sleep(0.05)

    assert direct["decode-0", v.REQUESTS_TOTAL, ""] == 3
    assert direct["prefill-0", v.TRANSFERS_TOTAL, ""] == 3
    assert direct["router", v.ROUTER_RESPONSES_TOTAL, "200"] == 3
    assert read["decode-0", v.PROGRESS_TOKENS_TOTAL].value > 0
    assert read["decode-0", v.TTFT_P99_S].value > 0

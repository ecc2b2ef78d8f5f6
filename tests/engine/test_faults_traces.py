"""What is switched on shows in nothing but its mechanism: no name, no line, no number says so."""

import asyncio
import json
import logging
import os
import re
import threading

import aiohttp
import psutil
import pytest

from engine.pairs import FAST, settings, start
from engine.processes import free_port, ready, spawn, terminated
from engine.witness import CATALOGUE
from tandem_engine.faults import FAMILIES
from tandem_engine.worker import Worker

PAGES = (
    "/server_info",
    "/model_info",
    "/v1/loads",
    "/v1/models",
    "/get_load",
    "/metrics",
    "/ready",
)
PASSING = {"asyncio_N", "loading"}
"""Threads that come and go as they please."""
SHOWN = {
    # A side whose KV differs says so where it always does: what is foreign is its configuration.
    "foreign_layout=page_size": {"/server_info": {"page_size"}},
    "foreign_layout=kv_dtype": {"/server_info": {"kv_cache_dtype"}},
    # Gauges that were never written are not on the page.
    "gauges=frozen": {"/metrics": None},
}
"""Mechanisms that show at the start: page -> the fields that differ, None for its names."""


def switched(key: str) -> tuple[dict[str, object], dict[str, object]]:
    """The switch of one fault of the catalogue: on, and off."""
    name, _, value = key.partition("=")
    off = next(getattr(f.kind(), name) for f in FAMILIES if hasattr(f.kind(), name))
    return {name: value or (True if off is False else type(off)(0.01) or 1)}, {name: off}


def steady(text: str) -> str:
    """A page or a line without what differs from one start to the next."""
    return re.sub(r"[0-9a-f]{12,}|\d[\d.:T+-]*", "N", text)


async def looks(http: aiohttp.ClientSession, worker: Worker) -> dict[str, object]:
    """Everything a worker shows to somebody who looks, numbers taken away."""
    found: dict[str, object] = {
        "environment": dict(os.environ),
        "threads": {steady(thread.name) for thread in threading.enumerate()} - PASSING,
    }
    for path in PAGES:
        async with http.get(worker.url + path) as reply:
            text = await reply.text()
            found[path, "status"] = reply.status
        if path == "/metrics":
            found[path] = sorted(re.findall(r"# TYPE (\S+)", text))
        elif path == "/server_info":
            info = json.loads(text)
            for name in ("port", "disaggregation_bootstrap_port", "startup_time"):
                del info[name]
            found[path] = info
        else:
            found[path] = steady(text)
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged since the last look, numbers taken away."""
    said = [f"{record.levelname} {steady(record.getMessage())}" for record in caplog.records]
    caplog.clear()
    return said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_start_with_any_fault_looks_like_one_with_none(tmp_path, caplog, mode):
    """Pages, names of metrics, log, threads and environment are equal but for the mechanism."""
    caplog.set_level(logging.DEBUG, logger="tandem_engine")
    path = tmp_path / "faults.json"
    seen, workers = {}, []
    try:
        async with aiohttp.ClientSession() as http:
            for key in ("", *CATALOGUE):
                path.write_text(json.dumps(switched(key)[0] if key else {}))
                worker = await start(settings(mode, enable_faults=str(path)), FAST, workers)
                await worker.turn()
                await worker.turn()
                seen[key] = await looks(http, worker) | {"log": lines(caplog)}
    finally:
        await asyncio.gather(*(worker.kill(clean=True) for worker in workers))
    clean = seen.pop("")
    differ = {
        key: {what for what in clean if one[what] != clean[what]} for key, one in seen.items()
    }

    assert clean["log"]
    assert {key: what for key, what in differ.items() if what} == {
        key: set(pages) for key, pages in SHOWN.items()
    }
    for key, pages in SHOWN.items():
        for page, fields in pages.items():
            before, now = clean[page], seen[key][page]
            if fields is not None:
                assert {name for name in before if before[name] != now[name]} == fields


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_flip_shows_nowhere(tmp_path, caplog, mode):
    """Each switch on and off again in a running worker: nothing it shows or logs is different."""
    caplog.set_level(logging.DEBUG, logger="tandem_engine")
    path, workers = tmp_path / "faults.json", []
    try:
        worker = await start(settings(mode, enable_faults=str(path)), FAST, workers)
        async with aiohttp.ClientSession() as http:
            await worker.turn()
            clean = await looks(http, worker)
            caplog.clear()
            for key in CATALOGUE:
                for switches in switched(key):
                    async with http.put(f"{worker.url}/faults", json=switches) as reply:
                        assert reply.status == 200
                    assert (key, await looks(http, worker)) == (key, clean)
            async with http.get(f"{worker.url}/faults") as reply:
                assert await reply.json() == {}
    finally:
        for one in workers:
            await one.kill(clean=True)

    assert lines(caplog) == []


@pytest.mark.timeout(60)
async def test_a_process_looks_the_same(tmp_path):
    """Command line, environment, name and first lines of a process say nothing of a switch."""
    path, port, bootstrap = tmp_path / "faults.json", free_port(), free_port()
    flags = ("--port", str(port), "--disaggregation-bootstrap-port", str(bootstrap))
    seen = []
    for on in ({}, {"peer_memory": "stale", "kv_crosswired": True, "forward": "blocks"}):
        path.write_text(json.dumps(on | {"forward_from_tokens": 500} if on else {}))
        process = await spawn("prefill", "--model", "toy", *flags, "--enable-faults", str(path))
        async with terminated(process), aiohttp.ClientSession() as http:
            await ready(http, f"http://127.0.0.1:{port}/health")
            look = psutil.Process(process.pid)
            seen.append([look.cmdline(), look.environ(), look.name(), look.num_threads()])
            process.terminate()
            _, err = await process.communicate()
            seen[-1].append(steady(err.decode()))

    assert seen[0] == seen[1]

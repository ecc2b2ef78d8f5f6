"""Workers as real processes, and the real router in front of them.

For: what only a process shows: exit statuses, signals, start-up, the wheel's router.
Not for: anything `pairs.py` can show in one process.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

READY_S = 30.0
OBSERVERS: list[Callable[[tuple[str, ...]], None]] = []
"""Who hears of the arguments of each worker that is started."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def spawn(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    """`python -m tandem_engine ARGUMENTS`, its output captured."""
    import os  # noqa: PLC0415 - only the environment

    for observer in OBSERVERS:
        observer(arguments)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tandem_engine",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "src", **environment},
    )


async def end(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Wait for the end: exit status and stderr."""
    _, err = await asyncio.wait_for(process.communicate(), READY_S)
    return process.returncode or 0, err.decode()


async def ready(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until a URL answers 200; fails the test when it does not."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                async with http.get(url) as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)


@asynccontextmanager
async def terminated(*processes: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """End these processes, whatever happens inside."""
    try:
        yield
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@asynccontextmanager
async def router(
    prefills: list[tuple[str, int]], decodes: list[str], *flags: str
) -> AsyncIterator[str]:
    """The real router in front of workers that are ready; its URL."""
    port, metrics = free_port(), free_port()
    arguments = ["launch", "--pd-disaggregation", "--policy", "random", "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--prometheus-host", "127.0.0.1"]
    arguments += ["--prometheus-port", str(metrics), "--health-check-interval-secs", "2"]
    arguments += ["--shutdown-grace-period-secs", "1", "--log-level", "error", *flags]
    for url, bootstrap in prefills:
        arguments += ["--prefill", url, str(bootstrap)]
    for url in decodes:
        arguments += ["--decode", url]
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("smg")),
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with terminated(process):
        async with aiohttp.ClientSession() as http:
            await ready(http, f"http://127.0.0.1:{port}/readiness")
        yield f"http://127.0.0.1:{port}"

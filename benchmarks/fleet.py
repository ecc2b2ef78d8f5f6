"""Workers of the embedded engine as processes, llama.cpp's own server, and a client for both.

For: the benches. Everything is on loopback and on ports of the kernel's choosing.
Not for: what is measured, or the router: benches ask both sides themselves.
"""

import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

READY_S = 120.0
REQUEST_S = 600.0
BENCHMARKS = Path(__file__).parent
SOURCE = BENCHMARKS.parent / "src"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Process:
    """One server in a process of its own, restarted at the same address."""

    argv: list[str]
    port: int
    ready_path: str
    handle: asyncio.subprocess.Process | None = None
    ready_s: list[float] = field(default_factory=list)
    """How long each start took, from exec to the first 200."""

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process; 0 when there is none."""
        return self.handle.pid if self.handle is not None else 0

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Run it and wait until it is ready."""
        begun_s = time.monotonic()
        self.handle = await asyncio.create_subprocess_exec(
            *self.argv,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )
        async with asyncio.timeout(READY_S):
            while True:
                if self.handle.returncode is not None:
                    raise SystemExit(f"a server ended at its start; try: {' '.join(self.argv)}")
                try:
                    async with http.get(self.url + self.ready_path) as reply:
                        if reply.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.005)
        self.ready_s.append(time.monotonic() - begun_s)

    def pin(self, core: int) -> None:
        """Leave every thread of it one core, the same for all."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})

    async def stop(self, *, kill: bool = False) -> None:
        """End it, by SIGTERM or at once."""
        if self.handle is None:
            return
        if self.handle.returncode is None:
            self.handle.kill() if kill else self.handle.terminate()
        try:
            await asyncio.wait_for(self.handle.wait(), 30.0)
        except TimeoutError:
            self.handle.kill()
            await self.handle.wait()
        self.handle = None


def worker(role: str, model: str, *flags: str) -> Process:
    """A worker of the embedded engine, with further flags."""
    port = free_port()
    argv = [sys.executable, "-m", "tandem_engine", role, "--model", model, "--port", str(port)]
    argv += ["--log-level", "error"]
    if role == "prefill":
        argv += ["--disaggregation-bootstrap-port", str(free_port())]
    return Process([*argv, *flags], port, "/ready")


def bootstrap_port(prefill: Process) -> int:
    """Where a prefill's decodes ask."""
    return int(prefill.argv[prefill.argv.index("--disaggregation-bootstrap-port") + 1])


def llama_server(model: Path, *, sequences: int, context: int, threads: int) -> Process:
    """llama.cpp's own server of the same wheel."""
    port = free_port()
    argv = [sys.executable, str(BENCHMARKS / "llama_server.py"), str(model)]
    argv += [str(number) for number in (port, sequences, context, threads)]
    return Process(argv, port, "/health")


@asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[aiohttp.ClientSession]:
    """These processes, ready, and a client; all ended afterwards."""
    bound = aiohttp.ClientTimeout(total=REQUEST_S)
    # No connection is kept: a server may close one just as it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=bound, connector=connector) as http:
        try:
            for process in processes:
                await process.start(http)
            yield http
        finally:
            for process in processes:
                await process.stop()


def body_of(prompt: str | list[int], tokens: int, *, stream: bool = False) -> dict[str, Any]:
    """A greedy `/generate` body that runs to its length."""
    text = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {**text, "sampling_params": sampling, "stream": stream}


def meeting(prefill: Process) -> dict[str, Any]:
    """What a router adds to a body."""
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": bootstrap_port(prefill),
        "bootstrap_room": secrets.randbelow(2**63),
    }


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    """One request, read to its end; raises `aiohttp.ClientResponseError` for an error status."""
    async with http.post(url, json=body) as reply:
        reply.raise_for_status()
        return await reply.read()


async def arrivals(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[float]:
    """The time at which each event of a stream came in."""
    async with http.post(url, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield time.monotonic()


@dataclass
class Pair:
    """The embedded engine, streamed from the decode."""

    prefill: Process
    decode: Process

    @property
    def decoder(self) -> Process:
        """The process that decodes."""
        return self.decode

    async def stream(
        self,
        http: aiohttp.ClientSession,
        prompt: list[int],
        tokens: int,
        times: list[float] | None = None,
    ) -> list[float]:
        """One request to both sides; when each token came in, also in `times` as they come."""
        times = [] if times is None else times
        body = body_of(prompt, tokens, stream=True) | meeting(self.prefill)
        first = asyncio.create_task(post(http, self.prefill.url + "/generate", body))
        async for at in arrivals(http, self.decode.url + "/generate", body):
            times.append(at)
        await first
        return times


@dataclass
class Plain:
    """llama.cpp's own server."""

    server: Process

    @property
    def decoder(self) -> Process:
        """The process that decodes."""
        return self.server

    async def stream(
        self,
        http: aiohttp.ClientSession,
        prompt: list[int],
        tokens: int,
        times: list[float] | None = None,
    ) -> list[float]:
        """One request; when each token came in, also in `times` as they come."""
        times = [] if times is None else times
        body = {"prompt": prompt, "n_predict": tokens, "stream": True, "temperature": 0.0}
        body |= {"ignore_eos": True, "cache_prompt": False, "samplers": ["top_k"], "top_k": 1}
        async for at in arrivals(http, self.server.url + "/completion", body):
            times.append(at)
        # The last event carries the timings and no token.
        times.pop()
        return times


async def metric(http: aiohttp.ClientSession, process: Process, name: str) -> float:
    """The sum of a metric's samples on a worker's page."""
    async with http.get(process.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"sglang:{name}{{")
    )


async def load(http: aiohttp.ClientSession, process: Process) -> dict[str, Any]:
    """The live load of a worker."""
    async with http.get(process.url + "/v1/loads") as reply:
        loads: dict[str, Any] = json.loads(await reply.read())
    one: dict[str, Any] = loads["loads"][0]
    return one


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which a share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

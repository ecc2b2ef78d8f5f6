"""A page of metrics that a test writes, and a real Prometheus server that scrapes such pages.

For: tests of what reads from Prometheus. Not for: engines (`engine/`), which write pages of their
own.
"""

import asyncio
import contextlib
import json
import shutil
import socket

import aiohttp
from aiohttp import web

READY_S = 60.0


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Exporter:
    """One target: serves `page`, counts who asked, and can be away."""

    def __init__(self):
        self.page, self.asked, self.away = "", 0, False
        self.port = free_port()
        self._runner = None

    @property
    def url(self):
        """Its root."""
        return f"http://127.0.0.1:{self.port}"

    async def _answer(self, _):
        self.asked += 1
        if self.away:
            return web.Response(status=503)
        return web.Response(text=self.page, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()


@contextlib.asynccontextmanager
async def prometheus(folder, jobs, *, scrapes_s=1):
    """The real server over `jobs` (name to list of `host:port`); gives its root."""
    port = free_port()
    config = {
        "global": {"scrape_interval": f"{scrapes_s}s", "scrape_timeout": f"{scrapes_s}s"},
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": targets}]}
            for name, targets in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        *("prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
        cwd=folder,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/-/ready") as reply:
                        if reply.status == 200:
                            break
                await asyncio.sleep(0.05)
        yield url
    finally:
        process.kill()
        await asyncio.wait_for(process.wait(), 10)
        shutil.rmtree(folder / "data", ignore_errors=True)

"""The watch's own `/metrics`, on loopback.

For: serving what `counts.py` counts, bounded in connections, time and work per scrape.
Not for: anybody else on the network; whoever wants that puts a proxy of their own before it.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator

from aiohttp import web

from tandem.errors import WorldError
from tandem.parts import Parts
from tandem.processes import holders
from tandem.service.counts import Counts, store_size
from tandem.service.exposition import OPENMETRICS, PLAIN, page, wants_openmetrics

HOST = "127.0.0.1"
INCIDENTS_EVERY_S = 15.0
"""Incident folders are read at most this often, however often somebody scrapes."""
IDLE_S = 20.0
"""A client that says nothing for so long is let go."""
REQUEST_BYTES_MAX = 8192
BACKLOG = 16
CLOSE_S = 1.0


class MetricsPage:
    """What a scrape gets."""

    def __init__(self, parts: Parts, counts: Counts) -> None:
        """`counts` grow elsewhere; the rest is looked up here."""
        self._parts = parts
        self._counts = counts
        self._incidents: Counter[str] = Counter()
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        """One page in the format that was asked for."""
        await self._read_incidents()
        families = self._counts.families(
            store_bytes=store_size(self._parts.store.state_folder), incidents=self._incidents
        )
        modern = wants_openmetrics(request.headers.get("Accept", ""))
        body = page(families, openmetrics=modern)
        kind = OPENMETRICS if modern else PLAIN
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _read_incidents(self) -> None:
        """Folders are files: read in a thread, by one scrape at a time."""
        async with self._reading:
            if time.monotonic() - self._read_at < INCIDENTS_EVERY_S:
                return
            incidents = await asyncio.to_thread(self._parts.store.incidents)
            self._incidents = Counter(one.state for one in incidents)
            self._read_at = time.monotonic()


@contextlib.asynccontextmanager
async def metrics_served(parts: Parts, counts: Counts, port: int) -> AsyncIterator[None]:
    """Serve `/metrics` while inside; port 0 serves nothing.

    Raises `WorldError` naming who holds the port when it is taken.
    """
    if not port:
        yield
        return
    application = web.Application(client_max_size=REQUEST_BYTES_MAX)
    application.router.add_get("/metrics", MetricsPage(parts, counts).answer)
    runner = web.AppRunner(
        application, access_log=None, keepalive_timeout=IDLE_S, shutdown_timeout=CLOSE_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as refused:
            raise _taken(port, refused) from None
        yield
    finally:
        await runner.cleanup()


def _taken(port: int, refused: OSError) -> WorldError:
    held = next((str(one) for one in holders({port})), "") if refused.errno else ""
    why = f"held by {held}" if held else (refused.strerror or str(refused)).lower()
    return WorldError(
        f"The metrics of this watch cannot be served on {HOST}:{port}: {why}.",
        next_step="Give `metrics_port` under [watch] in tandem.toml another port, or 0 for none.",
    )


__all__ = ["HOST", "MetricsPage", "metrics_served"]

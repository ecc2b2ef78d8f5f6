"""The decode's end of the control protocol: a link per prefill, made again when it is lost.

Per bootstrap server it fetches where the rank is, connects, announces this agent, and beats. A lost
link is reported at once and made again by itself, at the new endpoint if the prefill restarted.

For: connections.
Not for: what a message means to a room (`arrivals.py`).
"""

import asyncio
import http.client
import logging
from typing import Protocol

import msgspec

from tandem_engine.config import Timeouts
from tandem_engine.control import LoopThread, Post, send
from tandem_engine.wire import (
    AbortAck,
    Announce,
    Announced,
    Endpoint,
    Renew,
    Renewed,
    RoomFailed,
    Topology,
    ToPrefill,
    WireError,
    read_at_decode,
)

log = logging.getLogger(__name__)
CONNECT_S = 5.0
TOPOLOGY_ATTEMPTS_MAX = 15
LINKS_MAX = 64
_TOPOLOGY_QUERY = "prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"


class HearsLinks(Protocol):
    """What the decode's links pass on (`decode.Decode`)."""

    def link_up(self, bootstrap: str) -> None:
        """A prefill is reached."""
        ...

    def link_lost(self, bootstrap: str, reason: str) -> None:
        """A prefill was reached and is not any more."""
        ...

    def link_failed(self, bootstrap: str, reason: str) -> None:
        """A prefill was not reached in all attempts."""
        ...

    def room_failed(self, room: int, reason: str) -> None:
        """A prefill says that a room failed."""
        ...

    def abort_acked(self, room: int) -> None:
        """A prefill will not write for a room."""
        ...


class Links:
    """The decode's end: one connection per bootstrap server it was ever asked to meet at."""

    def __init__(
        self, announce: Announce, kv_dtype: str, page_size: int, timeouts: Timeouts
    ) -> None:
        """Nothing is connected until `want`; `bind` first."""
        self.agent = announce.agent
        self._announce = announce
        self._kv = (page_size, kv_dtype)
        self._timeouts = timeouts
        self._hears: HearsLinks | None = None
        self._post: Post = lambda *_: None
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._thread = LoopThread("bootstrap")

    def bind(self, hears: HearsLinks, post: Post) -> None:
        """Say who hears of links and rooms, on which thread."""
        self._hears, self._post = hears, post

    def want(self, bootstrap: str) -> None:
        """Have a link to this `host:port`; from any thread."""
        self._thread.call(self._want, bootstrap)

    def up(self, bootstrap: str) -> bool:
        """Whether that prefill can be told something now."""
        return bootstrap in self._writers

    def send(self, bootstrap: str, message: ToPrefill) -> None:
        """Send to a prefill; lost when the link is, and then `link_lost` says so."""
        self._thread.call(self._send, bootstrap, message)

    def close(self) -> None:
        """Close every link and end the thread."""
        self._thread.stop()

    def _send(self, bootstrap: str, message: ToPrefill) -> None:
        writer = self._writers.get(bootstrap)
        if writer is not None:
            send(writer, message)

    def _want(self, bootstrap: str) -> None:
        if bootstrap in self._tasks:
            return
        if len(self._tasks) >= LINKS_MAX:
            self._tell("link_failed", bootstrap, f"more than {LINKS_MAX} prefills are known here")
            return
        task = asyncio.get_running_loop().create_task(self._keep(bootstrap))
        self._tasks[bootstrap] = task
        task.add_done_callback(lambda _: self._tasks.pop(bootstrap, None))

    def _tell(self, what: str, *arguments: object) -> None:
        self._post(getattr(self._hears, what), *arguments)

    async def _keep(self, bootstrap: str) -> None:
        """Connect, serve, and connect again, until all attempts in a row fail."""
        attempts, reason = 0, ""
        while attempts < TOPOLOGY_ATTEMPTS_MAX:
            try:
                reader, writer = await asyncio.wait_for(self._connect(bootstrap), CONNECT_S)
            except (OSError, WireError, msgspec.MsgspecError, http.client.HTTPException,
                    TimeoutError, asyncio.IncompleteReadError) as problem:  # fmt: skip
                attempts, reason = attempts + 1, str(problem)
                log.debug("Failed to get prefill server info from %s: %s", bootstrap, problem)
                await asyncio.sleep(min(1.0, self._timeouts.heartbeat_s))
                continue
            attempts = 0
            self._writers[bootstrap] = writer
            self._tell("link_up", bootstrap)
            try:
                await self._serve(reader, writer)
            except (OSError, WireError, TimeoutError, asyncio.IncompleteReadError) as problem:
                log.info("Attempting to reconnect to %s: %s", bootstrap, str(problem) or "closed")
            finally:
                del self._writers[bootstrap]
                writer.close()
            lost = f"Lost connection with prefill instance (bootstrap_addr: {bootstrap})"
            self._tell("link_lost", bootstrap, lost)
            # Not at once: a prefill that refuses this agent must not be hammered.
            await asyncio.sleep(min(1.0, self._timeouts.heartbeat_s))
        self._tell(
            "link_failed",
            bootstrap,
            f"Could not fetch prefill parallel info from {bootstrap} after {attempts} attempts"
            f" ({reason})",
        )

    async def _connect(self, bootstrap: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        topology = msgspec.json.decode(await _route(bootstrap, -1), type=Topology)
        if (topology.page_size, topology.kv_cache_dtype) != self._kv:
            raise WireError(
                f"page size and KV dtype are {topology.page_size} and {topology.kv_cache_dtype} "
                f"there, {self._kv[0]} and {self._kv[1]} here"
            )
        endpoint = msgspec.json.decode(await _route(bootstrap, 0), type=Endpoint)
        reader, writer = await asyncio.open_connection(endpoint.rank_ip, endpoint.rank_port)
        try:
            send(writer, self._announce)
            answer = await read_at_decode(reader)
            if not isinstance(answer, Announced):
                raise WireError(f"{type(answer).__name__} comes before Announced")
        except BaseException:  # also a cancellation: nobody else knows this connection yet
            writer.close()
            raise
        return reader, writer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Beat, and pass on what the prefill says, until it closes or misses too many beats."""
        timeouts = self._timeouts
        silence_s_max = timeouts.heartbeat_s * timeouts.heartbeat_misses_max + timeouts.heartbeat_s
        beating = asyncio.create_task(self._beat(writer))
        try:
            while True:
                match await asyncio.wait_for(read_at_decode(reader), silence_s_max):
                    case RoomFailed(room, reason):
                        self._tell("room_failed", room, reason)
                    case AbortAck(room):
                        self._tell("abort_acked", room)
                    case Renewed() | Announced():
                        pass
        finally:
            beating.cancel()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        beat = 0
        while True:
            await asyncio.sleep(self._timeouts.heartbeat_s)
            beat += 1
            send(writer, Renew(self.agent, beat))


async def _route(bootstrap: str, rank: int) -> bytes:
    return await asyncio.to_thread(_get, bootstrap, f"/route?{_TOPOLOGY_QUERY.format(rank)}")


def _get(bootstrap: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(bootstrap, timeout=CONNECT_S / 2)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        body = reply.read(1 << 16)
        if reply.status != http.client.OK:
            raise WireError(f"GET {path} at {bootstrap} answered {reply.status}")
        return body
    finally:
        connection.close()

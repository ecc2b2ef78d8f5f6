"""The decode's end of the control protocol: a link per prefill, made again when it is lost.

Per bootstrap server it fetches where the rank is, connects, announces this agent, and beats. A lost
link is reported at once and made again by itself, at the new endpoint if the prefill restarted.

For: connections.
Not for: what a message means to a room (`arrivals.py`).
"""

import asyncio
import contextlib
import http.client
import logging
import socket
import threading
from typing import Protocol

import msgspec

from tandem_engine.config import Timeouts
from tandem_engine.control import LoopThread, Post, send
from tandem_engine.faults import Switchboard
from tandem_engine.wire import (
    AbortAck,
    Announce,
    Announced,
    Endpoint,
    Renew,
    Renewed,
    RoomFailed,
    ToPrefill,
    WireError,
    read_at_decode,
)

log = logging.getLogger(__name__)
CONNECT_S = 5.0
TOPOLOGY_ATTEMPTS_MAX = 15
LINKS_MAX = 64
BLOCKED_S = 0.05
"""How often a blocked send looks whether it may end."""
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


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_UNREACHED = (
    OSError,
    WireError,
    msgspec.MsgspecError,
    http.client.HTTPException,
    TimeoutError,
    asyncio.IncompleteReadError,
    # A name that is none: too long, with an empty label, with a NUL.
    ValueError,
)


class Links:
    """The decode's end: one connection per bootstrap server it was ever asked to meet at."""

    def __init__(self, announce: Announce, timeouts: Timeouts, faults: Switchboard) -> None:
        """Nothing is connected until `want`; `bind` first."""
        self.agent = announce.agent
        self._announce = announce
        self._timeouts = timeouts
        self._faults = faults
        self._endpoints: dict[str, Endpoint] = {}
        self._refused: dict[str, str] = {}
        self._believed: set[str] = set()
        """Prefills that are spoken to though nobody is there."""
        self._closed = threading.Event()
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
        return bootstrap in self._writers or self._believes(bootstrap)

    def known(self, bootstrap: str) -> bool:
        """Whether that prefill was ever reached."""
        return bootstrap in self._endpoints

    def refused(self, bootstrap: str) -> str:
        """Why that prefill and this decode cannot work together; empty when they can."""
        return self._refused.get(bootstrap, "")

    def send(self, bootstrap: str, message: ToPrefill) -> None:
        """Send to a prefill; lost when the link is, and then `link_lost` says so."""
        if self._blocks() and self._believes(bootstrap):
            self._push()
        self._thread.call(self._send, bootstrap, message)

    def let_go(self) -> None:
        """The worker ends: a send that blocks returns, unsent."""
        self._closed.set()

    def close(self) -> None:
        """Close every link and end the thread."""
        self.let_go()
        self._thread.stop()

    def _believes(self, bootstrap: str) -> bool:
        switches = self._faults.peers.switches
        return bootstrap in self._believed and (switches.stale_endpoint or self._blocks())

    def _blocks(self) -> bool:
        return self._faults.peers.switches.blocks_on_dead_peer

    def _push(self) -> None:
        """A send without a bound, on the caller's thread, into a pipe that nobody empties."""
        near, far = socket.socketpair()
        with near, far:
            near.settimeout(BLOCKED_S)
            while self._blocks() and not self._closed.is_set():
                with contextlib.suppress(TimeoutError):
                    near.sendall(bytes(1 << 16))

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
        attempts, reason, streams = 0, "", None
        while attempts < TOPOLOGY_ATTEMPTS_MAX:
            try:
                if streams is None:
                    streams = await asyncio.wait_for(self._connect(bootstrap), CONNECT_S)
            except _UNREACHED as problem:
                attempts, reason = attempts + 1, str(problem)
                log.debug("Failed to get prefill server info from %s: %s", bootstrap, problem)
                await asyncio.sleep(min(1.0, self._timeouts.heartbeat_s))
                continue
            attempts, (reader, writer) = 0, streams
            self._writers[bootstrap] = writer
            self._believed.discard(bootstrap)
            self._tell("link_up", bootstrap)
            try:
                await self._serve(reader, writer)
            except (OSError, WireError, TimeoutError, asyncio.IncompleteReadError) as problem:
                log.info("Attempting to reconnect to %s: %s", bootstrap, str(problem) or "closed")
            finally:
                del self._writers[bootstrap]
                writer.close()
            streams = await self._believe(bootstrap)
            if streams is not None:
                continue
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

    async def _believe(self, bootstrap: str) -> _Streams | None:
        """What SGLang up to 0.5.18 does when a peer's port falls silent: nothing, for a while.

        As long as the rendezvous answers, the endpoint that was cached is spoken to; what is said
        there is lost unless somebody listens again.
        """
        if self._blocks():
            self._believed.add(bootstrap)
        misses, silence = 0, self._timeouts.heartbeat_misses_max
        while self._faults.peers.switches.stale_endpoint and misses < silence:
            self._believed.add(bootstrap)
            await asyncio.sleep(self._timeouts.heartbeat_s)
            with contextlib.suppress(*_UNREACHED):
                return await asyncio.wait_for(self._open(bootstrap), CONNECT_S)
            try:
                await asyncio.to_thread(_get, bootstrap, "/health")
                misses = 0
            except _UNREACHED:
                misses += 1
        if not self._blocks():
            self._believed.discard(bootstrap)
        return None

    async def _connect(self, bootstrap: str) -> _Streams:
        await _route(bootstrap, -1)  # 503 until every rank is there
        endpoint = msgspec.json.decode(await _route(bootstrap, 0), type=Endpoint)
        self._endpoints[bootstrap] = endpoint
        return await self._open(bootstrap)

    async def _open(self, bootstrap: str) -> _Streams:
        endpoint = self._endpoints[bootstrap]
        reader, writer = await asyncio.open_connection(endpoint.rank_ip, endpoint.rank_port)
        try:
            send(writer, self._announce)
            answer = await read_at_decode(reader)
            if not isinstance(answer, Announced):
                raise WireError(f"{type(answer).__name__} comes before Announced")
            own = self._announce.layout
            differs = own.differs(answer.layout) if own and answer.layout else ""
            refusal = f"prefill instance {bootstrap} is refused: {differs}" if differs else ""
            self._refused[bootstrap] = refusal
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

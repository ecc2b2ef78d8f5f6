"""The control connections between ranks, below HTTP: framed msgpack over TCP (`wire.py`).

`Rank` is the prefill's end: it listens on the rank's own port and hears agents announce themselves,
renew their leases, say where rooms go, and give rooms up. `Links` is the decode's end: per
bootstrap server it fetches where the rank is, connects, announces, and beats; a lost link is made
again by itself.

Both live on a thread of their own named `bootstrap`, so that they answer while a step computes.

For: connections and who is at their other end.
Not for: what a message means to a room (`handoffs.py`, `decode.py`).
"""

import asyncio
import http.client
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from tandem_engine.config import Timeouts
from tandem_engine.wire import (
    Abort,
    AbortAck,
    Announce,
    Announced,
    Endpoint,
    Renew,
    Renewed,
    RoomFailed,
    RoomMetadata,
    ToDecode,
    Topology,
    ToPrefill,
    WireError,
    frame,
    read_at_decode,
    read_at_prefill,
)

log = logging.getLogger(__name__)
CONNECT_S = 5.0
TOPOLOGY_ATTEMPTS_MAX = 15
LINKS_MAX = 64
UNSENT_BYTES_MAX = 4 << 20
"""A peer that does not read is cut off rather than buffered for."""
_TOPOLOGY_QUERY = "prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"

Post = Callable[..., None]
"""`Scheduler.post`: run a handler on the scheduler's thread."""


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        """Start it."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # A connection that was accepted last becomes a task only in a later turn.
        for _ in range(3):
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function there, from any thread; nothing happens once the loop is stopped."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def run(self, coroutine: "Coroutine[Any, Any, object]", timeout_s: float) -> None:
        """Run a coroutine there and wait for it; raises what it raises."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def stop(self) -> None:
        """Cancel everything there and wait for the end."""
        self.call(self.loop.stop)
        self._thread.join(timeout=10.0)


class Hears(Protocol):
    """What the prefill's rank passes on (`handoffs.Handoffs`)."""

    def announce(self, message: Announce) -> None:
        """An agent announced itself."""
        ...

    def renewed(self, agent: str) -> None:
        """An agent renewed its lease."""
        ...

    def metadata(self, message: RoomMetadata) -> None:
        """An agent says where a room goes."""
        ...

    def aborted(self, message: Abort) -> None:
        """An agent gave a room up."""
        ...

    def disconnected(self, agent: str) -> None:
        """The connection of an agent closed."""
        ...


class Rank:
    """The prefill's end: one listening socket, one connection per agent."""

    def __init__(self, listener: socket.socket, engine: str, hears: Hears, post: Post) -> None:
        """Serve from now on, on a thread named `bootstrap`."""
        self._engine = engine
        self._hears = hears
        self._post = post
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._thread = LoopThread("bootstrap")
        self._thread.run(self._serve(listener), timeout_s=CONNECT_S)

    def tell(self, agent: str, message: ToDecode) -> None:
        """Send to an agent, if it is connected; from any thread."""
        self._thread.call(self._tell, agent, message)

    def close(self) -> None:
        """Close every connection and end the thread."""
        self._thread.call(self._server.close)
        self._thread.stop()

    def _tell(self, agent: str, message: ToDecode) -> None:
        writer = self._writers.get(agent)
        if writer is not None:
            _send(writer, message)

    async def _serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._connected, sock=listener)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; a bad frame ends this connection and nothing else."""
        agent: str | None = None
        try:
            first = await read_at_prefill(reader)
            if not isinstance(first, Announce):
                raise WireError(f"{type(first).__name__} comes before Announce")
            agent = first.agent
            self._writers[agent] = writer
            self._post(self._hears.announce, first)
            _send(writer, Announced(self._engine))
            while True:
                self._heard(await read_at_prefill(reader), agent, writer)
        except (WireError, OSError, asyncio.IncompleteReadError) as problem:
            if isinstance(problem, WireError):
                log.warning("A control connection is closed: %s", problem)
        except asyncio.CancelledError:
            # The thread ends. Raised on, asyncio 3.11 would report it as an error of the server.
            log.debug("The control connection of %s is closed", agent)
        finally:
            writer.close()
            if agent is not None and self._writers.get(agent) is writer:
                del self._writers[agent]
                self._post(self._hears.disconnected, agent)

    def _heard(self, message: ToPrefill, agent: str, writer: asyncio.StreamWriter) -> None:
        if message.agent != agent:
            raise WireError(f"agent {message.agent!r} speaks on the connection of {agent!r}")
        match message:
            case Renew():
                self._post(self._hears.renewed, agent)
                _send(writer, Renewed(message.beat))
            case RoomMetadata():
                self._post(self._hears.metadata, message)
            case Abort():
                self._post(self._hears.aborted, message)
            case Announce():
                self._post(self._hears.announce, message)


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
            _send(writer, message)

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
            _send(writer, self._announce)
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
            _send(writer, Renew(self.agent, beat))


def _send(writer: asyncio.StreamWriter, message: ToPrefill | ToDecode) -> None:
    """Queue a message; a connection whose other end does not read is dropped."""
    if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
        writer.transport.abort()
        return
    writer.write(frame(message))


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

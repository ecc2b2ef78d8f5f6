"""The prefill's end of the control protocol: a listening socket, and who is at the other end.

Agents announce themselves here, renew their leases, say where rooms go, and give rooms up. A bad
frame closes its connection and nothing else. As with SGLang's sockets, one thread moves frames and
answers beats, and another one, `bootstrap_thread`, hears what they say.

For: connections.
Not for: what a message means to a room (`handoffs.py`).
"""

import asyncio
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from tandem_engine.control import LoopThread, Post, send
from tandem_engine.faults import Switchboard
from tandem_engine.wire import (
    Abort,
    Announce,
    Announced,
    KvLayout,
    Renew,
    Renewed,
    RoomMetadata,
    ToDecode,
    ToPrefill,
    WireError,
    read_at_prefill,
)

log = logging.getLogger(__name__)
START_S = 5.0
END_S = 2.0

Heard = tuple[Callable[..., None], tuple[Any, ...]]
"""What a frame means to the prefill: a method of `Hears`, and what it is given."""


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

    def aborted(self, message: Abort, reason: str) -> None:
        """An agent gave a room up, or (with a `reason`) was refused and cannot take it."""
        ...

    def disconnected(self, agent: str) -> None:
        """The connection of an agent closed."""
        ...


class Rank:
    """The prefill's end: one listening socket, one connection per agent."""

    def __init__(
        self,
        listener: socket.socket,
        announced: Announced,
        hears: Hears,
        post: Post,
        faults: Switchboard,
    ) -> None:
        """Serve from now on, on two threads; `announced` says who this is."""
        self._announced = announced
        self._hears = hears
        self._post = post
        self._faults = faults
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._listen()
        self._thread = LoopThread("control")
        self._thread.run(self._serve(listener), timeout_s=START_S)

    def tell(self, agent: str, message: ToDecode) -> None:
        """Send to an agent, if it is connected; from any thread."""
        self._thread.call(self._tell, agent, message)

    def cut(self, agent: str) -> None:
        """Close the connection of an agent, if there is one; from any thread."""
        self._thread.call(self._close, agent)

    def close(self) -> None:
        """Close every connection and end the thread."""
        self._thread.call(self._server.close)
        self._thread.stop()
        self._frames.put(None)
        self._listener.join(END_S)

    def _tell(self, agent: str, message: ToDecode) -> None:
        writer = self._writers.get(agent)
        if writer is not None:
            send(writer, message)

    def _close(self, agent: str) -> None:
        writer = self._writers.pop(agent, None)
        if writer is not None:
            writer.close()

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
            refusal = _refusal(self._announced.layout, first.layout)
            if refusal:
                log.warning("Decode %s is refused: %s", first.address, refusal)
            else:
                self._hear(self._hears.announce, first)
            send(writer, self._announced)
            while True:
                self._heard(await read_at_prefill(reader), agent, writer, refusal)
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
                self._hear(self._hears.disconnected, agent)

    def _heard(
        self, message: ToPrefill, agent: str, writer: asyncio.StreamWriter, refusal: str
    ) -> None:
        if message.agent != agent:
            raise WireError(f"agent {message.agent!r} speaks on the connection of {agent!r}")
        match message:
            case Renew():
                self._hear(self._hears.renewed, agent)
                send(writer, Renewed(message.beat))
            case RoomMetadata():
                self._hear(self._hears.metadata, message)
            case Abort():
                self._hear(self._hears.aborted, message, refusal)
            case Announce():
                self._hear(self._hears.announce, message)

    def _listen(self) -> None:
        """Start the thread that hears; its name is the one SGLang's has."""
        self._frames: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self.bootstrap_thread, daemon=True)
        self._listener.start()

    def bootstrap_thread(self) -> None:
        """Hear what decodes say, in order, until this rank closes."""
        while (heard := self._frames.get()) is not None:
            handler, arguments = heard
            kills = self._faults.peers.switches.abort_kills_bootstrap
            if kills and isinstance(arguments[0], Abort):
                # SGLang's NIXL thread takes an abort for foreign traffic: nobody catches this.
                raise AssertionError("First message should be b'NixlMsgGuard'. Foreign traffic?")
            self._post(handler, *arguments)

    def _hear(self, handler: Callable[..., None], *arguments: object) -> None:
        """Have a frame heard.

        With nobody to hear it is lost, apart from what a heartbeat and a closed connection say by
        themselves. Once a thread that died may live, another one hears, and all connect anew.
        """
        if not self._listener.is_alive() and not self._faults.peers.switches.abort_kills_bootstrap:
            self._listen()
            for agent in list(self._writers):
                self._close(agent)
        if self._listener.is_alive():
            self._frames.put((handler, arguments))
        elif handler in (self._hears.renewed, self._hears.disconnected):
            self._post(handler, *arguments)


def _refusal(here: KvLayout | None, there: KvLayout | None) -> str:
    return here.differs(there) if here is not None and there is not None else ""

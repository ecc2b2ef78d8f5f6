"""The ports of a worker: bound first, served by uvicorn, closed with their connections.

For: `worker.py`.
Not for: what is answered (`http.py`, `bootstrap.py`).
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from tandem_engine.config import StartError

GRACE_S = 1.0
"""How long connections may finish what they write once the worker ends."""
STOP_S = 3.0


class _Server(uvicorn.Server):
    """Signals belong to `__main__.py`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class Listeners:
    """Sockets by name, and the servers on some of them."""

    def __init__(self) -> None:
        """None yet."""
        self._sockets: dict[str, socket.socket] = {}
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []

    def bind(self, name: str, host: str, port: int) -> int:
        """Listen; the port (0 asks for any). Raises `StartError` when it is taken."""
        try:
            self._sockets[name] = _listening(host, port)
        except OSError as problem:
            self.close()
            raise StartError(
                f"the {name} cannot listen on {host}:{port}: {problem.strerror}; "
                f"free the port or give another one"
            ) from problem
        bound: int = self._sockets[name].getsockname()[1]
        return bound

    def socket(self, name: str) -> socket.socket:
        """The socket of this name."""
        return self._sockets[name]

    def serve(self, name: str, app: Starlette) -> None:
        """Serve an application on a socket from now on."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=65,
            # Longer than `stop` leaves anybody: uvicorn would end requests with a traceback each.
            timeout_graceful_shutdown=int(STOP_S),
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[self._sockets[name]]))
        self._servers.append((server, task))

    async def stop(self, *, clean: bool) -> None:
        """End the servers; `clean` lets connections finish what they write, for `GRACE_S`."""
        for server, _ in self._servers:
            server.should_exit = True
            server.force_exit = not clean
        tasks = [task for _, task in self._servers]
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        for server, _ in self._servers:
            # A process that ends closes its connections; one that goes on has to do it.
            for connection in list(server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        self._servers.clear()
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        for listener in self._sockets.values():
            listener.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle off on what it accepts: 40 ms a reply otherwise.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)  # noqa: FBT003 - the socket module's own signature
    except OSError:
        listener.close()
        raise
    return listener

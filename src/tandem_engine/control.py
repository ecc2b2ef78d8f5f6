"""What both ends of the control protocol need: an event loop on a thread, and a bounded send.

The two ends are `rank.py` (the prefill listens) and `links.py` (the decode connects). Both live on
a thread of their own, so that they answer while a step computes.

Not for: messages (`wire.py`).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from tandem_engine.wire import ToDecode, ToPrefill, frame

UNSENT_BYTES_MAX = 4 << 20
"""A peer that does not read is cut off rather than buffered for."""

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


def send(writer: asyncio.StreamWriter, message: ToPrefill | ToDecode) -> None:
    """Queue a message; a connection whose other end does not read is dropped."""
    if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
        writer.transport.abort()
        return
    writer.write(frame(message))

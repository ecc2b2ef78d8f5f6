"""Virtual time: real asyncio code runs unchanged, sleeping moves the time, and nothing waits.

`run` carries a coroutine on an event loop whose time jumps to the next timer whenever nobody has
anything to do. Two runs of the same code do the same in the same order: there are no threads (what
is sent to one runs at once, in place) and no sockets.

For: days of watching in minutes, and tests that never sleep. Not for: code that waits for another
process, a socket or a real clock.
"""

import asyncio
import contextvars
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from tandem.errors import Bug

T = TypeVar("T")
BEGAN = 1_764_500_000.0
"""Unix seconds at which virtual time begins unless told otherwise."""


class VirtualClock:
    """`ports.Clock` in virtual time, and what may go wrong with a watcher's own time.

    `now` is what the watcher's host believes; `world` is the time in which the deployment lives.
    They differ after a `jump`. A clock is made first and given to `run`.
    """

    def __init__(self, began: float = BEGAN) -> None:
        """Begin at `began`, unix seconds."""
        self.world = began
        self.skew_s = 0.0
        self._asleep: deque[tuple[float, float]] = deque()

    def now(self) -> float:
        """Unix seconds, as this host's clock shows them."""
        return self.world + self.skew_s

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time; needs `run`."""
        await asyncio.sleep(seconds)

    def jump(self, seconds: float) -> None:
        """Set this host's clock forward, or back when negative; nothing else notices."""
        self.skew_s += seconds

    def block(self, seconds: float) -> None:
        """Let the calling code take so long that no timer is served meanwhile (a slow disk)."""
        self.world += seconds

    def suspend(self, begin: float, end: float) -> None:
        """Let this host sleep from one moment to another of world time; in the order of begins."""
        self._asleep.append((begin, end))

    def wakes_at(self, when: float) -> float:
        """When a timer set for `when` can be served: at the end of a sleep that covers it."""
        while self._asleep and self._asleep[0][1] <= self.world:
            self._asleep.popleft()
        for begin, end in self._asleep:
            if begin <= when < end:
                return end
        return when


def run(main: Coroutine[Any, Any, T], clock: VirtualClock) -> T:
    """Carry a coroutine to its end in the time of `clock`; tasks it leaves behind are cancelled.

    Raises whatever it raises, and `Bug` when everybody waits for something that cannot come.
    """
    loop: VirtualLoop = cast("Callable[[VirtualClock], VirtualLoop]", VirtualLoop)(clock)
    with loop.running():
        task = loop.create_task(main)
        try:
            loop.run_until(task)
        finally:
            left = [one for one in asyncio.all_tasks(loop) if not one.done()]
            for one in left:
                one.cancel()
            loop.run_until(asyncio.gather(*left, return_exceptions=True) if left else task)
    return task.result()


class Handle(asyncio.TimerHandle):
    """A callback that is due; cheaper than asyncio's own, because there are many."""

    __slots__ = ("args", "callback", "context", "off", "when_s")

    def __init__(  # the parent's fields serve a loop that this is not
        self,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> None:
        """Due at `when_s`, world time."""
        self.when_s = when_s
        self.callback = callback
        self.args = args
        self.context = context
        self.off = False

    def cancel(self) -> None:
        """Never call it."""
        self.off = True

    def cancelled(self) -> bool:
        """Whether it is never called."""
        return self.off

    def when(self) -> float:
        """When it is due."""
        return self.when_s

    def __repr__(self) -> str:
        return f"<Handle {self.callback!r} at {self.when_s}>"


class VirtualLoop(asyncio.AbstractEventLoop):
    """What asyncio's tasks, futures and timeouts need of a loop, and nothing else."""

    def __init__(self, clock: VirtualClock) -> None:
        """Its time is the world time of `clock`."""
        self._clock = clock
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._broken: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop of this thread meanwhile."""
        events._set_running_loop(self)  # noqa: SLF001 - how asyncio is told of a loop
        try:
            yield
        finally:
            events._set_running_loop(None)  # noqa: SLF001

    def run_until(self, wanted: "asyncio.Future[Any]") -> None:
        """Serve what is due, and move the time when nothing is, until a future is done."""
        while not wanted.done():
            if not self._ready:
                self._move()
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if handle.off:
                    continue
                if handle.context is None:
                    handle.callback(*handle.args)
                else:
                    handle.context.run(handle.callback, *handle.args)
            if self._broken:
                raise self._broken.pop()

    def _move(self) -> None:
        """To the next timer; those of one moment are served in the order in which they were set."""
        timers = self._timers
        while timers and timers[0][2].off:
            heapq.heappop(timers)
        if not timers:
            raise Bug("in virtual time everybody waits for something that cannot come")
        clock = self._clock
        clock.world = max(clock.world, clock.wakes_at(timers[0][0]))
        while timers and timers[0][0] <= clock.world:
            self._ready.append(heapq.heappop(timers)[2])

    def time(self) -> float:
        """World time, seconds."""
        return self._clock.world

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """Serve a callback in the next round."""
        handle = Handle(self._clock.world, callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """Serve a callback at a moment of world time."""
        handle = Handle(when, callback, args, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def call_later(
        self,
        delay_s: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """Serve a callback after so many seconds."""
        return self.call_at(self._clock.world + delay_s, callback, *args, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        """A task of this loop."""
        if context is None:
            return asyncio.Task(coro, loop=self, name=name)
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: object
    ) -> "asyncio.Future[T]":
        """What would run in a thread runs here and now: one order, always the same."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits it is told
            future.set_exception(error)
        return future

    def is_running(self) -> bool:
        """Always, for those who can ask."""
        return True

    def is_closed(self) -> bool:
        """Never: it holds nothing open."""
        return False

    def get_debug(self) -> bool:
        """Never."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback that broke ends the run: nothing is hidden in virtual time."""
        error = context.get("exception")
        if isinstance(error, BaseException) and "never retrieved" not in context.get("message", ""):
            self._broken.append(error)


__all__ = ["BEGAN", "VirtualClock", "VirtualLoop", "run"]

"""Streaming clients of a router, and their own log: the only yardstick of how soon was soon.

For: what a client saw, when: sent, first token, last token, end. Not for: judging anything.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import aiohttp

from watch_site import SERVED

NOUNS = ("file", "parser", "queue", "socket", "table", "report", "buffer", "scheduler", "page")
OPEN_MAX = 64
"""Open requests of a light load: clients stop coming when nobody is served."""


@dataclass(slots=True)
class Sent:
    """One request as its client saw it; `status` is open, completed, failed or left."""

    sent_at: float
    first_at: float | None = None
    last_at: float | None = None
    ended_at: float | None = None
    status: str = "open"
    detail: str = ""
    tokens: int = 0
    prompt_words: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How clients come: `closed` of them asking again and again, or `per_s` new ones a second."""

    name: str
    closed: int = 0
    per_s: float = 0.0
    words: int = 12
    output_tokens: int = 16
    pause_s: float = 0.0


@dataclass
class Clients:
    """Clients of one router until they are stopped."""

    url: str
    seed: int
    log: list[Sent] = field(default_factory=list)
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)
    _http: aiohttp.ClientSession | None = None
    _rng: random.Random = field(default_factory=random.Random)
    _closing: bool = False
    _asking: int = 0

    async def open(self) -> None:
        """Be ready to ask."""
        self._rng = random.Random(self.seed)
        timeout = aiohttp.ClientTimeout(total=600.0)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector)

    def start(self, load: Load) -> None:
        """Begin a load; it goes on until `hang_up`."""
        for _ in range(load.closed):
            self._spawn(self._again_and_again(load))
        if load.per_s:
            self._spawn(self._arriving(load))

    def _spawn(self, what: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again_and_again(self, load: Load) -> None:
        while not self._closing:
            sent = await self.ask(load.words, load.output_tokens)
            await asyncio.sleep(load.pause_s + (0.5 if sent.status == "failed" else 0.0))

    async def _arriving(self, load: Load) -> None:
        while not self._closing:
            await asyncio.sleep(self._rng.expovariate(load.per_s))
            if self._asking < OPEN_MAX and not self._closing:
                self._spawn(self.ask(load.words, load.output_tokens))

    async def lone(self, load: Load, until: Callable[[], bool]) -> None:
        """One client that asks again when it was answered: who is idle is not long unnoticed."""
        while not until():
            await self.ask(load.words, load.output_tokens)
            await asyncio.sleep(0.3)

    def begin_lone(self, load: Load, until: Callable[[], bool]) -> None:
        """Start `lone` without waiting for it."""
        self._spawn(self.lone(load, until))

    async def ask(self, words: int, output_tokens: int, *, leave_s: float | None = None) -> Sent:
        """One streamed request; with `leave_s` the client leaves after so long."""
        if self._http is None:
            raise RuntimeError("open first")
        sent = Sent(time.time(), prompt_words=words)
        self.log.append(sent)
        text = " ".join(self._rng.choice(NOUNS) for _ in range(words))
        body = {
            "model": SERVED,
            "messages": [{"role": "user", "content": f"{self._rng.random():.9f} {text}"}],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._asking += 1
        try:
            async with asyncio.timeout(leave_s):
                await self._read(sent, body)
        except TimeoutError:
            sent.status = "left"
        except (aiohttp.ClientError, ConnectionError) as error:
            sent.status, sent.detail = "failed", type(error).__name__
        except asyncio.CancelledError:
            # A client that is stopped had no answer until then: its request stays open.
            raise
        finally:
            self._asking -= 1
        if sent.status != "open":
            sent.ended_at = time.time()
        return sent

    async def _read(self, sent: Sent, body: dict[str, object]) -> None:
        if self._http is None:
            return
        async with self._http.post(f"{self.url}/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                sent.status, sent.detail = "failed", f"HTTP {reply.status}"
                return
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    sent.status = "completed"
                    continue
                if b'"error"' in line[:40]:
                    sent.status, sent.detail = "failed", line[:120].decode(errors="replace")
                    return
                sent.last_at = time.time()
                sent.first_at = sent.first_at or sent.last_at
                sent.tokens += 1
        if sent.status == "open":
            sent.status, sent.detail = "failed", "the stream broke off"

    def open_count(self) -> int:
        """Requests without an end."""
        return sum(1 for one in self.log if one.status == "open")

    def completed(self, since: float = 0.0) -> int:
        """Requests that were answered and sent after `since`."""
        return sum(1 for one in self.log if one.status == "completed" and one.sent_at >= since)

    async def leave_when_served(self, bound_s: float) -> None:
        """No client begins another request; who waits longer than the bound leaves."""
        self._closing = True
        begun = time.monotonic()
        while self._asking and time.monotonic() - begun < bound_s:
            await asyncio.sleep(0.1)
        await self.hang_up()
        self._closing = False

    async def hang_up(self) -> None:
        """Every client leaves; what was open stays open in the log."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Leave and close."""
        await self.hang_up()
        if self._http is not None:
            await self._http.close()

    def ttfts(self) -> list[float]:
        """Seconds to the first token of every request that was answered."""
        return [
            one.first_at - one.sent_at
            for one in self.log
            if one.status == "completed" and one.first_at is not None
        ]

    def last_progress(self, before: float) -> float | None:
        """When any client last got anything, up to `before`."""
        times = [t for one in self.log for t in (one.last_at, one.ended_at) if t and t <= before]
        done = [one.last_at for one in self.log if one.last_at and one.last_at <= before]
        return max(done or times, default=None)

    def first_hung(self, since: float, at: float) -> Sent | None:
        """The earliest request sent since then that had no end at `at`."""
        return next(
            (
                one
                for one in sorted(self.log, key=lambda one: one.sent_at)
                if one.sent_at >= since
                and one.sent_at <= at
                and one.status != "left"
                and (one.ended_at is None or one.ended_at > at)
            ),
            None,
        )

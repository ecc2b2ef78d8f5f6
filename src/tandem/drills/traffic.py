"""Agentic traffic as a client sends it, and the client's own log of it.

For: the drills' load and their only yardstick: what a client saw, when. Not for: judging the
deployment; the loop under test never reads this log.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

TOOLS = ("search", "open", "edit", "run", "test", "commit", "review", "measure", "compare")
NOUNS = ("file", "parser", "queue", "socket", "table", "report", "buffer", "scheduler", "page")


class Sent(msgspec.Struct, kw_only=True):
    """One request as its client saw it; `status` is open, completed or failed."""

    session: str
    turn: int
    sent_at: float
    ended_at: float | None = None
    status: str = "open"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the traffic looks: sizes in words, times in seconds."""

    sessions: int = 4
    """Sessions that run side by side."""
    turns: int = 3
    words: int = 18
    output_tokens: int = 12
    pause_s: float = 0.2
    backoff_s: float = 1.0
    """After a failure, as a decent client does."""
    timeout_s: float = 150.0


@dataclass
class ClientLog:
    """Every request sent, in order of sending."""

    sent: list[Sent] = field(default_factory=list)

    def open_count(self) -> int:
        """Requests without an answer yet."""
        return sum(1 for one in self.sent if one.status == "open")

    def count(self, status: str) -> int:
        """Requests that ended that way."""
        return sum(1 for one in self.sent if one.status == status)

    def oldest_open(self) -> Sent | None:
        """The longest waiting request."""
        return next((one for one in self.sent if one.status == "open"), None)

    def first_never_completed(self, found_at: float) -> Sent | None:
        """The earliest request that hung when the finding was made and never completed."""
        return next(
            (
                one
                for one in self.sent
                if one.status != "completed"
                and one.sent_at <= found_at
                and (one.ended_at is None or one.ended_at > found_at)
            ),
            None,
        )

    def write(self, path: Path) -> None:
        """Write the log as JSON lines."""
        path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in self.sent) + b"\n")


class Traffic:
    """Sessions against one router until stopped; seeded, so that a drill replays."""

    def __init__(
        self, url: str, shape: Shape, *, seed: int, log: ClientLog, model: str = "rehearsal"
    ) -> None:
        """`url` is the router's root, `model` its served name; `log` collects what happens."""
        self.url = url
        self.model = model
        self.shape = shape
        self.log = log
        self._random = random.Random(seed)  # noqa: S311 - reproducible words, not secrets
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Start every session; returns at once."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.shape.timeout_s),
            connector=aiohttp.TCPConnector(limit=256),
        )
        self._tasks = [
            asyncio.create_task(self._keep_talking(f"s{number}"))
            for number in range(self.shape.sessions)
        ]

    async def pause(self) -> None:
        """Let sessions end their present request and start no other; does not wait."""
        self._stopping.set()

    async def stop(self) -> None:
        """Cancel whatever is open and close; a request without an answer stays `open`."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _keep_talking(self, name: str) -> None:
        round_number = 0
        while not self._stopping.is_set():
            await self.talk(f"{name}.{round_number}")
            round_number += 1

    async def talk(self, session: str) -> None:
        """One conversation: each turn carries everything said before, as agents do."""
        messages: list[dict[str, str]] = []
        for turn in range(self.shape.turns):
            if self._stopping.is_set():
                return
            messages.append({"role": "user", "content": self._words(session, turn)})
            answer = await self.ask(session, turn, messages)
            if answer is None:
                await asyncio.sleep(self.shape.backoff_s)
                return
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(self.shape.pause_s)

    async def ask(self, session: str, turn: int, messages: list[dict[str, str]]) -> str | None:
        """One request; None when it did not complete."""
        if self._session is None:
            return None
        entry = Sent(session=session, turn=turn, sent_at=time.time())
        self.log.sent.append(entry)
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.shape.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        try:
            async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as reply:
                payload = await reply.read()
                if reply.status != 200:
                    entry.status, entry.detail = "failed", f"HTTP {reply.status}"
                    return None
                answer = msgspec.json.decode(payload, type=_ChatReply)
                entry.status = "completed"
                return answer.choices[0].message.content or ""
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, IndexError) as error:
            entry.status, entry.detail = "failed", type(error).__name__
            return None
        finally:
            if entry.status != "open":
                entry.ended_at = time.time()

    def _words(self, session: str, turn: int) -> str:
        chosen = " ".join(
            f"{self._random.choice(TOOLS)} the {self._random.choice(NOUNS)}"
            for _ in range(max(1, self.shape.words // 3))
        )
        return f"Session {session}, round {turn}: {chosen}."


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _ChatReply(msgspec.Struct):
    choices: list[_Choice]

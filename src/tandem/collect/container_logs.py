"""What a member's container writes, as its engine gives it: counted like the lines of a log file.

For: containers whose engine can be asked, whatever log driver it can read back. Not for: members
with a `log` of their own.
Source: Docker Engine API, `GET /containers/{id}/logs`: without a terminal the stream comes in
frames of a kind, three zeros, a length in four bytes, and so many bytes.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime

import aiohttp

from tandem.collect.incarnations import Incarnations
from tandem.collect.log_lines import LINE_BYTES_MAX, REPEAT_S, Lines
from tandem.containers import Container, ContainerEngine
from tandem.errors import WorldError
from tandem.ports import Harvest
from tandem.records import Member, Observation, Value
from tandem.records import vocabulary as v

READ_BYTES_MAX = 512 * 1024
"""Taken in one look; a container that writes faster is followed late."""
QUIET_S = 0.05
"""Nothing new for this long ends a look."""
FIRST_LINES = 500
"""How far back the first look goes."""
BEHIND_S = 60.0
"""Further behind than this, what is new matters more than the rest: that is skipped, and told."""
AGAIN_S = 5.0
"""A stream that ended (with its container, mostly) is asked for again this much later."""
HEADER_BYTES = 8

Seen = Callable[[Member], tuple[ContainerEngine, Container] | None]


class ContainerLogSource:
    """The log of one member's container."""

    def __init__(
        self,
        member: Member,
        seen: Seen,
        incarnations: Incarnations,
        *,
        interval_s: float = 2.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`seen` gives the member's container and its engine, None while nobody knows them."""
        self.name = f"container-log:{member.name}"
        self.interval_s = interval_s
        self.timeout_s = 8.0
        self._member = member
        self._seen = seen
        self._incarnations = incarnations
        self._now = now
        self._id: str | None = None
        self._stream: aiohttp.ClientResponse | None = None
        self._frames: Frames | None = None
        self._lines = Lines()
        self._last_at: float | None = None
        self._again_at = float("-inf")
        self._told_unseen_at = float("-inf")

    async def collect(self) -> Harvest:
        """Take what was written since the last look."""
        seen = self._seen(self._member)
        if seen is None:
            return Harvest()
        engine, container = seen
        if container.id != self._id:
            await self.close()
            self._id, self._last_at, self._again_at = container.id, None, float("-inf")
        self._lines.live(self._incarnations.of(self._member.name))
        if self._stream is None and self._now() >= self._again_at:
            self._again_at = self._now() + AGAIN_S
            try:
                self._stream = await engine.follow(
                    container.id, since=self._since(), tail=FIRST_LINES
                )
            except WorldError as error:
                return Harvest(self._unseen(error.clause))
            self._frames = Frames(tty=container.tty)
        passed = await self._read()
        rows = list(self._lines.told(self._now(), self._row))
        if passed is not None:
            said = f"lines before {passed:.0f} came too fast and were passed over"
            rows.append(self._row(v.LOG_SKIPPED_BYTES_TOTAL, missing=said))
        return Harvest(tuple(rows))

    def _since(self) -> float | None:
        """Just after the last line that was counted."""
        return None if self._last_at is None else self._last_at + 1e-6

    async def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._frames = None

    async def _read(self) -> float | None:
        """Everything there is, up to a bound; until when lines were passed over, if they were."""
        left = READ_BYTES_MAX
        while left > 0 and self._stream is not None and self._frames is not None:
            try:
                chunk = await asyncio.wait_for(self._stream.content.readany(), QUIET_S)
            except TimeoutError:
                return None
            except (aiohttp.ClientError, OSError):
                chunk = b""
            if not chunk:
                await self.close()
                return None
            left -= len(chunk)
            for line in self._frames.lines(chunk):
                self._take(line)
        if left > 0 or self._last_at is None or self._now() - self._last_at <= BEHIND_S:
            return None
        await self.close()
        self._last_at, self._again_at = None, float("-inf")
        return self._now()

    def _take(self, line: bytes) -> None:
        """Count a line; without a time of its own it is none that was not counted already."""
        stamp, _, text = line.partition(b" ")
        try:
            at = datetime.fromisoformat(stamp.decode("ascii")).timestamp()
        except (ValueError, OverflowError):
            at = self._now()
        if self._last_at is not None and at < self._last_at:
            return
        self._last_at = at
        self._lines.count(text, at, exact=True)

    def _unseen(self, why: str) -> tuple[Observation, ...]:
        """That nothing can be seen, now and then: it stays so until somebody does something."""
        if self._now() < self._told_unseen_at + REPEAT_S:
            return ()
        self._told_unseen_at = self._now()
        return (self._row(v.LOG_LINES_TOTAL, missing=why),)

    def _row(
        self, name: str, value: Value = None, label: str = "", *, missing: str | None = None
    ) -> Observation:
        return Observation(
            source="log",
            subject=self._member.name,
            name=name,
            at=self._now(),
            label=label,
            value=value,
            missing=missing,
            incarnation=self._lines.life,
        )


class Frames:
    """A log's stream cut into lines; what has no end yet waits, bounded."""

    def __init__(self, *, tty: bool) -> None:
        """A container with a terminal has one stream and no frames."""
        self._tty = tty
        self._header = b""
        self._left = 0
        self._kind = 0
        self._rest: dict[int, bytes] = {}

    def lines(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk."""
        if self._tty:
            return self._cut(0, chunk)
        found: list[bytes] = []
        while chunk:
            if self._left == 0:
                wanted = HEADER_BYTES - len(self._header)
                self._header, chunk = self._header + chunk[:wanted], chunk[wanted:]
                if len(self._header) < HEADER_BYTES:
                    break
                self._kind = self._header[0]
                self._left, self._header = int.from_bytes(self._header[4:], "big"), b""
                continue
            found += self._cut(self._kind, chunk[: self._left])
            used = min(self._left, len(chunk))
            self._left, chunk = self._left - used, chunk[used:]
        return found

    def _cut(self, kind: int, data: bytes) -> list[bytes]:
        *lines, rest = (self._rest.get(kind, b"") + data).split(b"\n")
        # Standard output and error, and nothing an engine may invent beyond them.
        self._rest = {key: left for key, left in self._rest.items() if key < 3}
        self._rest[kind] = rest[:LINE_BYTES_MAX]
        return [line.rstrip(b"\r") for line in lines]


__all__ = ["ContainerLogSource", "Frames"]

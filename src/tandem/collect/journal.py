"""Journals: what systemd keeps of a unit's output, or of the kernel's, followed by `journalctl`.

For: members whose unit is known, and the host where it has GPUs: the same counts and signatures as
of a log file, with exact times. Not for: a journal on another host.
Source: journalctl(1), systemd.journal-fields(7). One follower per unit costs nothing while nothing
is written; starting the program for every look would cost ten milliseconds each time.
"""

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence

import msgspec

from tandem.cgroups import Service
from tandem.collect.incarnations import Incarnations
from tandem.collect.log_lines import REPEAT_S, Lines
from tandem.ports import Harvest
from tandem.records import Observation, Value
from tandem.records import vocabulary as v

READ_BYTES_MAX = 1024 * 1024
"""Taken in one look; a journal that grows faster is followed late."""
ENTRY_BYTES_MAX = 256 * 1024
"""A longer entry is passed over."""
ERRORS_BYTES_MAX = 4096
QUIET_S = 0.05
"""Nothing new for this long ends a look."""
FIRST_LINES = 500
"""How far back the first look goes."""
BEHIND_S = 60.0
"""Further behind than this, what is new matters more than the rest: that is skipped, and told."""
AGAIN_S = 30.0
"""A follower that ended is started again this much later."""
NO_RIGHT = "not ours to see: add this user to the group `systemd-journal`, or run Tandem as root"
_REFUSED = ("insufficient permissions", "not seeing messages", "permission denied")


class _Entry(msgspec.Struct):
    """One entry; a message that is no plain text comes as a list of its bytes."""

    cursor: str = msgspec.field(default="", name="__CURSOR")
    realtime_us: str = msgspec.field(default="0", name="__REALTIME_TIMESTAMP")
    message: str | list[int | str | list[int]] | None = msgspec.field(default=None, name="MESSAGE")

    @property
    def at(self) -> float:
        """Unix seconds at which it was written."""
        return int(self.realtime_us) / 1e6 if self.realtime_us.isdigit() else 0.0

    @property
    def line(self) -> bytes:
        """The message as bytes."""
        if isinstance(self.message, str):
            return self.message.encode(errors="replace")
        numbers = [one for one in self.message or () if isinstance(one, int) and 0 <= one < 256]
        return bytes(numbers)


def of_service(service: Service | None) -> tuple[str, ...] | None:
    """The words that choose one unit's journal; None while no unit is known."""
    if service is None:
        return None
    return (f"{'--unit' if service.uid is None else '--user-unit'}={service.unit}",)


OF_KERNEL = ("--dmesg",)
"""The words that choose the kernel's messages since it booted: the driver's errors among them."""


class JournalSource:
    """One journal: of a member's unit, or of the host's kernel."""

    def __init__(
        self,
        subject: str,
        which: Callable[[], tuple[str, ...] | None],
        incarnations: Incarnations,
        *,
        interval_s: float = 2.0,
        program: Sequence[str] = ("journalctl",),
        now: Callable[[], float] = time.time,
    ) -> None:
        """`which` gives the words that choose it, None while there is none to follow.

        `subject` is the member, or `host`; `program` is what is run.
        """
        self.name = f"journal:{subject}"
        self.interval_s = interval_s
        self.timeout_s = 5.0
        self._subject = subject
        self._which = which
        self._incarnations = incarnations
        self._program = program
        self._now = now
        self._words: tuple[str, ...] | None = None
        self._process: Process | None = None
        self._errors: asyncio.Task[str] | None = None
        self._missing: str | None = None
        self._cursor: str | None = None
        self._behind_at: float | None = None
        self._rest = b""
        self._lines = Lines()
        self._again_at = float("-inf")
        self._told_unseen_at = float("-inf")

    async def collect(self) -> Harvest:
        """Take what the journal has got since the last look."""
        words = self._which()
        if words is None:
            return Harvest()
        if words != self._words:
            await self.close()
            self._words, self._cursor, self._again_at = words, None, float("-inf")
        self._lines.live(self._incarnations.of(self._subject))
        if self._process is None and self._now() >= self._again_at:
            self._again_at = self._now() + AGAIN_S
            await self._start(words)
        if self._process is not None:
            await self._read(self._process)
        if self._missing is not None:
            return Harvest(self._unseen(self._missing))
        rows = list(self._lines.told(self._now(), self._row))
        if self._behind_at is not None:
            passed = f"entries before {self._behind_at:.0f} came too fast and were passed over"
            rows.append(self._row(v.LOG_SKIPPED_BYTES_TOTAL, missing=passed))
            self._behind_at = None
        return Harvest(tuple(rows))

    def _unseen(self, why: str) -> tuple[Observation, ...]:
        """That nothing can be seen, now and then: it stays so until somebody does something."""
        if self._now() < self._told_unseen_at + REPEAT_S:
            return ()
        self._told_unseen_at = self._now()
        return (self._row(v.LOG_LINES_TOTAL, missing=why),)

    async def close(self) -> None:
        """End the follower."""
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if errors is not None:
            errors.cancel()
            await asyncio.wait([errors], timeout=1.0)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # What is still in the pipes would keep them open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), 2.0)

    async def _start(self, words: Sequence[str]) -> None:
        where = f"--after-cursor={self._cursor}" if self._cursor else f"--lines={FIRST_LINES}"
        argv = [
            *(*self._program, "--output=json", "--output-fields=MESSAGE", "--all", "--no-pager"),
            *("--follow", *words, where),
            *(("--no-tail",) if self._cursor else ()),
        ]
        self._rest, self._missing = b"", None
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                limit=READ_BYTES_MAX // 2,
                # A Ctrl-C meant for Tandem is not for it, and whatever it starts ends with it.
                start_new_session=True,
            )
        except OSError as error:
            self._missing = f"cannot start journalctl: {error}"
            return
        if self._process.stderr is not None:
            self._errors = asyncio.create_task(_told(self._process.stderr))

    async def _read(self, process: Process) -> None:
        """Everything there is, up to a bound; the rest waits in the pipe, and its writer too."""
        left, last_at = READ_BYTES_MAX, 0.0
        while left > 0 and process.stdout is not None:
            try:
                chunk = await asyncio.wait_for(process.stdout.read(left), QUIET_S)
            except TimeoutError:
                break
            if not chunk:
                await self._ended(process)
                return
            left -= len(chunk)
            last_at = self._take(chunk) or last_at
        self._missing = None
        if self._errors is not None and self._errors.done():
            self._missing = _explained(self._errors.result())
        if left <= 0 and last_at and self._now() - last_at > BEHIND_S:
            self._behind_at, self._cursor, self._again_at = self._now(), None, float("-inf")
            await self.close()

    async def _ended(self, process: Process) -> None:
        """The follower is gone: say why, and start it again later from where it was."""
        errors = self._errors
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        if errors is not None:
            await asyncio.wait([errors], timeout=1.0)
        told = errors.result() if errors is not None and errors.done() else ""
        self._missing = _explained(told) or f"journalctl ended: {told or 'it gave no reason'}"
        await self.close()

    def _take(self, chunk: bytes) -> float | None:
        """Count the whole entries of what was read; the time of the last."""
        *entries, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest if len(rest) <= ENTRY_BYTES_MAX else b"x"
        at: float | None = None
        for text in entries:
            if not text or len(text) > ENTRY_BYTES_MAX:
                continue
            try:
                entry = msgspec.json.decode(text, type=_Entry)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            at = entry.at
            self._cursor = entry.cursor or self._cursor
            self._lines.count(entry.line, at, exact=True)
        return at

    def _row(
        self, name: str, value: Value = None, label: str = "", *, missing: str | None = None
    ) -> Observation:
        return Observation(
            source="log",
            subject=self._subject,
            name=name,
            at=self._now(),
            label=label,
            value=value,
            missing=missing,
            incarnation=self._lines.life,
        )


async def _told(errors: asyncio.StreamReader) -> str:
    """What a program says on its standard error first, bounded; the rest is passed over.

    Ends with the first words, so that they are known while the program goes on.
    """
    text = await errors.read(ERRORS_BYTES_MAX)
    return text.decode(errors="replace").strip()


def _explained(told: str) -> str | None:
    """The reason in a program's words why nothing, or not everything, can be seen; None is none."""
    lowered = told.lower()
    if any(word in lowered for word in _REFUSED):
        return NO_RIGHT
    return None


__all__ = ["OF_KERNEL", "JournalSource", "of_service"]

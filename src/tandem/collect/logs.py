"""The members' log files, followed by offset: how many lines, and which of the known signatures.

For: counting what engines write, and the last such line. Files may rotate, shrink and grow fast.
Not for: keeping logs, or judging what a line means.
"""

import asyncio
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tandem.collect.incarnations import Incarnations
from tandem.collect.log_signatures import ANY, SIGNATURES
from tandem.ports import Harvest
from tandem.records import Member, Observation, Value
from tandem.records import vocabulary as v

READ_BYTES_MAX = 256 * 1024
"""Read in one look; a file that grows faster is followed late, and says so."""
LINE_BYTES_MAX = 16 * 1024
"""A longer line is cut for matching."""
SHOWN_CHARS_MAX = 500
REPEAT_S = 30.0
"""Unchanged counts are told again this often, zeros too: nothing in a log is evidence."""


class LogSource:
    """One member's log file."""

    def __init__(
        self,
        member: Member,
        log_path: Callable[[Member], str | None],
        incarnations: Incarnations,
        *,
        interval_s: float = 2.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`log_path` (a supervisor's) says where its output goes, None when nobody knows."""
        self.name = f"log:{member.name}"
        self.interval_s = interval_s
        self.timeout_s = 5.0
        self._member = member
        self._log_path = log_path
        self._incarnations = incarnations
        self._now = now
        self._file: io.BufferedReader | None = None
        self._rest = b""
        self._lines = 0
        self._skipping = False
        self._counts: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._changed: set[str] = set()
        self._told_at = float("-inf")
        self._life: str | None = None

    async def collect(self) -> Harvest:
        """Look once, in a thread."""
        return Harvest(tuple(await asyncio.to_thread(self._look)))

    async def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _look(self) -> list[Observation]:
        path = self._log_path(self._member)
        if path is None:
            return [self._row(v.LOG_LINES_TOTAL, missing="nobody told where its log goes")]
        life = self._incarnations.of(self._member.name)
        if life is not None and life != self._life:
            self._new_life(life)
        try:
            self._read(Path(path))
        except OSError as error:
            return [self._row(v.LOG_LINES_TOTAL, missing=f"cannot read its log: {error}")]
        return list(self._told())

    def _new_life(self, life: str) -> None:
        """Counts are of one life; the first one known keeps what was read before it was."""
        if self._life is not None:
            self._counts.clear()
            self._last.clear()
            self._lines = 0
            self._told_at = float("-inf")
        self._life = life

    def _read(self, path: Path) -> None:
        """Read on from where the last look ended, into the successor of a rotated file."""
        if self._file is None:
            self._open(path)
        left = READ_BYTES_MAX
        while left > 0 and self._file is not None:
            chunk = self._file.read(left)
            left -= len(chunk)
            self._take(chunk)
            if chunk:
                continue
            if not self._moved_on(path, self._file):
                break

    def _open(self, path: Path, *, whole: bool = False) -> None:
        """Open the file; a long one is entered near its end, at the next whole line."""
        self._file = path.open("rb")
        self._rest, self._skipping = b"", False
        size_bytes = os.fstat(self._file.fileno()).st_size
        if not whole and size_bytes > READ_BYTES_MAX:
            self._file.seek(size_bytes - READ_BYTES_MAX)
            self._skipping = True

    def _moved_on(self, path: Path, file: io.BufferedReader) -> bool:
        """Whether there is more to read elsewhere: the file was replaced, or cut short."""
        ours = os.fstat(file.fileno())
        try:
            theirs = path.stat()
        except FileNotFoundError:
            return False
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
            file.close()
            self._open(path, whole=True)
            return True
        if ours.st_size < file.tell():
            file.seek(0)
            self._rest, self._skipping = b"", False
            return True
        return False

    def _take(self, chunk: bytes) -> None:
        """Count the whole lines of what was read; what has no end yet waits, bounded."""
        if not chunk:
            return
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[:LINE_BYTES_MAX]
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        self._lines += len(lines)
        for line in lines:
            if ANY.search(line, 0, LINE_BYTES_MAX):
                self._match(line[:LINE_BYTES_MAX])

    def _match(self, line: bytes) -> None:
        for slug, signature in SIGNATURES.items():
            if signature.search(line):
                self._counts[slug] += 1
                self._changed.add(slug)
                shown = line.decode(errors="replace").strip()
                self._last[slug] = shown[:SHOWN_CHARS_MAX]

    def _told(self) -> Iterator[Observation]:
        """The line count each time; signatures when they changed, all of them now and then."""
        at = self._now()
        yield self._row(v.LOG_LINES_TOTAL, self._lines)
        every = at - self._told_at >= REPEAT_S
        if every:
            self._told_at = at
        for slug in SIGNATURES if every else sorted(self._changed):
            yield self._row(v.LOG_SIGNATURE, self._counts[slug], slug)
            if slug in self._changed:
                yield self._row(v.LOG_LAST, self._last[slug], slug)
        self._changed.clear()

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
            incarnation=self._life,
        )


__all__ = ["LogSource"]

"""The members' log files, followed by offset: how many lines, and which of the known signatures.

For: counting what engines write, and the last such line. Files may rotate, shrink and grow fast.
Not for: keeping logs, or judging what a line means.
"""

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from tandem.collect.incarnations import Incarnations
from tandem.collect.log_lines import LINE_BYTES_MAX, Lines
from tandem.ports import Harvest
from tandem.records import Member, Observation, Value
from tandem.records import vocabulary as v

READ_BYTES_MAX = 256 * 1024
"""Read in one look; a file that grows faster is followed late, and says so."""
MARK_BYTES = 64
BEHIND_BYTES_MAX = 16 * 1024 * 1024
"""Further behind than this, what is new matters more than the rest: that is skipped, and told."""


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
        self._file: _File | None = None
        self._former: _File | None = None
        self._skipped_bytes = 0
        self._lines = Lines()

    async def collect(self) -> Harvest:
        """Look once, in a thread."""
        return Harvest(tuple(await asyncio.to_thread(self._look)))

    async def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._former):
            if file is not None:
                file.close()
        self._file = self._former = None

    def _look(self) -> list[Observation]:
        path = self._log_path(self._member)
        if path is None:
            return [self._row(v.LOG_LINES_TOTAL, missing="nobody told where its log goes")]
        self._lines.live(self._incarnations.of(self._member.name))
        try:
            self._read(Path(path))
        except OSError as error:
            return [self._row(v.LOG_LINES_TOTAL, missing=f"cannot read its log: {error}")]
        found = list(self._lines.told(self._now(), self._row))
        if self._skipped_bytes:
            found.append(self._row(v.LOG_SKIPPED_BYTES_TOTAL, self._skipped_bytes))
        return found

    def _read(self, path: Path) -> None:
        """Read on from where the last look ended, into the successor of a rotated file."""
        if self._file is None:
            self._file = _File(path)
        else:
            self._skipped_bytes += self._file.keep_up()
        left = READ_BYTES_MAX
        if self._former is not None:
            # Who never opens its log again goes on writing to the file that was renamed.
            left -= self._take(self._former, left)
            if self._former.deleted() and left == READ_BYTES_MAX:
                # Held open it would keep the disk from getting its space back.
                self._former.close()
                self._former = None
        while left > 0:
            left -= self._take(self._file, left)
            if left <= 0 or not self._moved_on(path, self._file):
                break

    def _take(self, file: "_File", left: int) -> int:
        """Count the lines that a file got, and say how many bytes were read for it."""
        size_bytes, at = 0, self._now()
        while size_bytes < left:
            lines, read_bytes = file.lines(left - size_bytes)
            if not read_bytes:
                break
            size_bytes += read_bytes
            for line in lines:
                self._lines.count(line, at)
        return size_bytes

    def _moved_on(self, path: Path, file: "_File") -> bool:
        """Whether another file has the name now, and is read from here on."""
        try:
            if file.has_name(path):
                return False
            successor = _File(path, whole=True)
        except FileNotFoundError:
            return False
        if self._former is not None:
            self._former.close()
        self._former, self._file = file, successor
        return True

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


class _File:
    """One open log, read by whole lines."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        """Open it; a long one is entered near its end, at the next whole line, unless `whole`.

        Raises `OSError`, also for what is no ordinary file and could be waited for without end.
        """
        self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            self._file.close()
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        self._rest = b""
        self._mark = b""
        """The last bytes that were read: others in their place mean that it was written anew."""
        self._skipping = False
        if not whole and status.st_size > READ_BYTES_MAX:
            self._enter(status.st_size - READ_BYTES_MAX)

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def keep_up(self) -> int:
        """Go on near the end of a file that grows faster than it is read; the bytes left out."""
        at, end = self._file.tell(), os.fstat(self._file.fileno()).st_size
        if end - at <= BEHIND_BYTES_MAX:
            return 0
        self._enter(end - READ_BYTES_MAX)
        return end - READ_BYTES_MAX - at

    def lines(self, size_bytes: int) -> tuple[list[bytes], int]:
        """The next whole lines, and the bytes read for them; what has no end yet waits, bounded."""
        if self._written_anew():
            self._enter(0)
        chunk = self._file.read(size_bytes)
        self._mark = (self._mark + chunk)[-MARK_BYTES:]
        if not chunk:
            return [], 0
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[:LINE_BYTES_MAX]
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        return lines, len(chunk)

    def has_name(self, path: Path) -> bool:
        """Whether the path still leads to this file; raises `FileNotFoundError` when to none."""
        ours, theirs = os.fstat(self._file.fileno()), path.stat()
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def deleted(self) -> bool:
        """Whether no name leads to it any more."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def _written_anew(self) -> bool:
        """Whether it was cut since the last look, even where it has grown again beyond that."""
        at = self._file.tell() - len(self._mark)
        fd = self._file.fileno()
        return bool(self._mark) and os.pread(fd, len(self._mark), at) != self._mark

    def _enter(self, at: int) -> None:
        self._file.seek(at)
        self._rest, self._mark, self._skipping = b"", b"", at > 0


__all__ = ["LogSource"]

"""Lines of a member's log, counted: how many, which known signatures, first and last seen when.

For: whatever brings lines, from a file or from the journal (`logs.py`, `journal.py`).
Not for: keeping logs, or judging what a line means. A hostile line costs a bound: it is cut, and
what a terminal would obey is taken out before it is matched.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from tandem.collect.log_signatures import ANY, SIGNATURES
from tandem.records import Observation
from tandem.records import vocabulary as v
from tandem.visible import visible

LINE_BYTES_MAX = 16 * 1024
"""A longer line is cut for matching."""
SHOWN_CHARS_MAX = 500
REPEAT_S = 30.0
"""Unchanged counts are told again this often, zeros too: nothing in a log is evidence."""
OLDEST_S = 90 * 86400.0
"""A time further back than this, or ahead of the clock, is no time of the line."""

_ESCAPE = re.compile(rb"\x1b\[[0-?]{0,64}[ -/]{0,16}[@-~]")
_WRITTEN = re.compile(
    rb"\s{0,8}\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?)"
)
"""How SGLang, vLLM and the router begin a line with the time; without a zone it is local."""


@dataclass(slots=True)
class _Matched:
    """The lines of one signature."""

    first_at: float
    last_at: float
    last: str


class Lines:
    """The count of one log in one life of its member."""

    def __init__(self) -> None:
        """Nothing has been read."""
        self.life: str | None = None
        self._total = 0
        self._counts: Counter[str] = Counter()
        self._matched: dict[str, _Matched] = {}
        self._changed: set[str] = set()
        self._told_at = float("-inf")

    def live(self, life: str | None) -> None:
        """Counts are of one life; the first one known keeps what was read before it was."""
        if life is None or life == self.life:
            return
        if self.life is not None:
            self._counts.clear()
            self._matched.clear()
            self._total = 0
            self._told_at = float("-inf")
        self.life = life

    def count(self, line: bytes, at: float, *, exact: bool = False) -> None:
        """Count one line, read at `at`; `exact` says that this is when it was written."""
        self._total += 1
        line = line[:LINE_BYTES_MAX]
        if b"\x1b" in line:
            line = _ESCAPE.sub(b"", line)
        if not ANY.search(line):
            return
        written_at = at if exact else _written_at(line, at)
        shown = visible(line[: 4 * SHOWN_CHARS_MAX].decode(errors="replace")).strip()
        for slug, signature in SIGNATURES.items():
            if signature.search(line):
                self._counts[slug] += 1
                self._changed.add(slug)
                seen = self._matched.get(slug)
                first_at = written_at if seen is None else min(seen.first_at, written_at)
                self._matched[slug] = _Matched(first_at, written_at, shown[:SHOWN_CHARS_MAX])

    def told(self, at: float, row: Callable[..., Observation]) -> Iterator[Observation]:
        """The line count each time; signatures when they changed, all of them now and then."""
        yield row(v.LOG_LINES_TOTAL, self._total)
        every = at - self._told_at >= REPEAT_S
        if every:
            self._told_at = at
        for slug in SIGNATURES if every else sorted(self._changed):
            yield row(v.LOG_SIGNATURE, self._counts[slug], slug)
            seen = self._matched.get(slug)
            if seen is not None and slug in self._changed:
                yield row(v.LOG_LAST, seen.last, slug)
            if seen is not None:
                yield row(v.LOG_FIRST_SEEN_AT, seen.first_at, slug)
                yield row(v.LOG_LAST_SEEN_AT, seen.last_at, slug)
        self._changed.clear()


def _written_at(line: bytes, read_at: float) -> float:
    """When a line says it was written; when it was read, where it does not say so credibly."""
    found = _WRITTEN.match(line)
    if found is None:
        return read_at
    try:
        at = datetime.fromisoformat(found[1].decode("ascii")).timestamp()
    except (ValueError, OverflowError, OSError):
        return read_at
    return at if read_at - OLDEST_S <= at <= read_at + 1.0 else read_at


__all__ = ["LINE_BYTES_MAX", "REPEAT_S", "Lines"]

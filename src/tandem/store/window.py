"""The newest few minutes in memory, so that judgement can look every second.

For: what one process has read or written. Not for: anything that must survive it; that is SQLite.
"""

from collections import deque
from collections.abc import Iterable

from tandem.facts import Key
from tandem.records import Observation

WINDOW_S = 300.0
"""Longer than any window detect looks through; at 150 observations a second some 45,000 rows."""


class Window:
    """Observations of the last `WINDOW_S` seconds before the newest."""

    def __init__(self, since: float, rows: Iterable[Observation]) -> None:
        """Begin with every stored row at or after `since`."""
        self.since = since
        """Nothing that is newer than this is missing here."""
        self._rows = deque(rows)
        self._newest = max((seen.at for seen in self._rows), default=since)

    def add(self, rows: Iterable[Observation]) -> None:
        """Append rows and drop what has become too old."""
        for seen in rows:
            self._rows.append(seen)
            self._newest = max(self._newest, seen.at)
        oldest = self._newest - WINDOW_S
        # Rows arrive almost in order: an old one behind a new one leaves a little later.
        while self._rows and self._rows[0].at < oldest:
            self._rows.popleft()
        self.since = max(self.since, oldest)

    def rows(self, since: float, slow: dict[Key, Observation]) -> list[Observation]:
        """The rows at or after `since`, and slowly changing things last seen before it."""
        carried = [seen for seen in slow.values() if seen.at < since]
        return carried + [seen for seen in self._rows if seen.at >= since]

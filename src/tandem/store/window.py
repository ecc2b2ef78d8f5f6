"""The newest few minutes in memory, so that judgement can look every second.

For: what one process has read or written. Not for: anything that must survive it; that is SQLite.
"""

from collections.abc import Iterable

from tandem.records import Observation
from tandem.series import Columns
from tandem.store.state import SLOW

WINDOW_S = 300.0
"""Longer than any window detect looks through; at 150 observations a second some 45,000 rows."""
DROP_EVERY_S = 60.0
"""How far the oldest row may outlive `WINDOW_S`: dropping costs, looking past it does not."""


class Window:
    """Observations of the last `WINDOW_S` seconds before the newest, by what they speak of.

    The newest row of a slowly changing thing stays however old it is.
    """

    def __init__(self, since: float, rows: Iterable[Observation]) -> None:
        """Begin with every stored row at or after `since`, and the slow ones last seen before."""
        self.since = since
        """Nothing that is newer than this is missing here."""
        self.columns = Columns(rows)
        times = [series.ats[-1] for series in self.columns.series.values()]
        self._newest = max(times, default=since)
        self._dropped_at = self._newest

    def add(self, rows: Iterable[Observation]) -> None:
        """Append rows and now and then drop what has become too old."""
        add, newest = self.columns.add, self._newest
        for seen in rows:
            add(seen)
            newest = max(newest, seen.at)
        self._newest = newest
        if newest - self._dropped_at > DROP_EVERY_S:
            self._dropped_at = newest
            self.columns.drop(newest - WINDOW_S, SLOW)
            self.since = max(self.since, newest - WINDOW_S)

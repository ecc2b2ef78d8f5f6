"""Observations kept by what they speak of, so that a window moves on at the cost of what is new.

A `Series` holds all rows of one thing (subject, name, label), oldest first, and the numbers among
them. It is only ever added to at its end; a row that comes late, and dropping old rows, make
another series, so that whoever still reads the first one sees what it always held.

For: `Facts`, and the stores that make them every second. Not for: asking questions (`facts.py`).
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from tandem.records import Observation, Value

Key = tuple[str, str, str]


class Sample(NamedTuple):
    """One number seen at one time, and the observation that holds it."""

    at: float
    value: float
    id: int


def number(value: Value) -> float | None:
    """A value as a number; None when it is none."""
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, int | float) else None


class Series:
    """The rows of one thing by (at, id), their times, and their numbers by source, made lazily."""

    __slots__ = ("_numbers", "ats", "rows")

    def __init__(self, rows: list[Observation]) -> None:
        """`rows` are in order, and this series' own from now on."""
        self.rows = rows
        self.ats = [seen.at for seen in rows]
        self._numbers: dict[str | None, tuple[list[Sample], int]] = {}

    def numbers(self, source: str | None) -> list[Sample]:
        """The numeric samples of all rows, or of one source's; not to be changed."""
        samples, known = self._numbers.get(source) or ([], 0)
        count = len(self.rows)
        if known < count:
            for seen in self.rows[known:] if known else self.rows:
                if source is None or source == seen.source:
                    value = seen.value
                    if type(value) is int or type(value) is float or value is True:
                        samples.append(Sample(seen.at, float(value), seen.id))
                    elif (read := number(value)) is not None:
                        samples.append(Sample(seen.at, read, seen.id))
            self._numbers[source] = (samples, count)
        return samples


class Columns:
    """Every series of one deployment, and which labels each name has."""

    __slots__ = ("labels", "series")

    def __init__(self, observations: Iterable[Observation] = ()) -> None:
        """Observations may come in any order."""
        self.series: dict[Key, Series] = {}
        self.labels: dict[tuple[str, str], tuple[str, ...]] = {}
        grouped: dict[Key, list[Observation]] = {}
        for seen in observations:
            key = (seen.subject, seen.name, seen.label)
            if key in grouped:
                grouped[key].append(seen)
            else:
                grouped[key] = [seen]
        for key, rows in grouped.items():
            rows.sort(key=_order)
            self._put(key, Series(rows))

    def _put(self, key: Key, series: Series) -> None:
        if key not in self.series:
            pair = key[:2]
            known = self.labels.get(pair, ())
            self.labels[pair] = (*known, key[2]) if not known else tuple(sorted((*known, key[2])))
        self.series[key] = series

    def add(self, seen: Observation) -> None:
        """One more row; almost always the newest of its thing."""
        key = (seen.subject, seen.name, seen.label)
        series = self.series.get(key)
        if series is None:
            self._put(key, Series([seen]))
            return
        ats = series.ats
        if seen.at > ats[-1] or (seen.at == ats[-1] and seen.id >= series.rows[-1].id):
            series.rows.append(seen)
            ats.append(seen.at)
        else:
            self.series[key] = Series(sorted((*series.rows, seen), key=_order))

    def drop(self, before: float, lasting: frozenset[str]) -> None:
        """Forget rows older than a moment; of `lasting` names the newest stays in any case."""
        for key, series in list(self.series.items()):
            cut = bisect_left(series.ats, before)
            if key[1] in lasting:
                cut = min(cut, len(series.ats) - 1)
            if cut == len(series.ats):
                del self.series[key]
                left = tuple(one for one in self.labels[key[:2]] if one != key[2])
                self.labels[key[:2]] = left
            elif cut > 0:
                self.series[key] = Series(series.rows[cut:])

    def as_they_are(self) -> "Columns":
        """What is here now: what is added later does not change which series these are."""
        view = Columns()
        view.series = dict(self.series)
        view.labels = dict(self.labels)
        return view


def _order(seen: Observation) -> tuple[float, int]:
    return seen.at, seen.id


__all__ = ["Columns", "Key", "Sample", "Series", "number"]

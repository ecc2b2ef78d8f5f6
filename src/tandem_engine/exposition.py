"""Counters, gauges and histograms, and the Prometheus text they become.

For: what `/metrics` needs and no more: fixed labels per family set, one optional label per sample.
Not for: which metrics there are (`metrics.py`).
"""

import bisect
import threading
from collections.abc import Iterable, Sequence

Extra = tuple[tuple[str, str], ...]


class Family:
    """One metric name with its samples, keyed by the labels beyond the fixed ones."""

    kind = "untyped"

    def __init__(self, name: str, text: str, labels: dict[str, str]) -> None:
        """`labels` are on every sample."""
        self.name, self.text, self.labels = name, text, labels
        self.unlabelled: frozenset[str] = frozenset()
        """Labels that callers give and this page does not show."""
        self._lock = threading.Lock()

    def _key(self, extra: dict[str, str]) -> Extra:
        return tuple(sorted(item for item in extra.items() if item[0] not in self.unlabelled))

    def lines(self) -> Iterable[str]:
        """The samples as text lines."""
        raise NotImplementedError

    def exposed(self) -> str:
        """HELP, TYPE and samples; nothing at all before the first sample."""
        head = f"# HELP {self.name} {self.text}\n# TYPE {self.name} {self.kind}\n"
        lines = "".join(f"{line}\n" for line in self.lines())
        return head + lines if lines else ""

    def _line(self, suffix: str, extra: Extra, value: float) -> str:
        pairs = [*self.labels.items(), *extra]
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs)
        return (
            f"{self.name}{suffix}{{{inside}}} {float(value)!r}"
            if inside
            else (f"{self.name}{suffix} {float(value)!r}")
        )


class Counter(Family):
    """Only grows; from any thread."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: dict[str, str], *, zero: bool = True) -> None:
        """`zero` shows the sample without further labels from the start."""
        super().__init__(name, text, labels)
        self.wired = True
        """Whether anything that is added counts."""
        self._values: dict[Extra, float] = {(): 0.0} if zero else {}

    def add(self, amount: float = 1.0, **extra: str) -> None:
        """Grow by `amount`."""
        if not self.wired:
            return
        key = self._key(extra)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def value(self, **extra: str) -> float:
        """The present value; 0 when never grown."""
        return self._values.get(self._key(extra), 0.0)

    def lines(self) -> Iterable[str]:
        """One line per label set."""
        with self._lock:
            values = list(self._values.items())
        return [self._line("", extra, value) for extra, value in values]


class Gauge(Family):
    """The last value that was written: it does not move by itself."""

    kind = "gauge"

    def __init__(self, name: str, text: str, labels: dict[str, str]) -> None:
        """Not on the page until written."""
        super().__init__(name, text, labels)
        self.value: float | None = None

    def lines(self) -> Iterable[str]:
        """One line; none before the first writing."""
        return [] if self.value is None else [self._line("", (), self.value)]


class Histogram(Family):
    """Observations in cumulative buckets; from any thread."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        text: str,
        labels: dict[str, str],
        bounds: Sequence[float],
    ) -> None:
        """`bounds` are the upper bounds, ascending, without infinity."""
        super().__init__(name, text, labels)
        self._bounds = list(bounds)
        self._cells: dict[Extra, list[int]] = {}
        self._sums: dict[Extra, float] = {}

    def observe(self, value: float, **extra: str) -> None:
        """Take one observation."""
        key = self._key(extra)
        with self._lock:
            cells = self._cells.setdefault(key, [0] * (len(self._bounds) + 1))
            cells[bisect.bisect_left(self._bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def lines(self) -> Iterable[str]:
        """Buckets, sum and count per label set."""
        with self._lock:
            snapshot = [(key, list(cells), self._sums[key]) for key, cells in self._cells.items()]
        lines: list[str] = []
        for key, cells, total in snapshot:
            running = 0
            for bound, count in zip(
                [*map(repr, map(float, self._bounds)), "+Inf"], cells, strict=True
            ):
                running += count
                lines.append(self._line("_bucket", (*key, ("le", bound)), running))
            lines += [self._line("_sum", key, total), self._line("_count", key, running)]
        return lines


class Registry:
    """Families under one prefix, in the order they are declared."""

    def __init__(
        self,
        prefix: str,
        *,
        hidden: frozenset[str] = frozenset(),
        unlabelled: frozenset[str] = frozenset(),
    ) -> None:
        """`hidden` families are counted and not shown, `unlabelled` labels are not shown."""
        self._prefix, self._hidden, self._unlabelled = prefix, hidden, unlabelled
        self.families: list[Family] = []

    def counter(
        self, name: str, text: str, labels: dict[str, str], *, zero: bool = True
    ) -> Counter:
        """Declare a counter."""
        family = Counter(self._prefix + name, text, labels, zero=zero)
        self._declare(name, family)
        return family

    def gauge(self, name: str, text: str, labels: dict[str, str], *, always: bool = False) -> Gauge:
        """Declare a gauge; `always` shows it even where its name is hidden."""
        family = Gauge(self._prefix + name, text, labels)
        self._declare(name, family, always=always)
        return family

    def histogram(
        self, name: str, text: str, labels: dict[str, str], bounds: Sequence[float]
    ) -> Histogram:
        """Declare a histogram."""
        family = Histogram(self._prefix + name, text, labels, bounds)
        self._declare(name, family)
        return family

    def _declare(self, name: str, family: Family, *, always: bool = False) -> None:
        family.unlabelled = self._unlabelled
        if always or name not in self._hidden:
            self.families.append(family)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

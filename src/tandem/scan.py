"""The selective scanner of Prometheus text pages: only the wanted samples, and never an exception.

For: reading a handful of series from pages of hundreds of kilobytes once a second (adapters).
Not for: judging a page; what cannot be read is left out. The official `prometheus_client` parsers
are the oracle in the tests. Both text formats are understood (an exemplar is ignored).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

LABEL_SETS_MAX = 4096
"""Parsed label sets remembered between pages; they repeat from scrape to scrape."""
LABEL_SET_BYTES_MAX = 2048
"""A longer one is parsed anew each time: what is remembered stays within 8 MB a scanner."""

_LABEL = re.compile(
    rb'[ \t,]*"?([^\s"{}=,]+)"?[ \t]*=[ \t]*"([^"\\\n]*+(?:\\.[^"\\\n]*+)*+)"[ \t]*(?=[,}])'
)
_LABELS_END = re.compile(rb"[ \t,]*\}")
_ESCAPE = re.compile(r'\\([\\n"])')
_NAME = re.compile(rb"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)")
_PART = re.compile(r"_(?:bucket|sum|count|total|created)$")


class Sample(NamedTuple):
    """One line of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Scanner:
    """Finds the samples of the wanted names; made once, used for every page.

    Names are those on the lines themselves: `x_sum`, `x_count`, `x_bucket` for a histogram `x`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Compile one expression for all names; they must be legal Prometheus names."""
        words = sorted({name.encode() for name in names})
        self._line = re.compile(
            rb"\n[ \t]*(" + (_trie(words) if words else rb"(?!)") + rb")(?=[{ \t])([^\n]*)(?=\n)"
        )
        self._known: dict[bytes, tuple[dict[str, str], int]] = {}

    def scan(self, page: bytes) -> list[Sample]:
        """The wanted samples in the page's order.

        A line without its line feed is left out: a page cut there would show a wrong number.
        """
        found: list[Sample] = []
        for name, rest in self._line.findall(b"\n" + page):
            read = self._read(rest)
            if read is not None:
                found.append(Sample(name.decode(), *read))
        return found

    def scan_cut(self, page: bytes) -> list[Sample]:
        """The wanted samples of a page that goes on beyond these bytes.

        The family in which it ends is left out whole: a sum over some of its samples would be a
        wrong number. Where a family stands in two places only its end is known to be missing.
        """
        whole = page[: page.rfind(b"\n") + 1]
        families = {
            _family(line) for line in (whole.rstrip(b"\n").rpartition(b"\n")[2], page[len(whole) :])
        }
        return [one for one in self.scan(whole) if _PART.sub("", one.name) not in families]

    def scan_page(self, page: bytes, *, cut: bool = False) -> tuple[list[Sample], str]:
        """The wanted samples, and why others may be missing; empty when the page is whole.

        `cut` says that the page goes on beyond these bytes.
        """
        if cut:
            why = f"the metrics page is longer than {len(page)} bytes and was read no further"
        elif page and not page.endswith(b"\n"):
            why = "the metrics page ends in the middle of a line"
        else:
            return self.scan(page), ""
        return self.scan_cut(page), why

    def _read(self, rest: bytes) -> tuple[Mapping[str, str], float] | None:
        """Labels and value of what follows the name; None when the line says neither."""
        labels: Mapping[str, str] = {}
        at = 0
        opening = rest.lstrip(b" \t")
        if opening.startswith(b"{"):
            parsed = self._labels(opening)
            if parsed is None:
                return None
            labels, at = parsed
        words = opening[at:].split(None, 1)
        if not words or b"_" in words[0]:
            return None
        try:
            return labels, float(words[0])
        except ValueError:
            return None

    def _labels(self, text: bytes) -> tuple[dict[str, str], int] | None:
        """The label set at the start of `text` and where it ends."""
        # Up to the last brace of the line: the same from scrape to scrape, exemplars apart.
        key = text[: text.rfind(b"}") + 1]
        known = self._known.get(key)
        if known is None:
            known = _parse_labels(text)
            if known is None:
                return None
            if len(key) <= LABEL_SET_BYTES_MAX:
                if len(self._known) >= LABEL_SETS_MAX:
                    self._known.clear()
                self._known[key] = known
        return known


def _family(line: bytes) -> str:
    """The family a line speaks of; empty when it is a comment or nothing."""
    name = _NAME.match(line)
    return "" if name is None else _PART.sub("", name[1].decode())


def _parse_labels(text: bytes) -> tuple[dict[str, str], int] | None:
    labels: dict[str, str] = {}
    at = 1
    while (match := _LABEL.match(text, at)) is not None:
        name = match[1].decode(errors="replace")
        if name in labels:
            return None
        value = match[2].decode(errors="replace")
        labels[name] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        at = match.end()
    end = _LABELS_END.match(text, at)
    return None if end is None else (labels, end.end())


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _trie(words: list[bytes]) -> bytes:
    """An expression for any of the sorted words that tries each first byte once."""
    branches: dict[int, list[bytes]] = defaultdict(list)
    ends = False
    for word in words:
        if word:
            branches[word[0]].append(word[1:])
        else:
            ends = True
    options = [re.escape(bytes([first])) + _trie(rest) for first, rest in branches.items()]
    if not options:
        return b""
    tail = options[0] if len(options) == 1 else b"(?:" + b"|".join(options) + b")"
    return b"(?:" + tail + b")?" if ends else tail


def total(samples: Iterable[Sample], name: str) -> float | None:
    """What a name counts over a whole engine, from the finite samples of all its ranks, or None.

    Ranks of one data-parallel group work on the same requests, so the highest of them counts;
    groups and all other labels add up. Where a `priority` label splits a gauge, the empty one is
    its total (SGLang's `metrics_collector.py`).
    """
    ours = [one for one in samples if one.name == name and math.isfinite(one.value)]
    if any(sample.labels.get("priority") == "" for sample in ours):
        ours = [sample for sample in ours if sample.labels.get("priority") == ""]
    groups: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in ours:
        group = tuple(
            sorted(item for item in sample.labels.items() if item[0] not in _SAME_WORK_LABELS)
        )
        groups[group] = max(groups.get(group, sample.value), sample.value)
    return sum(groups.values()) if groups else None


_SAME_WORK_LABELS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"})


def quantile(samples: Iterable[Sample], name: str, share: float) -> float | None:
    """The value below which `share` of a histogram's observations lie, within its buckets.

    `name` is the histogram's own; interpolated within a bucket, the last finite bound when it lies
    above all of them, None when nothing was observed.
    """
    bounds: dict[float, float] = defaultdict(float)
    for sample in samples:
        if sample.name == f"{name}_bucket" and math.isfinite(sample.value):
            try:
                bounds[float(sample.labels["le"])] += sample.value
            except (KeyError, ValueError):
                continue
    ordered = sorted(bounds.items())
    if not ordered or not ordered[-1][1] > 0:
        return None
    wanted = share * ordered[-1][1]
    below_bound, below_count = 0.0, 0.0
    for bound, count in ordered:
        if count >= wanted:
            if bound == float("inf"):
                return below_bound
            step = count - below_count
            part = (wanted - below_count) / step if step > 0 else 1.0
            return below_bound + (bound - below_bound) * part
        below_bound, below_count = bound, count
    return below_bound


__all__ = ["Sample", "Scanner", "quantile", "total"]

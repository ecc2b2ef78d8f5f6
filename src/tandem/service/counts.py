"""What a watch counts of itself, and how that reads as metrics.

Every label comes from a short list of our own; a word that is not on it is `other`, so that the
page stays as small for two thousand members as for two.

For: numbers of this process and of its store. Not for: the deployment's own metrics, which its
members serve themselves.
"""

import resource
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import psutil

from tandem import __version__
from tandem.collect import PATIENCE_S
from tandem.parts import Looks, Turn
from tandem.ports import Harvest
from tandem.records import Incident, Observation
from tandem.records import vocabulary as v
from tandem.records.finding import KINDS
from tandem.service.exposition import Family, Point, one, several

KINDS_MAX = 32
"""Words one label may have, beyond which they are `other`."""
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PROBES = ("completed", "failed", "late", "off", "stuck", "unproven")
"""Words that are shown as zero before the first: a rule can then see them rise."""
SUBJECTS_MAX = 100_000
"""Paths whose probes are added up; beyond them they are not counted."""
_WATCH = "tandem_watch"
STATES: tuple[str, ...] = get_args(Incident.__annotations__["state"])


class Counts:
    """The numbers of one watch since it began."""

    def __init__(self, deployment: str, began_at: float) -> None:
        """Everything is zero."""
        self.deployment = deployment
        self.began_at = began_at
        self.turns = 0
        self.broken = 0
        self.last_turn_at = 0.0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.observations = 0
        self.missing = 0
        self.probes: dict[str, int] = {}
        self.probe_tokens: dict[str, int] = {}
        self.probe_looks: Counter[str] = Counter()
        self.failed_sources: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.actionable: Counter[str] = Counter()

    def looked(self, harvest: Harvest) -> None:
        """Count what one look brought."""
        self.observations += len(harvest.observations)
        for seen in harvest.observations:
            if seen.missing is not None:
                self.missing += 1
            if seen.name == v.PROBE and isinstance(seen.value, str):
                self.probe_looks[known(seen.value, self.probe_looks)] += 1
            elif seen.name == v.PROBES_SENT_TOTAL:
                _keep(self.probes, seen)
            elif seen.name == v.PROBE_TOKENS_TOTAL:
                _keep(self.probe_tokens, seen)
            elif seen.name == v.SOURCE_FAILED:
                kind = seen.label.partition(":")[0]
                self.failed_sources[known(kind, self.failed_sources)] += 1

    def turned(self, turn: Turn) -> None:
        """Count a turn that ended; one that broke saw nothing, so it is no sign of life."""
        self.turns += 1
        if turn.looked:
            self.last_turn_at = turn.ended_at
        else:
            self.broken += 1
        self.seconds += turn.seconds
        self.buckets[bisect_left(BUCKETS_S, turn.seconds)] += 1
        self.open, self.actionable = Counter(), Counter()
        for finding in turn.findings:
            kind = known(finding.kind, self.open)
            self.open[kind] += 1
            self.actionable[kind] += finding.actionable

    def families(self, *, store_bytes: int, incidents: Mapping[str, int]) -> list[Family]:
        """Everything as metrics; what is not counted here is given."""
        about = {"version": __version__, "deployment": self.deployment}
        return [
            Family(_WATCH, "info", "Which Tandem watches what.", (Point("_info", about, 1),)),
            *self._of_turns(),
            *self._of_what_was_seen(incidents),
            one(f"{_WATCH}_store_bytes", "gauge", "Size of the rolling store.", store_bytes),
            *self._of_the_process(),
        ]

    def _of_turns(self) -> Iterator[Family]:
        yield one(f"{_WATCH}_turns", "counter", "Turns of the loop that ended.", self.turns)
        yield one(f"{_WATCH}_turns_broken", "counter", "Turns that saw nothing.", self.broken)
        yield self._turn_seconds(f"{_WATCH}_turn_seconds")
        about = "When a turn last looked and judged; 0 before the first."
        name = f"{_WATCH}_last_turn_timestamp_seconds"
        yield one(name, "gauge", about, self.last_turn_at)

    def _of_what_was_seen(self, incidents: Mapping[str, int]) -> Iterator[Family]:
        about = "What was seen, or missed."
        yield one(f"{_WATCH}_observations", "counter", about, self.observations)
        about = "Observations that say why nothing was seen."
        yield one(f"{_WATCH}_observations_missing", "counter", about, self.missing)
        given: dict[str, float] = {**dict.fromkeys(KINDS, 0), **self.open}
        about = "Findings that stand, by kind."
        yield several(f"{_WATCH}_findings_open", "gauge", about, "kind", given)
        given = {**dict.fromkeys(KINDS, 0), **self.actionable}
        about = "Those of them that open an incident."
        yield several(f"{_WATCH}_findings_actionable", "gauge", about, "kind", given)
        given = {**dict.fromkeys(STATES, 0), **incidents}
        about = "Incident folders kept, by state."
        yield several(f"{_WATCH}_incidents", "gauge", about, "state", given)
        sent, tokens = sum(self.probes.values()), sum(self.probe_tokens.values())
        yield one(f"{_WATCH}_probes", "counter", "Path probes sent.", sent)
        yield one(f"{_WATCH}_probe_tokens", "counter", "Tokens they asked for.", tokens)
        given = {**dict.fromkeys(PROBES, 0), **self.probe_looks}
        about = "What looks at the probes saw of them."
        yield several(f"{_WATCH}_probe_looks", "counter", about, "result", given)
        given = {**self.failed_sources}
        about = "Looks that hung or broke, by kind of source."
        yield several(f"{_WATCH}_sources_failed", "counter", about, "source", given)

    def _of_the_process(self) -> Iterator[Family]:
        """By the names that every process uses."""
        rss_bytes = psutil.Process().memory_info().rss
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        spent_s = round(sum(use.ru_utime + use.ru_stime for use in uses), 3)
        yield one("process_resident_memory_bytes", "gauge", "Memory of this watch.", rss_bytes)
        yield one("process_cpu_seconds", "counter", "CPU time, children included.", spent_s)
        yield one("process_start_time_seconds", "gauge", "When it began.", self.began_at)

    def _turn_seconds(self, name: str) -> Family:
        points, count = [], 0
        for bound, inside in zip((*BUCKETS_S, float("inf")), self.buckets, strict=True):
            count += inside
            label = "+Inf" if bound == float("inf") else str(bound)
            points.append(Point("_bucket", {"le": label}, count))
        points.append(Point("_sum", {}, round(self.seconds, 6)))
        points.append(Point("_count", {}, count))
        return Family(name, "histogram", "How long a turn takes.", points)


class Counted:
    """A collector whose every look is counted."""

    def __init__(self, inner: Looks, counts: Counts) -> None:
        """`inner` does the looking."""
        self._inner = inner
        self._counts = counts

    async def tick(self, patience_s: float = PATIENCE_S) -> Harvest:
        """Look once, and count."""
        harvest = await self._inner.tick(patience_s)
        self._counts.looked(harvest)
        return harvest


def _keep(totals: dict[str, int], seen: Observation) -> None:
    """Keep the newest total of one path."""
    if isinstance(seen.value, int | float) and (
        seen.subject in totals or len(totals) < SUBJECTS_MAX
    ):
        totals[seen.subject] = int(seen.value)


def known(word: str, so_far: Mapping[str, int]) -> str:
    """The word as a label, or `other` when there are too many already."""
    return word if word in so_far or len(so_far) < KINDS_MAX else "other"


def store_size(folder: Path) -> int:
    """Bytes of the rolling store with its log; 0 for what is not there."""
    total = 0
    for name in ("state.sqlite", "state.sqlite-wal", "state.sqlite-shm"):
        path = folder / name
        total += path.stat().st_size if path.exists() else 0
    return total


__all__ = ["Counted", "Counts", "store_size"]

"""The window through which judgement sees the world: observations, changes and traits, indexed.

For: asking simple questions of sealed or rolling data (what was last seen, how long has it been
flat, what never reached zero). Not for: judging, I/O, or the time of day: `now` is given.
"""

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from tandem.records import Change, Deployment, Incarnation, Observation, Trait
from tandem.records import vocabulary as v
from tandem.series import Columns, Key, Sample, Series, number

P = ParamSpec("P")
T = TypeVar("T")


class Reading(NamedTuple):
    """An answer with the observation ids it rests on."""

    value: float
    evidence: tuple[int, ...]


class Facts:
    """Everything known in one window, ready to be asked.

    Observations may come in any order; they are kept by (subject, name, label), oldest first.
    """

    def __init__(
        self,
        deployment: Deployment,
        observations: Iterable[Observation],
        *,
        now: float,
        changes: Iterable[Change] = (),
        traits: Iterable[Trait] = (),
    ) -> None:
        """Index the records; `now` is unix seconds, the moment judgement speaks of."""
        self.deployment = deployment
        self.now = now
        self.changes = tuple(sorted(changes, key=lambda change: (change.at, change.id)))
        self.traits = tuple(traits)
        self.answered: dict[Hashable, object] = {}
        """What was asked by way of `once`: these facts never change, so neither do the answers."""
        self._columns = Columns(observations)
        self._by_id: dict[int, Observation] | None = None
        self._since = float("-inf")
        self._until = float("inf")
        self._newest_id: float = float("inf")
        self._lasting: frozenset[str] = frozenset()

    @classmethod
    def over(
        cls,
        deployment: Deployment,
        columns: Columns,
        *,
        now: float,
        since: float,
        newest_id: int,
        lasting: frozenset[str] = frozenset(),
        changes: Iterable[Change] = (),
        traits: Iterable[Trait] = (),
    ) -> "Facts":
        """The facts of a window that moves on: rows at or after `since`, ids up to `newest_id`.

        Of `lasting` names the newest row counts however old it is. The same answers as from those
        rows given one by one, at the cost of what is asked; what is added later is not seen.
        """
        facts = cls(deployment, (), now=now, changes=changes, traits=traits)
        facts.__bound(columns.as_they_are(), since, float("inf"), newest_id, lasting)
        return facts

    def __bound(
        self,
        columns: Columns,
        since: float,
        until: float,
        newest_id: float,
        lasting: frozenset[str],
    ) -> None:
        self._columns = columns
        self._since, self._until = since, until
        self._newest_id, self._lasting = newest_id, lasting

    def at(self, moment: float) -> "Facts":
        """The same facts as they stood at an earlier moment: nothing later is seen."""
        changes = [change for change in self.changes if change.at <= moment]
        view = Facts(self.deployment, (), now=moment, changes=changes, traits=self.traits)
        view.__bound(self._columns, self._since, moment, self._newest_id, self._lasting)
        return view

    def _series(self, key: Key) -> Series | None:
        """The rows of one thing without those that came after this window was taken."""
        series = self._columns.series.get(key)
        if series is None or series.rows[-1].id <= self._newest_id:
            return series
        kept = [seen for seen in series.rows if seen.id <= self._newest_id]
        return Series(kept) if kept else None

    def _first(self, key: Key, series: Series) -> int:
        """Where this window begins in the rows of one thing; past their end when it has none."""
        ats = series.ats
        if ats[0] >= self._since:
            return 0
        first = bisect_left(ats, self._since)
        return first - 1 if first == len(ats) and key[1] in self._lasting else first

    def rows(self, subject: str, name: str, label: str = "") -> list[Observation]:
        """Every observation of one thing, oldest first, those that saw nothing included."""
        key = (subject, name, label)
        series = self._series(key)
        if series is None:
            return []
        first = self._first(key, series)
        if series.ats[-1] <= self._until:
            return series.rows[first:]
        return series.rows[first : bisect_right(series.ats, self._until)]

    def labels(self, subject: str, name: str) -> tuple[str, ...]:
        """The labels under which a name was observed of a subject, sorted."""
        known = self._columns.labels.get((subject, name), ())
        return tuple([label for label in known if self._has((subject, name, label))])

    def subjects(self, name: str) -> tuple[str, ...]:
        """Every subject of which a name was observed, sorted."""
        pairs = [pair for pair in self._columns.labels if pair[1] == name]
        return tuple(sorted({pair[0] for pair in pairs if self.labels(*pair)}))

    def _has(self, key: Key) -> bool:
        series = self._series(key)
        if series is None:
            return False
        return series.ats[-1] >= self._since or key[1] in self._lasting

    def last(self, subject: str, name: str, label: str = "") -> Observation | None:
        """The newest observation of a thing, even when it saw nothing."""
        key = (subject, name, label)
        series = self._series(key)
        if series is None:
            return None
        end = len(series.ats)
        if series.ats[-1] > self._until:
            end = bisect_right(series.ats, self._until)
        return series.rows[end - 1] if end > self._first(key, series) else None

    def latest(self, subject: str, name: str, label: str = "") -> Observation | None:
        """The newest observation that has a value."""
        seen = self.last(subject, name, label)
        if seen is None or seen.missing is None:
            return seen
        rows = self.rows(subject, name, label)
        return next((seen for seen in reversed(rows) if seen.missing is None), None)

    def numbers(
        self,
        subject: str,
        name: str,
        label: str = "",
        *,
        since: float | None = None,
        source: str | None = None,
    ) -> list[Sample]:
        """The numeric samples of a thing at or after `since`, oldest first.

        `source` keeps those of one collector: a gauge by `loads` is live, one by `metrics` may be
        frozen (sglang-pd-protocol, freshness of gauges).
        """
        key = (subject, name, label)
        series = self._series(key)
        if series is None:
            return []
        samples = series.numbers(source)
        if not samples:
            return []
        first = self._first(key, series)
        begin = series.ats[first] if first < len(series.ats) else math.inf
        if begin < self._since:
            # The one row that lasts, and none that was seen in the same look before it.
            samples = [one for one in samples[-1:] if one.id == series.rows[first].id]
        if since is not None and since > begin:
            begin = since
        if begin > series.ats[0]:
            samples = samples[bisect_left(samples, (begin,)) :]
        if samples and samples[-1].at > self._until:
            samples = samples[: bisect_left(samples, (math.nextafter(self._until, math.inf),))]
        return samples

    def floor(self, subject: str, name: str, label: str = "", *, window_s: float) -> Reading | None:
        """The lowest number over the last `window_s`; None when the window is not covered.

        Covered means: a sample at least as old as the window's start, none older than half of it
        at its end, and at least three samples inside.
        """
        start = self.now - window_s
        samples = self.numbers(subject, name, label)
        before = [sample for sample in samples if sample.at <= start]
        inside = [sample for sample in samples if start < sample.at <= self.now]
        if not before or len(inside) < 3 or self.now - inside[-1].at > window_s / 2:
            return None
        over = [before[-1], *inside]
        lowest = min(over, key=lambda sample: sample.value)
        return Reading(lowest.value, (over[0].id, lowest.id, over[-1].id))

    def flat_for(self, subject: str, name: str, label: str = "") -> Reading | None:
        """Seconds for which a number has not changed, up to `now`; None with fewer than 2 samples.

        Only as far as samples reach: a counter last seen 30 s ago says nothing of those 30 s, so
        the time counted ends at its last sample.
        """
        samples = self.numbers(subject, name, label)
        if len(samples) < 2:
            return None
        first_equal = self.changed(subject, name, label) or samples[-1]
        return Reading(samples[-1].at - first_equal.at, (first_equal.id, samples[-1].id))

    def changed(
        self, subject: str, name: str, label: str = "", *, source: str | None = None
    ) -> Sample | None:
        """The look at which a number took the value that it still had when last seen.

        That is since when a gauge reads as it does. The oldest sample when it never changed since;
        None when it was never seen. That it stands still says nothing where it may be frozen.
        """
        samples = self.numbers(subject, name, label, source=source)
        found = samples[-1] if samples else None
        for sample in reversed(samples):
            if sample.value != samples[-1].value:
                break
            found = sample
        return found

    def growth(
        self, subject: str, name: str, label: str = "", *, since: float | None = None
    ) -> Reading | None:
        """How much a counter grew since a time, restarts (resets to lower values) respected.

        None with fewer than 2 samples: nothing can be said of growth.
        """
        samples = self.numbers(subject, name, label, since=since)
        if len(samples) < 2:
            return None
        total = sum(
            later.value - earlier.value if later.value >= earlier.value else later.value
            for earlier, later in itertools.pairwise(samples)
        )
        return Reading(total, (samples[0].id, samples[-1].id))

    def observation(self, cited: int) -> Observation | None:
        """The observation of one id, as evidence lists cite it; None when it is not in here."""
        if self._by_id is None:
            self._by_id = {
                seen.id: seen
                for key, series in self._columns.series.items()
                for seen in series.rows[self._first(key, series) :]
                if seen.id <= self._newest_id
            }
        return self._by_id.get(cited)

    def incarnation(self, member: str) -> Incarnation | None:
        """The member's present life as last observed by the process collector."""
        started = self.latest(member, v.STARTED_AT)
        begun = None if started is None else number(started.value)
        if started is None or begun is None or started.incarnation is None:
            return None
        pid = self.latest(member, v.PID)
        pid_number = None if pid is None else number(pid.value)
        return Incarnation(
            id=started.incarnation,
            started_at=begun,
            pid=None if pid_number is None else int(pid_number),
        )

    def changes_of(
        self, subject: str, kind: str | None = None, *, since: float | None = None
    ) -> tuple[Change, ...]:
        """Ledger rows of one subject, oldest first."""
        start = float("-inf") if since is None else since
        return tuple(
            change
            for change in self.changes
            if change.subject == subject
            and change.at >= start
            and (kind is None or change.kind == kind)
        )

    def trait(self, subject: str, name: str, label: str = "") -> Trait | None:
        """The newest trait of a subject, or of the whole deployment (`*`)."""
        found = [
            trait
            for trait in self.traits
            if trait.name == name and trait.label == label and trait.subject in (subject, "*")
        ]
        return max(found, key=lambda trait: (trait.subject != "*", trait.at), default=None)

    def without(self, *names: str) -> "Facts":
        """The same facts with some observation names removed: for asking what they decided."""
        view = Facts(self.deployment, (), now=self.now, changes=self.changes, traits=self.traits)
        columns = self._columns.as_they_are()
        columns.series = {
            key: series for key, series in columns.series.items() if key[1] not in names
        }
        columns.labels = {
            pair: labels for pair, labels in columns.labels.items() if pair[1] not in names
        }
        view.__bound(columns, self._since, self._until, self._newest_id, self._lasting)
        return view


def once(question: Callable[Concatenate[Facts, P], T]) -> Callable[Concatenate[Facts, P], T]:
    """A question that several rules ask of the same facts: answered once, then remembered there.

    The question must be pure, what is asked about hashable, and the answer never changed.
    """

    @functools.wraps(question)
    def asked(facts: Facts, *about: P.args, **named: P.kwargs) -> T:
        if named:
            return question(facts, *about, **named)
        key = (question, about)
        known = facts.answered.get(key, facts)
        if known is facts:
            known = facts.answered[key] = question(facts, *about, **named)
        return cast("T", known)

    return cast("Callable[Concatenate[Facts, P], T]", asked)


__all__ = ["Facts", "Key", "Reading", "Sample", "once"]

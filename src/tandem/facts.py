"""The window through which judgement sees the world: observations, changes and traits, indexed.

For: asking simple questions of sealed or rolling data (what was last seen, how long has it been
flat, what never reached zero). Not for: judging, I/O, or the time of day: `now` is given.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tandem.records import Change, Deployment, Incarnation, Observation, Trait, Value
from tandem.records import vocabulary as v

Key = tuple[str, str, str]


class Sample(NamedTuple):
    """One number seen at one time, and the observation that holds it."""

    at: float
    value: float
    id: int


class Reading(NamedTuple):
    """An answer with the observation ids it rests on."""

    value: float
    evidence: tuple[int, ...]


def _when(sample: Sample) -> float:
    return sample.at


def _number(value: Value) -> float | None:
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, int | float) else None


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
        index: dict[Key, list[Observation]] = defaultdict(list)
        for seen in observations:
            index[seen.subject, seen.name, seen.label].append(seen)
        for rows in index.values():
            rows.sort(key=lambda seen: (seen.at, seen.id))
        self._index = dict(index)
        self._by_id: dict[int, Observation] | None = None
        self._numbers: dict[tuple[Key, str | None], list[Sample]] = {}
        self._until = float("inf")

    def at(self, moment: float) -> "Facts":
        """The same facts as they stood at an earlier moment: nothing later is seen."""
        view = Facts(self.deployment, (), now=moment, traits=self.traits)
        view.changes = tuple(change for change in self.changes if change.at <= moment)
        view._index = self._index
        view._numbers = self._numbers
        view._until = moment
        return view

    def rows(self, subject: str, name: str, label: str = "") -> list[Observation]:
        """Every observation of one thing, oldest first, those that saw nothing included."""
        rows = self._index.get((subject, name, label), [])
        if not rows or rows[-1].at <= self._until:
            return rows
        return rows[: bisect_right(rows, self._until, key=lambda seen: seen.at)]

    def labels(self, subject: str, name: str) -> tuple[str, ...]:
        """The labels under which a name was observed of a subject, sorted."""
        found = {label for (who, what, label) in self._index if (who, what) == (subject, name)}
        return tuple(sorted(found))

    def subjects(self, name: str) -> tuple[str, ...]:
        """Every subject of which a name was observed, sorted."""
        return tuple(sorted({who for (who, what, _) in self._index if what == name}))

    def last(self, subject: str, name: str, label: str = "") -> Observation | None:
        """The newest observation of a thing, even when it saw nothing."""
        rows = self.rows(subject, name, label)
        return rows[-1] if rows else None

    def latest(self, subject: str, name: str, label: str = "") -> Observation | None:
        """The newest observation that has a value."""
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
        key = ((subject, name, label), source)
        samples = self._numbers.get(key)
        if samples is None:
            samples = [
                Sample(seen.at, number, seen.id)
                for seen in self._index.get(key[0], ())
                if source in (None, seen.source) and (number := _number(seen.value)) is not None
            ]
            self._numbers[key] = samples
        first = 0 if since is None else bisect_left(samples, since, key=_when)
        return samples[first : bisect_right(samples, self._until, key=_when)]

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
            self._by_id = {seen.id: seen for rows in self._index.values() for seen in rows}
        return self._by_id.get(cited)

    def incarnation(self, member: str) -> Incarnation | None:
        """The member's present life as last observed by the process collector."""
        started = self.latest(member, v.STARTED_AT)
        number = None if started is None else _number(started.value)
        if started is None or number is None or started.incarnation is None:
            return None
        pid = self.latest(member, v.PID)
        pid_number = None if pid is None else _number(pid.value)
        return Incarnation(
            id=started.incarnation,
            started_at=number,
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
        view._until = self._until
        view._index = {key: rows for key, rows in self._index.items() if key[1] not in names}
        return view

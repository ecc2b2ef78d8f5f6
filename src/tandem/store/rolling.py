"""The store: what every process of one deployment remembers together.

For: appending what was collected (redacted before it is first written), answering with `Facts`, and
everything an incident leaves behind. Not for: judging any of it.
"""

import contextlib
import math
import threading
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from tandem.errors import WorldError
from tandem.facts import Facts, Key
from tandem.ports import Harvest
from tandem.records import (
    STATE_FOLDER,
    Change,
    Event,
    Finding,
    Incident,
    Observation,
    Record,
    Seal,
    Settings,
    Trait,
    Value,
)
from tandem.store import incidents, locks, redact
from tandem.store.journal import StoreJournal
from tandem.store.seal import seal
from tandem.store.state import SLOW, State, told
from tandem.store.window import WINDOW_S, Window

AGAIN_SHARE = 0.25

R = TypeVar("R", bound=Record)

PRUNE_EVERY_S = 30.0
PRUNE_ROWS = 20_000
"""Observations deleted at most per pruning: more than 30 s bring, little enough to go unnoticed."""
ONCE_A_LIFE = frozenset({"restart", "start", "stop", "flag", "env"})
"""Changes that happen to one thing once in an incarnation: a second witness adds no row."""


class Store:
    """The rolling state of one deployment, its incidents and its locks.

    Any number of processes may have one open on the same folder. Not shared between event loops;
    calls from several threads take turns.
    """

    def __init__(self, root: Path, settings: Settings) -> None:
        """Use `Store.open`."""
        self.state_folder = root / STATE_FOLDER
        self.incidents_folder = self.state_folder / incidents.FOLDER
        self.settings = settings
        self._state = State(self.state_folder / "state.sqlite")
        self._turn = threading.RLock()
        self._window: Window | None = None
        self.slow: dict[Key, Observation] = {}
        self.traits: dict[Key, Trait] = {}
        self.changes: list[Change] = []
        self._seen = -1
        """The newest id that these and the window know of; -1 before the first look."""
        self._pruned_at: float | None = None
        self._afresh_at = float("-inf")
        """When a clock was last set back: what is asked every second begins there."""

    @classmethod
    def open(cls, root: Path, settings: Settings) -> Self:
        """Open or create `.tandem/` beside `tandem.toml`; only its owner may look inside.

        Raises `WorldError` when the disk refuses, `RefusedError` for a schema it does not know.
        """
        folder = root / STATE_FOLDER
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WorldError(
                f"{folder} cannot be made: {error.strerror}.",
                next_step=f"Let this user write in {root}.",
            ) from None
        return cls(root, settings)

    def close(self) -> None:
        """Let go of the files."""
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What was collected.

    def append(self, harvest: Harvest) -> Harvest:
        """Redact, number and remember; returns the records as the store now holds them.

        What changes slowly and has not changed since comes back as the row already known.
        Observations that may not be kept at all (a variable outside the allowlist) are missing.
        Raises `WorldError` when the disk refuses; nothing of the harvest is kept then.
        """
        also = self.settings.evidence.environment
        seen = [kept for each in harvest.observations if (kept := _kept(each, also)) is not None]
        with self._turn, told(self._state.path, "appending"):
            with self._state.transaction():
                self._catch_up()
                count = len(seen) + len(harvest.traits) + len(harvest.changes)
                batch = _Batch(self, self._state.ids(count))
                stored = Harvest(
                    observations=tuple(batch.observation(each) for each in seen),
                    traits=tuple(batch.trait(redact.trait(each)) for each in harvest.traits),
                    changes=tuple(batch.change(redact.change(c, also)) for c in harvest.changes),
                )
                batch.write(self._state)
                self._prune(seen)
            self._remember(batch.observations, batch.traits, batch.changes)
        return stored

    def facts(self, *, now: float, window_s: float) -> Facts:
        """What was seen in the `window_s` seconds before `now`, ready to be asked.

        Beside the window: the whole ledger of `keep_hours`, every trait, and the newest command
        line, variable, server argument, pid and start of everything, however old. At most
        `WINDOW_S` seconds are answered from memory; a wider window is read from the file.
        """
        since = now - window_s
        if window_s <= WINDOW_S:
            since = max(since, self._afresh_at)
        with self._turn, told(self._state.path, "reading"), self._state.reading():
            self._catch_up()
            ledger_since = now - self.settings.watch.keep_hours * 3600
            changes = [change for change in self.changes if change.at >= ledger_since]
            if window_s > WINDOW_S:
                rows = [seen for seen in self.slow.values() if seen.at < since]
                rows += self._state.observations(since=since)
                return Facts(
                    self.settings.deployment,
                    rows,
                    now=now,
                    changes=changes,
                    traits=self.traits.values(),
                )
            if self._window is None or since < self._window.since:
                start = now - WINDOW_S
                rows = [seen for seen in self.slow.values() if seen.at < start]
                self._window = Window(start, rows + self._state.observations(since=start))
            return Facts.over(
                self.settings.deployment,
                self._window.columns,
                now=now,
                since=since,
                newest_id=self._seen,
                lasting=SLOW,
                changes=changes,
                traits=self.traits.values(),
            )

    def _catch_up(self) -> None:
        """Learn what other processes appended; call inside a transaction."""
        last = self._state.last_id()
        if last == self._seen:
            return
        if self._seen < 0:
            slow = self._state.latest_slow()
        else:
            slow = self._state.newer_observations(self._seen)
        traits, changes = self._state.latest_traits(self._seen), self._state.changes(self._seen)
        self._remember(slow, traits, changes)
        self._seen = last

    def _remember(
        self, rows: list[Observation], traits: list[Trait], changes: list[Change]
    ) -> None:
        self.slow |= {slow_key(seen): seen for seen in rows if seen.name in SLOW}
        self.traits |= {(each.subject, each.name, each.label): each for each in traits}
        self.changes += changes
        if self._window is not None:
            self._window.add(rows)
        self._seen = max(
            self._seen, *(each.id for group in (rows, traits, changes) for each in group[-1:]), 0
        )

    def _prune(self, seen: list[Observation]) -> None:
        """Forget what is past its time; by the time observed, so that a virtual clock works too."""
        if not seen:
            return
        now = max(each.at for each in seen)
        if self._pruned_at is not None and now < self._pruned_at + PRUNE_EVERY_S:
            return
        self._pruned_at = now
        keep_s = self.settings.watch.keep_hours * 3600
        self._state.prune(
            before=now - self.settings.evidence.window_s,
            slow_before=now - keep_s,
            limit=PRUNE_ROWS,
        )
        self.changes = [change for change in self.changes if change.at >= now - keep_s]

    # What happened, and what was found.

    def event(
        self, kind: str, text: str, *, at: float, data: Mapping[str, Value] | None = None
    ) -> Event:
        """Tell one sentence to whoever follows `events`."""
        told_event = redact.event(Event(at=at, kind=kind, text=text, data=dict(data or {})))
        with self._turn, told(self._state.path, "telling an event"), self._state.transaction():
            (number,) = self._state.ids(1)
            told_event = msgspec.structs.replace(told_event, id=number)
            self._state.put_event(told_event)
        return told_event

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        """Events with an id above `after`, oldest first, at most `limit`."""
        with self._turn, told(self._state.path, "reading events"):
            return self._state.events(after=after, limit=limit)

    def keep(self, findings: Iterable[Finding]) -> None:
        """Remember findings as they stand now: new, continuing or closed."""
        kept = [redact.record(finding) for finding in findings]
        if kept:
            with self._turn, told(self._state.path, "keeping findings"), self._state.transaction():
                for finding in kept:
                    self._state.put_finding(finding)

    def open_findings(self) -> list[Finding]:
        """Findings that have not closed, oldest first."""
        with self._turn, told(self._state.path, "reading findings"):
            return self._state.open_findings()

    def closed_findings(self, since: float) -> list[Finding]:
        """Findings that closed at or after a time, oldest first."""
        with self._turn, told(self._state.path, "reading findings"):
            return self._state.closed_findings(since)

    def is_over(self, finding: Finding) -> bool:
        """Whether a finding was seen to close."""
        with self._turn, told(self._state.path, "reading findings"):
            return self._state.closed(finding.id)

    # Incidents.

    def new_incident_id(self, opened_at: float, slug: str) -> str:
        """A folder's name that nobody has yet: `2026-11-30T10-26-58Z-silent-stall`."""
        return incidents.identity(opened_at, slug, set(incidents.names(self.incidents_folder)))

    def folder(self, incident_id: str) -> Path:
        """The folder of an incident, whether it exists or not."""
        return incidents.folder_of(self.incidents_folder, incident_id)

    def save(self, incident: Incident) -> None:
        """Append what is new in an incident to its folder, durably; redacted like everything."""
        incidents.save(self.incidents_folder, incident, self.settings.evidence.environment)

    def keep_note(self, incident_id: str, name: str, note: Record) -> None:
        """Put a note of one kind beside an incident, in place of the one before."""
        incidents.keep_note(self.incidents_folder, incident_id, name, note)

    def note(self, incident_id: str, name: str, kind: type[R]) -> R | None:
        """The note of that name beside an incident; None when there is none that can be read."""
        return incidents.note(self.incidents_folder, incident_id, name, kind)

    def last_seen_at(self) -> float:
        """The time of the observation that came last; 0.0 when there is none."""
        with self._turn, told(self._state.path, "reading"):
            return self._state.last_seen_at()

    def forget_later(self, now: float) -> None:
        """Answer with nothing that a clock, set back since, calls later than now.

        What changes slowly is kept, as known now. On the disk everything stays as it was seen.
        """
        with self._turn:
            known = [
                msgspec.structs.replace(seen, at=min(seen.at, now)) for seen in self.slow.values()
            ]
            self._window = Window(now, known)
            self._afresh_at = now

    def seal(
        self,
        incident: Incident,
        *,
        now: float,
        deadline_s: float,
        window_s: float | None = None,
        again: bool = False,
    ) -> Seal:
        """Copy, hash and close the evidence of an incident; once, before anything is touched.

        `again` seals what is known by now in a further file, for a verdict that is judged again;
        with `AGAIN_SHARE` of the bytes. `window_s` is `[evidence] window_s` unless given. What does
        not fit the bytes, the deadline or the disk is named in `left_out`. Raises `WorldError` when
        nothing could be written, and `RefusedError` when it was sealed before.
        """
        self.save(incident)
        evidence = self.settings.evidence
        shown = redact.deployment(incident.deployment, evidence.environment)
        made = seal(
            self._state.path,
            self.folder(incident.id),
            msgspec.structs.replace(incident, deployment=shown),
            now=now,
            window_s=evidence.window_s if window_s is None else window_s,
            bytes_max=int(evidence.megabytes * 1e6 * (AGAIN_SHARE if again else 1.0)),
            deadline_s=deadline_s,
            again=again,
        )
        self.save(msgspec.structs.replace(incident, seal=made))
        for name in incidents.forget(self.incidents_folder, evidence.keep_incidents):
            self.event("store", f"Forgot incident {name}: it was the oldest.", at=now)
        return made

    def incident(self, incident_id: str) -> Incident:
        """One incident as its folder tells it; raises `RefusedError` or `WorldError` for none."""
        return incidents.load_records(self.folder(incident_id))

    def incidents(self) -> list[Incident]:
        """Every incident on the disk, newest first; a damaged folder is passed over."""
        return incidents.listed(self.incidents_folder)

    def journal_for(self, incident_id: str) -> StoreJournal:
        """The journal of an incident, or of a plan without one, which may take any name."""
        return StoreJournal(self._state, incident_id, self.folder(incident_id))

    # Locks.

    def lock(self, name: str) -> contextlib.AbstractContextManager[None]:
        """One process at a time; raises `RefusedError` naming the holder, and never waits."""
        return locks.held(self._lock_path(name), name)

    def holder(self, name: str) -> int | None:
        """The pid that holds a lock now, or None."""
        return locks.holder_of(self._lock_path(name))

    def _lock_path(self, name: str) -> Path:
        return self.state_folder / "locks" / f"{name}.lock"


class _Batch:
    """The records of one append: numbered, and those that say nothing new left out."""

    def __init__(self, store: Store, ids: Iterable[int]) -> None:
        self.observations: list[Observation] = []
        self.traits: list[Trait] = []
        self.changes: list[Change] = []
        self._ids = iter(ids)
        self._slow = ChainMap({}, store.slow)
        self._traits = ChainMap({}, store.traits)
        self._lives = {_life_key(each): each for each in store.changes if each.incarnation}

    def observation(self, seen: Observation) -> Observation:
        """The row that holds this observation: a new one, or the one that said so before."""
        slow = seen.name in SLOW
        if slow and (known := self._slow.get(slow_key(seen))) and _same(known, seen):
            return known
        seen = msgspec.structs.replace(seen, id=next(self._ids))
        if slow:
            self._slow[slow_key(seen)] = seen
        self.observations.append(seen)
        return seen

    def trait(self, given: Trait) -> Trait:
        """The row that holds this trait."""
        key = (given.subject, given.name, given.label)
        known = self._traits.get(key)
        if known and (known.value, known.because) == (given.value, given.because):
            return known
        given = msgspec.structs.replace(given, id=next(self._ids))
        self._traits[key] = given
        self.traits.append(given)
        return given

    def change(self, given: Change) -> Change:
        """The ledger row of this change."""
        once = given.incarnation is not None and given.kind in ONCE_A_LIFE
        if once and (known := self._lives.get(_life_key(given))):
            return known
        given = msgspec.structs.replace(given, id=next(self._ids))
        if once:
            self._lives[_life_key(given)] = given
        self.changes.append(given)
        return given

    def write(self, state: State) -> None:
        """Insert what is new; inside a transaction."""
        state.put_observations(self.observations)
        state.put_traits(self.traits)
        state.put_changes(self.changes)


def slow_key(seen: Observation) -> Key:
    """What makes two observations speak of one thing."""
    return (seen.subject, seen.name, seen.label)


def _same(known: Observation, seen: Observation) -> bool:
    return (known.value, known.missing, known.incarnation) == (
        seen.value,
        seen.missing,
        seen.incarnation,
    )


def _life_key(change: Change) -> tuple[str, str, str, str | None]:
    return (change.subject, change.kind, change.what, change.incarnation)


def _kept(seen: Observation, also: tuple[str, ...]) -> Observation | None:
    if isinstance(seen.value, float) and not math.isfinite(seen.value):
        # JSON has no such number, and judgement could do nothing with it.
        seen = msgspec.structs.replace(seen, value=None, missing=f"the value was {seen.value}")
    return redact.observation(seen, also)

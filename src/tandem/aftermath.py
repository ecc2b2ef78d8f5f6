"""After a repair: its real traffic is followed, and the report says whether it held.

For: counting what is served since the proof, the milestones of 30 minutes and 24 hours, and a
recurrence; through any number of restarts of the watch. Not for: finding anything wrong (`detect`),
or how it reads (`report`).
"""

import asyncio
import contextlib
from collections.abc import Iterable

import msgspec

from tandem.errors import TandemError
from tandem.facts import Facts
from tandem.handling import recurrence_of, write_down
from tandem.parts import Parts, Tell, say
from tandem.records import Aftermath, Incident, Milestone, Role, Tally
from tandem.records import vocabulary as v
from tandem.signs import UNWATCHED_S

HOLDS_S = (1800.0, 86_400.0)
"""When a report gains "held": half an hour, and a day, after the proof."""
RESCAN_S = 60.0
"""How often the incidents are looked through: a repair by hand may have ended meanwhile."""
KEEP_S = 30.0
"""How often what was counted is written beside the incident; a kill costs no request counted."""
END_S = 10.0
NOTE = "tally"


class _Followed:
    """One repaired incident, and what has been counted since its proof."""

    def __init__(self, incident: Incident, since: float, tally: Tally) -> None:
        self.incident = incident
        self.aftermath = incident.aftermath or Aftermath(since=since)
        self.tally = tally
        self.kept_at = float("-inf")

    def look(self, facts: Facts) -> None:
        """Count what is new in this look; a gap between looks is time nobody watched."""
        before = self.tally
        gap_s = 0.0 if before.looked_at is None else facts.now - before.looked_at
        counters, since = dict(before.counters), self.aftermath.since
        requests, counted = before.requests, before.counted
        for name in _decodes(facts, self.incident):
            grown = _grown(facts, name, v.REQUESTS_TOTAL, counters, since)
            counted = counted or grown is not None
            requests += grown or 0.0
        probes = before.probes
        for subject in facts.subjects(v.PROBES_SENT_TOTAL):
            probes += _grown(facts, subject, v.PROBES_SENT_TOTAL, counters, since) or 0.0
        self.tally = Tally(
            watched_s=before.watched_s + (gap_s if 0.0 < gap_s <= UNWATCHED_S else 0.0),
            looked_at=facts.now,
            requests=requests,
            probes=probes,
            counted=counted,
            counters=counters,
        )

    def due(self, now: float, again: Incident | None, facts: Facts) -> Aftermath | None:
        """What its aftermath is now, when there is something new to say; else None."""
        known = self.aftermath
        ended_at = again.finding.onset_at if again and again.finding else now
        reached = [
            self._milestone(after_s, facts)
            for after_s in HOLDS_S[len(known.held) :]
            if known.since + after_s <= min(now, ended_at)
        ]
        found = msgspec.structs.replace(known, held=(*known.held, *reached))
        if again is not None:
            found = msgspec.structs.replace(found, recurred_at=ended_at, recurred_as=again.id)
        return found if found != known else None

    def _milestone(self, after_s: float, facts: Facts) -> Milestone:
        tally, names = self.tally, _members(self.incident)
        since = self.aftermath.since
        restarts = [
            one for one in facts.changes
            if one.kind == "restart" and one.subject in names and one.at > since
        ]  # fmt: skip
        served = max(0, round(tally.requests - tally.probes)) if tally.counted else None
        return Milestone(
            after_s=after_s,
            watched_s=round(min(after_s, tally.watched_s), 1),
            requests=served,
            restarts=len(restarts),
        )

    @property
    def over(self) -> bool:
        """Whether nothing more is to be said of it."""
        return self.aftermath.recurred_at is not None or len(self.aftermath.held) == len(HOLDS_S)


class Follower:
    """Follows every repair that was proven, beside the loop and never in its way."""

    def __init__(self, parts: Parts, tell: Tell) -> None:
        """Nothing is read before the first turn."""
        self._parts = parts
        self._tell = tell
        self._followed: dict[str, _Followed] = {}
        self._incidents: list[Incident] = []
        self._scan_at = float("-inf")
        self._writing: asyncio.Task[None] | None = None
        self._write_at = float("-inf")

    @property
    def busy(self) -> bool:
        """Whether a report is being written: nobody else may write one meanwhile."""
        return self._writing is not None and not self._writing.done()

    def rescan(self) -> None:
        """Look the incidents through at the next turn: one of them has come to an end."""
        self._scan_at = float("-inf")

    def turned(self, facts: Facts, *, free: bool) -> None:
        """Count this look; write down one thing that is due, when nobody else is writing."""
        if facts.now >= self._scan_at:
            self._scan(facts.now)
        for one in self._followed.values():
            one.look(facts)
            if facts.now - one.kept_at >= KEEP_S:
                self._keep(one, facts.now)
        if self._writing is not None and self._writing.done():
            task, self._writing = self._writing, None
            task.result()  # what broke in it breaks this look, and is told as such
        if not free or self.busy or facts.now < self._write_at:
            return
        for one in self._followed.values():
            found = one.due(facts.now, self._again(one), facts)
            if found is not None:
                self._writing = asyncio.create_task(self._write(one, found))
                return

    def _scan(self, now: float) -> None:
        self._scan_at = now + RESCAN_S
        self._incidents = self._parts.store.incidents()
        kept = self._followed
        self._followed = {}
        for incident in self._incidents:
            proof = incident.verification
            if incident.state != "closed" or proof is None or not incident.outcomes:
                continue
            known = kept.get(incident.id)
            if known is None:
                tally = self._parts.store.note(incident.id, NOTE, Tally) or Tally()
                known = _Followed(incident, proof.ended_at, tally)
            if not known.over:
                self._followed[incident.id] = known

    def _again(self, one: _Followed) -> Incident | None:
        """The first incident that is this one again."""
        again = [other for other in self._incidents if other.recurrence_of == one.incident.id]
        return min(again, key=lambda other: other.opened_at, default=None)

    def _keep(self, one: _Followed, now: float) -> None:
        # A full disk costs what was counted since the last time, and no turn.
        with contextlib.suppress(TandemError):
            self._parts.store.keep_note(one.incident.id, NOTE, one.tally)
        one.kept_at = now

    async def _write(self, one: _Followed, found: Aftermath) -> None:
        parts = self._parts
        # Tried again after a while, should the disk refuse.
        self._write_at = parts.clock.now() + RESCAN_S
        incident = msgspec.structs.replace(one.incident, aftermath=found)
        parts.store.save(incident)
        one.incident, one.aftermath = incident, found
        self._write_at = float("-inf")
        self._keep(one, parts.clock.now())
        kind, said = _said(incident, found)
        say(parts, self._tell, kind, said, incident=incident.id)
        one.incident = await write_down(parts, incident, tell=self._tell)
        self.rescan()

    async def end(self) -> None:
        """Keep what was counted, and let a report under way be written, bounded."""
        for one in self._followed.values():
            self._keep(one, self._parts.clock.now())
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=END_S)


def _said(incident: Incident, aftermath: Aftermath) -> tuple[str, str]:
    """The kind of event and its sentence."""
    if aftermath.recurred_at is not None:
        after_min = (aftermath.recurred_at - aftermath.since) / 60.0
        return "recurred", (
            f"{incident.id} recurred after {after_min:.0f} min: {aftermath.recurred_as}"
        )
    newest = aftermath.held[-1]
    served = "" if newest.requests is None else f", {newest.requests} requests served"
    return "held", (
        f"the repair of {incident.id} has held for {newest.after_s / 60.0:.0f} min "
        f"(watched {newest.watched_s / 60.0:.0f} min{served})"
    )


def _members(incident: Incident) -> set[str]:
    """The members an incident speaks of."""
    found = incident.finding
    return {*found.incarnations, *found.subject.split(">")} if found else set()


def _decodes(facts: Facts, incident: Incident) -> Iterable[str]:
    """Its decodes; all of them when it names none."""
    decodes = [one.name for one in facts.deployment.of(Role.DECODE)]
    named = [name for name in decodes if name in _members(incident)]
    return named or decodes


def _grown(
    facts: Facts, subject: str, name: str, counters: dict[str, tuple[str, float]], since: float
) -> float | None:
    """How much a counter has grown since it was last kept in `counters`, which learns it.

    Nothing for the first value seen after `since`, which holds what the proof itself asked for; a
    new life, or a lower value, began from zero. None when it is not seen.
    """
    seen = facts.latest(subject, name)
    if seen is None or seen.at < since or not isinstance(seen.value, int | float):
        return None
    life, value, key = seen.incarnation or "", float(seen.value), f"{name}:{subject}"
    before = counters.get(key)
    counters[key] = (life, value)
    if before is None:
        return 0.0
    same = before[0] == life and value >= before[1]
    return value - before[1] if same else value


__all__ = ["HOLDS_S", "Follower", "recurrence_of"]

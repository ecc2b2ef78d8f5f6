"""The loop: collect, store and detect every turn, and hand what was found to the other stages.

For: `watch`, and one turn of it by hand (`investigate`). Not for: what happens to one incident
(`handling.py`), or bringing members up and down by hand (`standing.py`).
"""

import asyncio
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.aftermath import Follower
from tandem.detect import detect
from tandem.errors import TandemError
from tandem.facts import Facts
from tandem.handling import open_incident, run_repair, why_not_automatic, write_down, written
from tandem.parts import DETECT_WINDOW_S, STANDING, Attendant, Parts, Tell, Turn, look, say
from tandem.records import Finding, Incident, Outcome
from tandem.unfinished import begun, finish, orphans, unfinished

LOOK_S = 14.0
"""How long `investigate` looks when nobody watched: every threshold of detect, and a margin."""
PAUSE_S = 60.0
"""How long after a handling that broke the loop tries again; doubled each time, up to the most."""
PAUSE_S_MAX = 3600.0
EVIDENCE_S = 12.0
"""How long a thing has to last before it is judged: failure modes look back ten seconds, and a
stall that is younger than that looks to them as if it were none."""
STALLS = ("partial-stall", "silent-stall")
END_S = 60.0
"""How long a step under way may take to its end when the watching ends."""


async def watch(
    parts: Parts,
    *,
    hunch: str | None,
    tell: Tell,
    turns_max: int | None = None,
    attendant: Attendant | None = None,
) -> None:
    """Run the loop until cancelled (or for `turns_max` turns): one turn each watch interval.

    What a killed Tandem left half done is finished first. `attendant` hears of every turn. Raises
    `RefusedError` when another watch runs on the same store.
    """
    with parts.store.lock("watch"):
        watcher = _Watcher(parts, hunch, tell)
        policy = parts.settings.policy.mode
        said = f"watching {parts.settings.deployment.name}, policy {policy}"
        say(parts, tell, "watching", said)
        turns = 0
        try:
            while turns_max is None or turns < turns_max:
                began = parts.clock.now()
                looked = await watcher.turn()
                turns += 1
                now = parts.clock.now()
                spent = now - began
                if attendant is not None:
                    attendant.turned(Turn(turns, now, spent, looked, watcher.open))
                await parts.clock.sleep(max(0.05, parts.settings.watch.interval_s - spent))
        finally:
            if attendant is not None:
                attendant.ending()
            await watcher.end()


class _Watcher:
    """The loop's memory between turns: open findings, and the incident being handled."""

    def __init__(self, parts: Parts, hunch: str | None, tell: Tell) -> None:
        self.parts = parts
        self.hunch = hunch
        self.tell = tell
        self.open: tuple[Finding, ...] = tuple(parts.store.open_findings())
        self.blind_until = self._repaired_at()
        self.begun = {one.finding.id: one for one in begun(parts)[::-1] if one.finding}
        """By finding, the newest incident that an earlier watch began and did not end."""
        self.handling: asyncio.Task[Incident] | None = None
        self.handled = self._written_down()
        """Subjects of open findings that have had their incident."""
        self.broken: set[str] = set()
        """Those of them whose handling broke: tried again after a pause."""
        self.again_at: float | None = 0.0
        """When to look for what is left half done; None when nothing can be."""
        self.pause_s = PAUSE_S
        self.stumbled = ""
        self.follower = Follower(parts, tell)

    def _written_down(self) -> set[str]:
        """The open findings that an earlier watch has dealt with."""
        known = {one.id for one in self.open}
        return {
            one.finding.subject
            for one in self.parts.store.incidents()
            if one.finding is not None and one.finding.id in known and one.report is not None
        }

    def _repaired_at(self) -> float:
        """When the last repair ended: what was seen before it speaks of lives that are over."""
        ends = [one.outcomes[-1].ended_at for one in self.parts.store.incidents() if one.outcomes]
        return max(ends, default=0.0)

    async def turn(self) -> bool:
        """Look, detect, hand a new actionable finding to the rest of the loop; whether it saw."""
        try:
            await self._turn()
        # A look that broke (a full disk, a bug) must not end the watching: it is told once, and
        # the next look follows.
        except Exception as error:  # noqa: BLE001
            said = f"a look broke, and the watching goes on: {_sentence(error)}"
            if said != self.stumbled:
                say(self.parts, self.tell, "failed", said)
            self.stumbled = said
            return False
        self.stumbled = ""
        return True

    async def _turn(self) -> None:
        facts = await look(self.parts)
        repairing = self.parts.store.holder("repair") is not None
        self.follower.turned(facts, free=self.handling is None and not repairing)
        if self.handling is not None:
            if self.handling.done():
                self._settle(self.handling)
            return
        if repairing:
            self._judge_afresh(facts.now)
            return
        if self._tries_again(facts.now):
            return
        window_s = min(DETECT_WINDOW_S, facts.now - self.blind_until)
        if window_s < DETECT_WINDOW_S:
            facts = self.parts.store.facts(now=facts.now, window_s=window_s)
        findings = detect(facts, self.open, self.parts.settings.detect)
        self._tell(findings)
        self.handled |= {one.subject for one in findings if self._grew(one, findings)}
        self.open = tuple(one for one in findings if one.closed_at is None)
        self.parts.store.keep(findings)
        self.handled &= {one.subject for one in self.open}
        if any(one.closed_at is not None and one.id in self.begun for one in findings):
            self.again_at = facts.now
        if self.follower.busy:
            return
        chosen = next((one for one in self.open if self._wants_handling(one, facts)), None)
        if chosen is not None:
            self.handling = asyncio.create_task(self._handle(chosen))

    def _tell(self, findings: Sequence[Finding]) -> None:
        known = {one.id for one in self.open}
        for finding in findings:
            if finding.closed_at is not None:
                say(self.parts, self.tell, "cleared", f"cleared: {finding.summary}")
            elif finding.id not in known:
                said = f"found {finding.kind}: {finding.summary}"
                say(self.parts, self.tell, "finding", said, id=finding.id)

    def _grew(self, finding: Finding, findings: Sequence[Finding]) -> bool:
        """Whether a stall opens as one in hand closes: the same cause, grown, by another name."""
        return finding.kind in STALLS and any(
            one.closed_at is not None
            and one.kind in STALLS
            and one.subject in self.handled
            and _members(one) & _members(finding)
            for one in findings
        )

    def _wants_handling(self, finding: Finding, facts: Facts) -> bool:
        """One incident per cause: a stall that grows on a path in hand is the same one."""
        if not finding.actionable or finding.subject in self.handled:
            return False
        if facts.now - finding.onset_at < EVIDENCE_S:
            return False
        self.handled.add(finding.subject)
        if self._taken_down(finding, facts):
            said = f"{finding.subject} was taken down by hand: it is left alone"
            say(self.parts, self.tell, "left-alone", said, id=finding.id)
            return False
        return True

    def _taken_down(self, finding: Finding, facts: Facts) -> bool:
        """Whether a member is away because a person took it down, and nobody started it since."""
        if finding.kind != "member-down":
            return False
        stops = [
            one.ended_at
            for one in self.parts.store.journal_for(STANDING).records()
            if isinstance(one, Outcome) and one.step == f"stop:{finding.subject}"
        ]
        life = facts.incarnation(finding.subject)
        return bool(stops) and (life is None or life.started_at < stops[-1])

    async def _handle(self, finding: Finding) -> Incident:
        try:
            incident, facts = await open_incident(
                self.parts,
                finding,
                self.hunch,
                self.tell,
                opened_by="watch",
                begun=self.begun.pop(finding.id, None),
            )
            refusal = why_not_automatic(self.parts, incident)
            if refusal is None:
                return await run_repair(self.parts, incident, tell=self.tell, facts=facts)
        except BaseException:  # a cancellation from within is as broken as any error
            self.broken.add(finding.subject)
            raise
        command = f"tandem repair {incident.id} --approve"
        steps = incident.plan is not None and incident.plan.steps
        advice = f"{refusal} To act on it: {command}" if steps else refusal
        say(self.parts, self.tell, "advice", advice, incident=incident.id)
        return await write_down(self.parts, incident, tell=self.tell, facts=facts)

    def _tries_again(self, now: float) -> bool:
        """Take up what is left half done, one after the other, then what broke."""
        if self.again_at is None or now < self.again_at or self.follower.busy:
            return False
        if left := unfinished(self.parts) or orphans(self.parts):
            self.again_at = now
            self.handling = asyncio.create_task(finish(self.parts, left[0], self.tell))
            return True
        self.again_at = None
        self.handled -= self.broken
        self.broken.clear()
        return False

    def _settle(self, task: asyncio.Task[Incident]) -> None:
        self.handling = None
        self.follower.rescan()
        now = self.parts.clock.now()
        try:
            incident = task.result()
        # Whatever broke the handling of one incident must not end the watching: nobody would
        # notice the next one. It is told, and tried again after a pause.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            self._pause(now)
            say(self.parts, self.tell, "failed", _sentence(error))
            return
        if incident.outcomes:
            self._judge_afresh(now)
        if written(incident):
            self.pause_s = PAUSE_S
        else:
            self._pause(now)

    def _pause(self, now: float) -> None:
        self.again_at = now + self.pause_s
        self.pause_s = min(2.0 * self.pause_s, PAUSE_S_MAX)

    def _judge_afresh(self, now: float) -> None:
        """Forget what was seen before a repair: it speaks of lives that are over."""
        closed = [msgspec.structs.replace(one, closed_at=now) for one in self.open]
        self.parts.store.keep(closed)
        self.blind_until = now
        self.open = ()
        self.handled.clear()

    async def end(self) -> None:
        """Let a repair under way end its present step, bounded, then give up."""
        await self.follower.end()
        task = self.handling
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task}, timeout=END_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            say(self.parts, self.tell, "failed", _sentence(error))


def _members(finding: Finding) -> set[str]:
    return {*finding.incarnations, *finding.subject.split(">")}


def _sentence(error: BaseException) -> str:
    """What broke, as a person can use it: our own errors speak for themselves."""
    if isinstance(error, TandemError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{said}{where}. This is a bug in Tandem: please report it."


async def investigate(parts: Parts, *, hunch: str | None, since_s: float, tell: Tell) -> Incident:
    """The word of the person in the incident: look, seal, judge, propose; act on nothing.

    When a watch runs its observations serve; otherwise this looks for `LOOK_S` itself. `since_s`
    is how far back the sealed evidence reaches, as far as anything was remembered.
    """
    thresholds = parts.settings.detect
    if parts.store.holder("watch") is None:
        tell(f"nobody was watching: looking for {LOOK_S:.0f} s")
        began = parts.clock.now()
        while parts.clock.now() - began < LOOK_S:
            await look(parts)
            await parts.clock.sleep(parts.settings.watch.interval_s)
    facts = await look(parts)
    findings = detect(facts, tuple(parts.store.open_findings()), thresholds)
    standing = [one for one in findings if one.closed_at is None]
    worst = next((one for one in standing if one.actionable), None)
    finding = worst or (standing[0] if standing else None)
    # The record has the verdicts: told here as well they would be read twice.
    incident, _ = await open_incident(parts, finding, hunch, tell, window_s=since_s, aloud=False)
    return incident

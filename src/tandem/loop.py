"""The loop: collect, store and detect every turn, and hand what was found to the other stages.

For: `watch`, and one turn of it by hand (`investigate`). Not for: what happens to one incident
(`handling.py`), or bringing members up and down by hand (`standing.py`).
"""

import asyncio
import traceback
from collections.abc import Coroutine, Sequence
from pathlib import Path

import msgspec

from tandem.aftermath import Follower
from tandem.cases import Case, Cases
from tandem.detect import detect
from tandem.errors import TandemError
from tandem.facts import Facts
from tandem.handling import (
    judge_again,
    note_recurrence,
    open_incident,
    run_repair,
    why_not_automatic,
    write_down,
    written,
)
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
CLOCK_BACK_S = 1.0
"""A clock that went back by more than this has left observations of a time to come."""
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
        self.cases = Cases(parts.store, parts.clock.now())
        self.case: Case | None = None
        """The one that is being handled."""
        self.looked_at = parts.store.last_seen_at()
        self.again_at: float | None = 0.0
        """When to look for what is left half done; None when nothing can be."""
        self.pause_s = PAUSE_S
        self.stumbled = ""
        self.follower = Follower(parts, tell)
        self.handled_from = 0.0
        """When the handling under way began: only what was done since is a reason to forget."""

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
        self._follow_clock(facts.now)
        window_s = min(DETECT_WINDOW_S, facts.now - self.blind_until)
        if window_s < DETECT_WINDOW_S:
            facts = self.parts.store.facts(now=facts.now, window_s=window_s)
        known = (*self.open, *self.cases.past)
        findings = detect(facts, known, self.parts.settings.detect)
        back = self._tell(findings)
        for finding, incident in self.cases.follow(findings, facts):
            said = f"{finding.kind} on {finding.subject} belongs to incident {incident}"
            say(self.parts, self.tell, "goes-on", said, id=finding.id, incident=incident)
        self.open = tuple(one for one in findings if one.closed_at is None)
        self.parts.store.keep(findings)
        if any(one.closed_at is not None and one.id in self.begun for one in findings):
            self.again_at = facts.now
        if not self.follower.busy:
            self._hand_on(facts, back)

    def _follow_clock(self, now: float) -> None:
        """Judge by nothing that a clock, set back since, calls later than now."""
        if now < self.looked_at - CLOCK_BACK_S:
            said = f"the clock went back by {self.looked_at - now:.0f} s: looking afresh"
            say(self.parts, self.tell, "clock", said)
            self.parts.store.forget_later(now)
            self.blind_until = now
        self.looked_at = now

    def _hand_on(self, facts: Facts, back: Sequence[Finding]) -> None:
        """Give at most one finding to the rest of the loop: a new cause first."""
        chosen = next((one for one in self.open if self._wants_handling(one, facts)), None)
        if chosen is not None:
            self._start(self.cases.begin(chosen), self._handle(chosen))
            return
        again = self.cases.to_judge_again(self.open, facts)
        if again is not None and again.incident is not None:
            judged = judge_again(self.parts, again.incident, again.finding, self.tell)
            self._start(again, self._act_on(judged))
            return
        for finding in back:
            case = self.cases.case_of(finding)
            if case is not None and case.incident is not None:
                noted = note_recurrence(self.parts, case.incident, finding, self.tell)
                self._start(case, noted)
                return

    def _start(self, case: Case, work: Coroutine[None, None, Incident]) -> None:
        self.case = case
        self._handle_in_the_background(work)

    def _handle_in_the_background(self, work: Coroutine[None, None, Incident]) -> None:
        self.handled_from = self.parts.clock.now()
        self.handling = asyncio.create_task(work)

    def _tell(self, findings: Sequence[Finding]) -> list[Finding]:
        """Say what is new in how the findings stand; gives those that came back."""
        known = {one.id: one for one in self.open}
        back = []
        for finding in findings:
            before = known.get(finding.id)
            if finding.closed_at is not None:
                say(self.parts, self.tell, "cleared", f"cleared: {finding.summary}")
            elif before is None and self.cases.came_back(finding):
                back.append(finding)
                self._tell_back(finding)
            elif before is None or before.actionable != finding.actionable:
                said = f"found {finding.kind}: {finding.summary}"
                say(self.parts, self.tell, "finding", said, id=finding.id)
        return back

    def _tell_back(self, finding: Finding) -> None:
        case = self.cases.case_of(finding)
        goes_on = f"; incident {case.incident} goes on" if case and case.incident else ""
        said = f"{finding.kind} on {finding.subject} recurred{goes_on}"
        say(self.parts, self.tell, "recurred", said, id=finding.id)

    def _wants_handling(self, finding: Finding, facts: Facts) -> bool:
        """One incident per cause: a stall that grows on a path in hand is the same one."""
        if not finding.actionable or self.cases.case_of(finding) is not None:
            return False
        if facts.now - max((finding.onset_at, *finding.recurred_at)) < EVIDENCE_S:
            return False
        if self._taken_down(finding, facts):
            self.cases.begin(finding)
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
        opening = open_incident(
            self.parts,
            finding,
            self.hunch,
            self.tell,
            opened_by="watch",
            begun=self.begun.pop(finding.id, None),
        )
        return await self._act_on(opening)

    async def _act_on(self, judging: Coroutine[None, None, tuple[Incident, Facts]]) -> Incident:
        """Repair what was judged where the policy lets us, else advise; and write it down."""
        case = self.case
        try:
            incident, facts = await judging
            if case is not None:
                self.cases.judged(case, incident)
            refusal = why_not_automatic(self.parts, incident)
            if refusal is None:
                return await run_repair(self.parts, incident, tell=self.tell, facts=facts)
        except BaseException:  # a cancellation from within is as broken as any error
            if case is not None:
                self.cases.broke(case)
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
            self._handle_in_the_background(finish(self.parts, left[0], self.tell))
            return True
        self.again_at = None
        self.cases.forget_broken()
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
        if _acted_at(incident) >= self.handled_from:
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
        self.cases.clear()

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


def _acted_at(incident: Incident) -> float:
    """When the deployment was last touched for it, its proof included."""
    ends = [one.ended_at for one in incident.outcomes]
    if incident.verification is not None:
        ends.append(incident.verification.ended_at)
    return max(ends, default=float("-inf"))


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

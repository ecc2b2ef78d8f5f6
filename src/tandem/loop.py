"""The loop: collect, store and detect every turn, and hand what was found to the other stages.

For: `watch`, and one turn of it by hand (`investigate`). Not for: what happens to one incident
(`handling.py`), or bringing members up and down by hand (`standing.py`).
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from tandem.detect import detect
from tandem.errors import TandemError
from tandem.handling import open_incident, run_repair, run_report, why_not_automatic
from tandem.parts import DETECT_WINDOW_S, Parts, Tell, look, say
from tandem.records import Finding, Incident

LOOK_S = 14.0
"""How long `investigate` looks when nobody watched: every threshold of detect, and a margin."""


async def watch(
    parts: Parts, *, hunch: str | None, tell: Tell, turns_max: int | None = None
) -> None:
    """Run the loop until cancelled (or for `turns_max` turns): one turn each watch interval.

    Raises `RefusedError` when another watch runs on the same store.
    """
    with parts.store.lock("watch"):
        await _resume(parts, tell)
        watcher = _Watcher(parts, hunch, tell)
        say(parts, tell, "watching", f"watching {parts.settings.deployment.name}")
        turns = 0
        try:
            while turns_max is None or turns < turns_max:
                began = parts.clock.now()
                await watcher.turn()
                turns += 1
                spent = parts.clock.now() - began
                await parts.clock.sleep(max(0.05, parts.settings.watch.interval_s - spent))
        finally:
            await watcher.end()


class _Watcher:
    """The loop's memory between turns: open findings, and the incident being handled."""

    def __init__(self, parts: Parts, hunch: str | None, tell: Tell) -> None:
        self.parts = parts
        self.hunch = hunch
        self.tell = tell
        self.open: tuple[Finding, ...] = tuple(parts.store.open_findings())
        self.blind_until = 0.0
        self.handling: asyncio.Task[Incident] | None = None
        self.handled: set[str] = set()

    async def turn(self) -> None:
        """Look, detect, and hand a new actionable finding to the rest of the loop."""
        facts = await look(self.parts)
        if self.handling is not None:
            if self.handling.done():
                self._settle(self.handling)
            return
        if self.parts.store.holder("repair") is not None:
            self._judge_afresh(facts.now)
            return
        window_s = min(DETECT_WINDOW_S, facts.now - self.blind_until)
        if window_s < DETECT_WINDOW_S:
            facts = self.parts.store.facts(now=facts.now, window_s=window_s)
        findings = detect(facts, self.open, self.parts.settings.detect)
        self._tell(findings)
        self.open = tuple(one for one in findings if one.closed_at is None)
        self.parts.store.keep(findings)
        self.handled &= {one.subject for one in self.open}
        chosen = next((one for one in self.open if self._wants_handling(one)), None)
        if chosen is not None:
            self.handled.add(chosen.subject)
            self.handling = asyncio.create_task(self._handle(chosen))

    def _tell(self, findings: Sequence[Finding]) -> None:
        known = {one.id for one in self.open}
        for finding in findings:
            if finding.closed_at is not None:
                say(self.parts, self.tell, "cleared", f"cleared: {finding.summary}")
            elif finding.id not in known:
                said = f"found {finding.kind} on {finding.subject}: {finding.summary}"
                say(self.parts, self.tell, "finding", said, id=finding.id)

    def _wants_handling(self, finding: Finding) -> bool:
        """One incident per cause: a stall that grows on a path in hand is the same one."""
        return finding.actionable and finding.subject not in self.handled

    async def _handle(self, finding: Finding) -> Incident:
        incident = await open_incident(self.parts, finding, self.hunch, self.tell)
        refusal = why_not_automatic(self.parts, incident)
        if refusal is None:
            return await run_repair(self.parts, incident, tell=self.tell)
        advice = f"{refusal} To act on it: tandem repair {incident.id} --approve"
        say(self.parts, self.tell, "advice", advice, incident=incident.id)
        return await run_report(self.parts, incident, tell=self.tell)

    def _settle(self, task: asyncio.Task[Incident]) -> None:
        self.handling = None
        now = self.parts.clock.now()
        try:
            incident = task.result()
        except TandemError as error:
            say(self.parts, self.tell, "failed", str(error))
            return
        if incident.outcomes:
            self._judge_afresh(now)

    def _judge_afresh(self, now: float) -> None:
        """Forget what was seen before a repair: it speaks of lives that are over."""
        closed = [msgspec.structs.replace(one, closed_at=now) for one in self.open]
        self.parts.store.keep(closed)
        self.blind_until = now
        self.open = ()
        self.handled.clear()

    async def end(self) -> None:
        """Let a repair under way end its present step, bounded, then give up."""
        if self.handling is None:
            return
        self.handling.cancel()
        with contextlib.suppress(asyncio.CancelledError, TandemError):
            await self.handling


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
    tell(finding.summary if finding else "nothing is wrong that detect can see")
    return await open_incident(parts, finding, hunch, tell, window_s=since_s)


async def _resume(parts: Parts, tell: Tell) -> None:
    """Finish what a killed Tandem left half done, before anything else."""
    for incident in parts.store.incidents():
        if incident.state == "repairing":
            say(parts, tell, "resume", f"resuming the repair of {incident.id}")
            await run_repair(parts, incident, tell=tell, resume=True)

"""The order of the stages: collect, store, detect, diagnose, plan, repair, verify, report.

For: running the loop (`watch`) and one turn of it by hand (`investigate`, `run_repair`).
Not for: knowing any engine, router or supervisor by name (`wiring.py`), or bringing members up
by hand (`standing.py`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from tandem.collect import Collector
from tandem.detect import detect
from tandem.diagnose import diagnose
from tandem.errors import RefusedError, TandemError
from tandem.facts import Facts
from tandem.plan import plan_repair
from tandem.ports import Clock, Hands, Harvest, Mode
from tandem.records import (
    Diagnosis,
    Finding,
    Incident,
    LostRequest,
    Member,
    Outcome,
    Plan,
    Role,
    Settings,
    Verification,
)
from tandem.records import vocabulary as v
from tandem.repair import repair, succeeded
from tandem.report import render
from tandem.report.document import publish
from tandem.store import Store, load_incident
from tandem.verify import verify

Tell = Callable[[str], None]
TakeStacks = Callable[[Sequence[Member]], Awaitable[Harvest]]

DETECT_WINDOW_S = 180.0
"""How far back detect looks: longer than any threshold, short enough to index every second."""

LOOK_S = 14.0
"""How long `investigate` looks when nobody watched: every threshold of detect, and a margin."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop works with, built by `wiring.open_parts`."""

    settings: Settings
    store: Store
    hands: Hands
    clock: Clock
    collector: Collector
    modes: tuple[Mode, ...]
    take_stacks: TakeStacks


def say(parts: Parts, tell: Tell, kind: str, text: str, **data: str | float | None) -> None:
    """Tell a person and the store the same thing at once."""
    parts.store.event(kind, text, at=parts.clock.now(), data=dict(data))
    tell(text)


async def look(parts: Parts) -> Facts:
    """One turn of collect and store; the facts of the detect window."""
    parts.store.append(await parts.collector.tick())
    return parts.store.facts(now=parts.clock.now(), window_s=DETECT_WINDOW_S)


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
            self.blind_until = facts.now
            return
        window_s = min(DETECT_WINDOW_S, facts.now - self.blind_until)
        if window_s < DETECT_WINDOW_S:
            facts = self.parts.store.facts(now=facts.now, window_s=window_s)
        findings = detect(facts, self.open, self.parts.settings.detect)
        for finding in findings:
            known = any(finding.id == one.id for one in self.open)
            if finding.closed_at is not None:
                say(self.parts, self.tell, "cleared", f"cleared: {finding.summary}")
            elif not known:
                said = f"found {finding.kind} on {finding.subject}: {finding.summary}"
                say(self.parts, self.tell, "finding", said, id=finding.id)
        self.open = tuple(one for one in findings if one.closed_at is None)
        self.parts.store.keep(findings)
        chosen = next((one for one in self.open if self._wants_handling(one)), None)
        if chosen is not None:
            self.handled.add(f"{chosen.kind}@{chosen.subject}")
            self.handling = asyncio.create_task(self._handle(chosen))

    def _wants_handling(self, finding: Finding) -> bool:
        return finding.actionable and f"{finding.kind}@{finding.subject}" not in self.handled

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
            # What was seen before the repair speaks of dead incarnations: judge afresh.
            self.blind_until = now
            self.open = ()
            self.handled.clear()
            self.parts.store.keep(())

    async def end(self) -> None:
        """Let a repair under way end its present step, bounded, then give up."""
        if self.handling is None:
            return
        self.handling.cancel()
        with contextlib.suppress(asyncio.CancelledError, TandemError):
            await self.handling


async def open_incident(
    parts: Parts,
    finding: Finding | None,
    hunch: str | None,
    tell: Tell,
    *,
    window_s: float | None = None,
) -> Incident:
    """Evidence, seal, diagnosis and plan of one finding: nothing is touched.

    `window_s` is how far back the sealed observations reach, `[evidence] window_s` unless given.
    """
    now = parts.clock.now()
    incident = Incident(
        id=parts.store.new_incident_id(now, finding.kind if finding else "investigation"),
        opened_at=now,
        deployment=parts.settings.deployment,
        finding=finding,
        hunch=hunch,
    )
    parts.store.save(incident)
    say(parts, tell, "evidence", "taking evidence before anything is touched", incident=incident.id)
    await _take_evidence(parts)
    now = parts.clock.now()
    deadline_s = parts.settings.evidence.seconds
    seal = await asyncio.to_thread(
        parts.store.seal, incident, now=now, deadline_s=deadline_s, window_s=window_s
    )
    incident = msgspec.structs.replace(incident, seal=seal)
    parts.store.save(incident)
    said = f"evidence sealed: {seal.observations} observations, sha256 {seal.sha256[:12]}"
    say(parts, tell, "sealed", said, incident=incident.id)
    return await judge(parts, incident, tell)


async def judge(parts: Parts, incident: Incident, tell: Tell) -> Incident:
    """Diagnose and plan from the sealed folder alone."""
    _, facts = load_incident(parts.store.folder(incident.id))
    findings = (incident.finding,) if incident.finding else ()
    diagnosis = diagnose(facts, findings, parts.modes, incident.hunch)
    plan = plan_repair(diagnosis, incident.finding, facts, parts.settings.policy)
    incident = msgspec.structs.replace(incident, diagnosis=diagnosis, plan=plan, state="advised")
    parts.store.save(incident)
    _tell_diagnosis(parts, incident, diagnosis, plan, tell)
    return incident


def _tell_diagnosis(
    parts: Parts, incident: Incident, diagnosis: Diagnosis, plan: Plan, tell: Tell
) -> None:
    for out in diagnosis.ruled_out:
        said = f"ruled out {out.mode}: {out.because}"
        say(parts, tell, "ruled-out", said, incident=incident.id, mode=out.mode)
    named = diagnosis.cause or "no cause"
    said = f"{diagnosis.verdict.replace('_', ' ')}: {named}. {diagnosis.confidence_note}"
    say(parts, tell, "diagnosis", said, incident=incident.id, cause=diagnosis.cause)
    if diagnosis.hunch is not None:
        answer = diagnosis.hunch
        said = f"hunch “{answer.asked}” {answer.answer.replace('_', ' ')}: {answer.because}"
        say(parts, tell, "hunch", said, incident=incident.id)
    said = f"plan: {plan.scope}, {len(plan.steps)} steps. {plan.because}"
    say(parts, tell, "plan", said, incident=incident.id, scope=plan.scope)


async def _take_evidence(parts: Parts) -> None:
    """Stacks of every member, then one more look; bounded, and a failure is evidence too."""
    bound_s = parts.settings.evidence.seconds
    members = parts.settings.deployment.members
    stacks = asyncio.create_task(_bounded_stacks(parts, members, bound_s))
    parts.store.append(await stacks)
    parts.store.append(await parts.collector.tick())


async def _bounded_stacks(parts: Parts, members: Sequence[Member], bound_s: float) -> Harvest:
    try:
        return await asyncio.wait_for(parts.take_stacks(members), bound_s)
    except TimeoutError:
        return Harvest()


def why_not_automatic(parts: Parts, incident: Incident) -> str | None:
    """The reason a repair waits for a person, or None when the policy lets it run."""
    plan = incident.plan
    if plan is None or not plan.steps:
        return "Nothing is repaired: the plan has no steps."
    if plan.needs_approval:
        mode = parts.settings.policy.mode
        return f"Policy {mode} wants a person's word for a repair of scope {plan.scope}."
    hour_ago = parts.clock.now() - 3600.0
    recent = [
        one
        for one in parts.store.incidents()
        if one.id != incident.id and one.outcomes and one.opened_at > hour_ago
    ]
    allowed = parts.settings.policy.repairs_per_hour
    if len(recent) >= allowed:
        return f"{len(recent)} repairs ran within the hour and the policy allows {allowed}."
    return None


async def run_repair(
    parts: Parts, incident: Incident, *, tell: Tell, resume: bool = False
) -> Incident:
    """Run an incident's plan under the repair lock, prove it, and write it down.

    Raises `RefusedError` when another repair holds the lock or there is nothing to run.
    """
    plan = incident.plan
    if plan is None or not plan.steps:
        raise RefusedError(
            f"Incident {incident.id} has no repair to run.",
            next_step=f"Read why: tandem plan {incident.id}.",
        )
    with parts.store.lock("repair"):
        incident = msgspec.structs.replace(incident, state="repairing")
        parts.store.save(incident)
        lost = lost_requests(look_back(parts))
        say(parts, tell, "repair", f"repairing {plan.scope}: {len(plan.steps)} steps")
        outcomes = await repair(
            plan,
            parts.hands,
            parts.store.journal_for(incident.id),
            parts.clock,
            tell=lambda text: say(parts, tell, "step", text, incident=incident.id),
            settings=parts.settings,
            resume=resume,
        )
        repaired = succeeded(plan, outcomes)
        incident = msgspec.structs.replace(
            incident, outcomes=outcomes, state="repaired" if repaired else "failed"
        )
        parts.store.save(incident)
        if repaired:
            incident = await _prove(parts, incident, lost, tell)
        else:
            held = outcomes[-1].detail if outcomes else "no step ran"
            said = f"the repair stopped and needs a person: {held}"
            say(parts, tell, "failed", said, incident=incident.id)
    return await run_report(parts, incident, tell=tell)


async def _prove(
    parts: Parts, incident: Incident, lost: tuple[LostRequest, ...], tell: Tell
) -> Incident:
    began, ended = incident.outcomes[0].started_at, incident.outcomes[-1].ended_at
    scope = incident.plan.scope if incident.plan else ""
    said = f"{scope} restarted in {ended - began:.1f} s; proving it under load"
    say(parts, tell, "repaired", said, incident=incident.id)
    verification = await run_verify(parts, tell=tell, lost=lost)
    state = "closed" if verification.passed else "failed"
    incident = msgspec.structs.replace(incident, verification=verification, state=state)
    parts.store.save(incident)
    said = (
        f"proof {'holds' if verification.passed else 'falls short'}: "
        f"{verification.sequential_passed}/{verification.sequential_total} sequential, "
        f"{verification.sessions_passed}/{verification.sessions_total} sessions clean, "
        f"{verification.corrupted} corrupted"
    )
    say(parts, tell, "proof", said, incident=incident.id)
    return incident


async def run_verify(
    parts: Parts, *, tell: Tell, lost: tuple[LostRequest, ...] = ()
) -> Verification:
    """The proof asked for in `[verify]`, over the whole deployment."""
    return await verify(parts.settings.verify, parts.hands, parts.clock, tell=tell, lost=lost)


async def run_report(parts: Parts, incident: Incident, *, tell: Tell) -> Incident:
    """Write the incident into the living document and commit it."""
    _, facts = load_incident(parts.store.folder(incident.id))
    rendered = render(incident, facts)
    reference = await asyncio.to_thread(
        publish, rendered, parts.settings, parts.store.folder(incident.id)
    )
    incident = msgspec.structs.replace(incident, report=reference)
    parts.store.save(incident)
    where = f"{reference.path} @ {reference.commit}" if reference.commit else reference.path
    said = f"written down: {where}" + (f" ({reference.note})" if reference.note else "")
    say(parts, tell, "report", said, incident=incident.id)
    return incident


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


def look_back(parts: Parts) -> Facts:
    """The facts of the detect window without looking again."""
    return parts.store.facts(now=parts.clock.now(), window_s=DETECT_WINDOW_S)


def lost_requests(facts: Facts) -> tuple[LostRequest, ...]:
    """The requests that a restart will kill, as far as anyone but their clients can count them."""
    counted = []
    held = (
        (Role.ROUTER, v.ROUTER_ACTIVE_REQS, "in the router's hands"),
        (Role.PREFILL, v.INFLIGHT_QUEUE_REQS, "computed, waiting for their hand-off"),
        (Role.PREFILL, v.BOOTSTRAP_QUEUE_REQS, "waiting for the decode's metadata"),
        (Role.DECODE, v.TRANSFER_QUEUE_REQS, "waiting for their KV"),
        (Role.DECODE, v.RUNNING_REQS, "decoding"),
    )
    for role, name, what in held:
        for member in facts.deployment.of(role):
            seen = facts.latest(member.name, name)
            if seen is not None and isinstance(seen.value, int | float) and seen.value > 0:
                count = int(seen.value)
                counted.append(LostRequest(subject=member.name, count=count, detail=what))
    return tuple(counted)


async def _resume(parts: Parts, tell: Tell) -> None:
    """Finish what a killed Tandem left half done, before anything else."""
    for incident in parts.store.incidents():
        if incident.state == "repairing":
            say(parts, tell, "resume", f"resuming the repair of {incident.id}")
            await run_repair(parts, incident, tell=tell, resume=True)


__all__ = ["Outcome", "Parts", "investigate", "judge", "run_repair", "run_verify", "watch"]

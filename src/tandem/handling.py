"""One incident from its evidence to its report: seal, diagnose, plan, repair, verify, report.

For: what the loop does once something was found, and what a person asks for by hand.
Not for: noticing (`loop.py`), or knowing any engine, router or supervisor by name (`wiring.py`).
"""

import asyncio
from collections.abc import Sequence

import msgspec

from tandem.diagnose import diagnose
from tandem.errors import RefusedError
from tandem.facts import Facts
from tandem.parts import Parts, Tell, look_back, say
from tandem.plan import plan_repair
from tandem.ports import Harvest
from tandem.records import (
    Diagnosis,
    Finding,
    Incident,
    LostRequest,
    Member,
    Plan,
    Role,
    Verification,
)
from tandem.records import vocabulary as v
from tandem.repair import repair, succeeded
from tandem.report import render
from tandem.report.document import publish
from tandem.store import load_incident
from tandem.verify import verify


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
    return await verify(
        parts.settings.verify,
        parts.hands,
        parts.clock,
        tell=lambda text: say(parts, tell, "proving", text),
        lost=lost,
    )


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

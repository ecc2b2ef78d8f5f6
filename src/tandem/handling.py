"""One incident from its evidence to its report: seal, diagnose, plan, repair, verify, report.

For: what the loop does once something was found, and what a person asks for by hand.
Not for: noticing (`loop.py`), finishing what was cut short (`unfinished.py`), or knowing any
engine, router or supervisor by name (`wiring.py`).
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from tandem.diagnose import diagnose
from tandem.errors import Bug, RefusedError, TandemError
from tandem.facts import Facts
from tandem.lost import FRESH_S, lost_requests
from tandem.parts import Parts, Tell, look, say
from tandem.plan import plan_repair
from tandem.ports import Harvest
from tandem.records import (
    Diagnosis,
    Finding,
    Incident,
    Intent,
    LostRequest,
    Member,
    Observation,
    Outcome,
    Plan,
    Verification,
)
from tandem.records import vocabulary as v
from tandem.repair import repair, succeeded
from tandem.report import render
from tandem.report.document import publish
from tandem.store import load_incident
from tandem.verify import verify

STALLS = ("partial-stall", "silent-stall")
RECURS_WITHIN_S = 86_400.0
"""A finding of the same kind and subject later than this is another matter."""
STACKS_SHARE = 0.5
"""The share of `[evidence] seconds` that stacks may take; sealing has the rest."""


async def open_incident(
    parts: Parts,
    finding: Finding | None,
    hunch: str | None,
    tell: Tell,
    *,
    window_s: float | None = None,
    aloud: bool = True,
    opened_by: Literal["person", "watch"] = "person",
    begun: Incident | None = None,
) -> tuple[Incident, Facts]:
    """Evidence, seal, diagnosis and plan of one finding: nothing is touched.

    `window_s` is how far back the sealed observations reach, `[evidence] window_s` unless given.
    `aloud` tells a person the verdicts too; they are events of the store in any case. `begun` is
    the incident of this finding that a killed watch left: it goes on where it was. Gives the
    facts as sealed beside the incident. Raises `WorldError` when nothing could be sealed.
    """
    now = parts.clock.now()
    if begun is not None:
        said = f"going on with {begun.id}, which was cut short"
        say(parts, tell, "resume", said, incident=begun.id)
        incident = begun
    else:
        incident = Incident(
            id=parts.store.new_incident_id(now, finding.kind if finding else "investigation"),
            opened_at=now,
            deployment=parts.settings.deployment,
            finding=finding,
            hunch=hunch,
            opened_by=opened_by,
            recurrence_of=recurrence_of(parts.store.incidents(), finding),
        )
        parts.store.save(incident)
    try:
        if incident.seal is None:
            said = "taking evidence before anything is touched"
            say(parts, tell, "evidence", said, incident=incident.id)
            incident = await _sealed(parts, incident, window_s, tell)
        if incident.plan is None or incident.state != "advised":
            return judged(parts, incident, tell if aloud else _to_nobody)
        return load_incident(parts.store.folder(incident.id))
    except BaseException:
        # Whatever cut it short: a folder that stays "open" would never be forgotten.
        with contextlib.suppress(TandemError):
            parts.store.save(msgspec.structs.replace(incident, state="failed"))
        raise


async def judge_again(
    parts: Parts, incident_id: str, finding: Finding, tell: Tell
) -> tuple[Incident, Facts]:
    """Seal what is known by now beside the first evidence, and judge the same incident by it.

    For an undetermined verdict whose finding stands. Raises `WorldError` when nothing could be
    sealed; the incident stays as it was then.
    """
    incident = parts.store.incident(incident_id)
    incident = msgspec.structs.replace(incident, finding=finding)
    say(parts, tell, "evidence", f"judging {incident_id} again", incident=incident_id)
    incident = await _sealed(parts, incident, None, tell, again=True)
    return judged(parts, incident, tell)


async def note_recurrence(parts: Parts, incident_id: str, finding: Finding, tell: Tell) -> Incident:
    """Let an incident tell that its finding came back."""
    incident = parts.store.incident(incident_id)
    incident = msgspec.structs.replace(incident, finding=finding)
    parts.store.save(incident)
    return await write_down(parts, incident, tell=tell)


async def _sealed(
    parts: Parts,
    incident: Incident,
    window_s: float | None,
    tell: Tell,
    *,
    again: bool = False,
) -> Incident:
    """Take the last of the evidence and seal it, all within `[evidence] seconds`."""
    bound_s = parts.settings.evidence.seconds
    ends_at = parts.clock.now() + bound_s
    stacks = await _stacks(parts, bound_s * STACKS_SHARE)
    parts.store.append(stacks)
    if stacks.observations and all(one.missing for one in stacks.observations):
        # The night's one piece of evidence that a person can still make possible.
        said = f"no stacks could be taken: {stacks.observations[0].missing}"
        say(parts, tell, "evidence", said, incident=incident.id)
    apart = {
        one.subject
        for one in stacks.observations
        if one.name == v.STACK_CLUSTER and one.label == "2"
    }
    for one in stacks.observations:
        if one.name == v.STACK_RANKS and one.subject in apart:
            said = f"ranks of {one.subject}: {one.value}"
            say(parts, tell, "evidence", said, incident=incident.id)
    parts.store.append(await parts.collector.tick())
    now = parts.clock.now()
    seal = await asyncio.to_thread(
        parts.store.seal,
        incident,
        now=now,
        deadline_s=max(ends_at - now, bound_s * (1.0 - STACKS_SHARE)),
        window_s=window_s,
        again=again,
    )
    incident = msgspec.structs.replace(incident, seal=seal)
    parts.store.save(incident)
    said = f"evidence sealed: {seal.observations} observations, sha256 {seal.sha256[:12]}"
    say(parts, tell, "sealed", said, incident=incident.id)
    for left_out in seal.left_out:
        said = f"left out of the evidence: {left_out}"
        say(parts, tell, "left-out", said, incident=incident.id)
    return incident


def judged(parts: Parts, incident: Incident, tell: Tell) -> tuple[Incident, Facts]:
    """Diagnose and plan from the sealed folder alone."""
    _, facts = load_incident(parts.store.folder(incident.id))
    findings = (incident.finding,) if incident.finding else ()
    diagnosis = diagnose(facts, findings, parts.modes, incident.hunch)
    plan = plan_repair(diagnosis, incident.finding, facts, parts.settings.policy)
    incident = msgspec.structs.replace(incident, diagnosis=diagnosis, plan=plan, state="advised")
    parts.store.save(incident)
    _tell_diagnosis(parts, incident, diagnosis, plan, tell)
    return incident, facts


def _to_nobody(_: str) -> None:
    """Hear a sentence, and say nothing."""


def _tell_diagnosis(
    parts: Parts, incident: Incident, diagnosis: Diagnosis, plan: Plan, tell: Tell
) -> None:
    for out in diagnosis.ruled_out:
        said = f"ruled out {out.mode}: {out.because}"
        say(parts, tell, "ruled-out", said, incident=incident.id, mode=out.mode)
    said = f"cause: {diagnosis.cause or diagnosis.verdict}. {diagnosis.confidence_note}"
    say(parts, tell, "diagnosis", said, incident=incident.id, cause=diagnosis.cause)
    if diagnosis.hunch is not None:
        answer = diagnosis.hunch
        said = f"hunch “{answer.asked}” {answer.answer.replace('_', ' ')}: {answer.because}"
        say(parts, tell, "hunch", said, incident=incident.id)
    said = f"plan: {plan.scope}, {len(plan.steps)} steps. {plan.because}"
    say(parts, tell, "plan", said, incident=incident.id, scope=plan.scope)


async def _stacks(parts: Parts, bound_s: float) -> Harvest:
    """The stacks of every member; that they could not be had in time is evidence too."""
    members = parts.settings.deployment.members
    try:
        return await asyncio.wait_for(parts.take_stacks(members), bound_s)
    except TimeoutError:
        return _no_stacks(parts, members, f"they were not taken within {bound_s:g} s")
    # A broken tool must not keep the rest of the evidence from being sealed.
    except Exception as error:  # noqa: BLE001
        return _no_stacks(parts, members, f"taking them broke: {type(error).__name__}: {error}")


def _no_stacks(parts: Parts, members: Sequence[Member], why: str) -> Harvest:
    at = parts.clock.now()
    return Harvest(
        tuple(
            Observation(source="stack", subject=one.name, name=v.STACK, at=at, missing=why)
            for one in members
        )
    )


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
        if one.id != incident.id and one.outcomes and one.outcomes[-1].ended_at > hour_ago
    ]
    allowed = parts.settings.policy.repairs_per_hour
    if len(recent) >= allowed:
        return f"{len(recent)} repairs ran within the hour and the policy allows {allowed}."
    return None


async def run_repair(
    parts: Parts,
    incident: Incident,
    *,
    tell: Tell,
    facts: Facts | None = None,
    resume: bool = False,
) -> Incident:
    """Run an incident's plan under the repair lock, prove it, and write it down.

    `facts` are those of its seal, where they are at hand. Raises `RefusedError` when another repair
    holds the lock or there is nothing to run.
    """
    plan = incident.plan
    if plan is None or not plan.steps:
        raise RefusedError(
            f"Incident {incident.id} has no repair to run.",
            next_step=f"Read why: tandem plan {incident.id}.",
        )
    with parts.store.lock("repair"):
        # What is in flight now is what the first stop will kill.
        await look(parts)
        incident = msgspec.structs.replace(incident, state="repairing")
        parts.store.save(incident)
        say(parts, tell, "repair", f"repairing {plan.scope}: {len(plan.steps)} steps")
        outcomes = await _outcomes(parts, incident, plan, tell, resume=resume)
        repaired = succeeded(plan, outcomes)
        incident = msgspec.structs.replace(
            incident, outcomes=outcomes, state="repaired" if repaired else "failed"
        )
        parts.store.save(incident)
        if repaired:
            incident = await _prove(parts, incident, tell)
        else:
            held = outcomes[-1].detail if outcomes else "no step ran"
            said = f"the repair stopped and needs a person: {held}"
            say(parts, tell, "failed", said, incident=incident.id)
    return await write_down(parts, incident, tell=tell, facts=facts)


async def _outcomes(
    parts: Parts, incident: Incident, plan: Plan, tell: Tell, *, resume: bool
) -> tuple[Outcome, ...]:
    try:
        return await repair(
            plan,
            parts.hands,
            parts.store.journal_for(incident.id),
            parts.clock,
            tell=lambda text: say(parts, tell, "step", text, incident=incident.id),
            settings=parts.settings,
            resume=resume,
        )
    except (RefusedError, Bug):
        # This plan can never be carried out here: "repairing" would have it tried for ever.
        parts.store.save(msgspec.structs.replace(incident, state="failed"))
        raise


async def run_proof(parts: Parts, incident: Incident, *, tell: Tell) -> Incident:
    """Prove a repair whose proof was cut short, and write it down.

    Raises `RefusedError` when another repair holds the lock.
    """
    with parts.store.lock("repair"):
        incident = await _prove(parts, incident, tell)
    return await run_report(parts, incident, tell=tell)


async def _prove(parts: Parts, incident: Incident, tell: Tell) -> Incident:
    began, ended = incident.outcomes[0].started_at, incident.outcomes[-1].ended_at
    scope = incident.plan.scope if incident.plan else ""
    said = f"{scope} restarted in {ended - began:.1f} s; proving it under load"
    say(parts, tell, "repaired", said, incident=incident.id)
    verification = await run_verify(parts, tell=tell, lost=_lost(parts, incident))
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


def _lost(parts: Parts, incident: Incident) -> tuple[LostRequest, ...]:
    """The requests in flight just before the first stop, from what was collected then."""
    records = parts.store.journal_for(incident.id).records()
    stops = [one.at for one in records if isinstance(one, Intent) and one.step.startswith("stop:")]
    if not stops or incident.plan is None:
        return ()
    now = parts.clock.now()
    facts = parts.store.facts(now=now, window_s=now - stops[0] + FRESH_S)
    return lost_requests(facts.at(stops[0]), incident.plan)


async def run_report(
    parts: Parts, incident: Incident, *, tell: Tell, facts: Facts | None = None
) -> Incident:
    """Write the incident into the living document and commit it.

    `facts` are those of its seal; read from its folder when they are not at hand. Raises
    `WorldError` when the document cannot be written.
    """
    if facts is None:
        _, facts = load_incident(parts.store.folder(incident.id))
    rendered = render(incident, facts)
    reference = await asyncio.to_thread(
        publish, rendered, parts.settings, parts.store.folder(incident.id)
    )
    followed = incident.aftermath.statements if incident.aftermath else 0
    reference = msgspec.structs.replace(reference, state=incident.state, followed=followed)
    incident = msgspec.structs.replace(incident, report=reference)
    parts.store.save(incident)
    where = f"{reference.path} @ {reference.commit}" if reference.commit else reference.path
    said = f"written down: {where}" + (f" ({reference.note})" if reference.note else "")
    say(parts, tell, "report", said, incident=incident.id)
    return incident


def written(incident: Incident) -> bool:
    """Whether its report tells of the incident as it stands now."""
    report, after = incident.report, incident.aftermath
    if report is None or report.state not in ("", incident.state):
        return False
    return after is None or report.followed == after.statements


def recurrence_of(incidents: Sequence[Incident], finding: Finding | None) -> str | None:
    """The repaired and proven incident, of the day before, that a finding is again; or None.

    Same subject and kind; the two degrees of a stall are one kind.
    """
    for one in incidents:
        found, proof = one.finding, one.verification
        if finding is None or found is None or proof is None or one.state != "closed":
            continue
        alike = found.kind == finding.kind or {found.kind, finding.kind} <= set(STALLS)
        after_s = finding.onset_at - proof.ended_at
        if alike and found.subject == finding.subject and 0.0 < after_s <= RECURS_WITHIN_S:
            return one.id
    return None


async def write_down(
    parts: Parts, incident: Incident, *, tell: Tell, facts: Facts | None = None
) -> Incident:
    """Report it; a document that cannot be written is told, and undoes nothing of the rest."""
    try:
        return await run_report(parts, incident, tell=tell, facts=facts)
    except TandemError as error:
        say(parts, tell, "failed", str(error), incident=incident.id)
        return incident

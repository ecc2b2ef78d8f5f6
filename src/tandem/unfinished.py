"""What a Tandem that was killed or interrupted left half done, finished before anything new.

For: repairs cut short at any step, proofs cut short, reports never written, incidents that a killed
watch began. Not for: going on with the evidence of what still stands (`handling.open_incident`).
"""

import msgspec

from tandem.handling import judged, run_proof, run_repair, run_report, written
from tandem.parts import Parts, Tell, say
from tandem.records import Incident, Intent, Outcome, Plan, Record

RESUME_WITHIN_S = 3600.0
"""A repair or proof cut short longer ago than this speaks of another day."""


def unfinished(parts: Parts) -> list[Incident]:
    """The incidents that somebody began to repair and that have no end yet, newest first."""
    return [
        one
        for one in parts.store.incidents()
        if one.seal is not None
        and (one.state == "repairing" or (one.outcomes and not written(one)))
    ]


def begun(parts: Parts) -> list[Incident]:
    """The incidents that a watch opened and neither acted on nor wrote down, newest first."""
    return [
        one
        for one in parts.store.incidents()
        if one.opened_by == "watch"
        and one.finding is not None
        and not one.outcomes
        and one.report is None
        and one.state in ("open", "advised", "failed")
    ]


def orphans(parts: Parts) -> list[Incident]:
    """Those of them whose finding is over: nothing goes on with them but their own end."""
    known = {one.id for one in parts.store.open_findings()}
    return [
        one
        for one in begun(parts)
        if one.finding is not None
        and one.finding.id not in known
        and (one.state != "failed" or one.seal is not None)
    ]


async def finish(parts: Parts, incident: Incident, tell: Tell) -> Incident:
    """Resume its repair where that still makes sense, prove it, and write it down."""
    if incident.state == "repairing":
        refusal = await _why_not(parts, incident)
        if refusal is None:
            said = f"resuming the repair of {incident.id}"
            say(parts, tell, "resume", said, incident=incident.id)
            return await run_repair(parts, incident, tell=tell, resume=True)
        incident = _given_up(parts, incident, refusal, tell)
    elif incident.state == "repaired":
        if _age_s(parts, incident) <= RESUME_WITHIN_S:
            said = f"the proof of {incident.id} was cut short: proving it again"
            say(parts, tell, "resume", said, incident=incident.id)
            return await run_proof(parts, incident, tell=tell)
        incident = msgspec.structs.replace(incident, state="failed")
        parts.store.save(incident)
        said = f"the repair of {incident.id} was never proven; prove it: `tandem verify`"
        say(parts, tell, "failed", said, incident=incident.id)
    elif incident.seal is None:
        incident = msgspec.structs.replace(incident, state="failed")
        parts.store.save(incident)
        said = f"{incident.id} was over before its evidence was sealed"
        say(parts, tell, "failed", said, incident=incident.id)
        return incident
    elif incident.plan is None:
        incident, _ = judged(parts, incident, tell)
    return await run_report(parts, incident, tell=tell)


def _given_up(parts: Parts, incident: Incident, refusal: str, tell: Tell) -> Incident:
    outcomes = tuple(one for one in _records(parts, incident) if isinstance(one, Outcome))
    incident = msgspec.structs.replace(incident, outcomes=outcomes, state="failed")
    parts.store.save(incident)
    said = (
        f"the repair of {incident.id} was cut short and is not resumed: {refusal}. "
        "See how it stands (`tandem status`), then `tandem investigate`."
    )
    say(parts, tell, "failed", said, incident=incident.id)
    return incident


async def _why_not(parts: Parts, incident: Incident) -> str | None:
    """Why a repair must not go on: it is old, or a member it would stop has another life now."""
    age_s = _age_s(parts, incident)
    if age_s > RESUME_WITHIN_S:
        return f"its last step was {age_s / 60:.0f} min ago"
    intents = [one for one in _records(parts, incident) if isinstance(one, Intent)]
    begun = {one.step for one in intents}
    for step in incident.plan.steps if incident.plan and intents else ():
        if step.verb != "stop" or f"start:{step.target}" in begun:
            continue
        member = parts.settings.deployment.member(step.target)
        supervisor = parts.hands.supervisors.get(member.supervisor) if member else None
        if member is None or supervisor is None:
            return f"{step.target} is no longer a member that Tandem may restart"
        life = await supervisor.inspect(member)
        if life is not None and life.id != intents[0].incarnations.get(step.target):
            return f"somebody else started {step.target} since"
    return None


def _age_s(parts: Parts, incident: Incident) -> float:
    """Seconds since anything was last done for it."""
    times = [incident.seal.sealed_at] if incident.seal else [incident.opened_at]
    for record in _records(parts, incident):
        if isinstance(record, Intent):
            times.append(record.at)
        elif isinstance(record, Outcome):
            times.append(record.ended_at)
    return parts.clock.now() - max(times)


def _records(parts: Parts, incident: Incident) -> list[Record]:
    """Its journal since the plan was last begun."""
    records = parts.store.journal_for(incident.id).records()
    plans = [place for place, record in enumerate(records) if isinstance(record, Plan)]
    return records[plans[-1] :] if plans else records

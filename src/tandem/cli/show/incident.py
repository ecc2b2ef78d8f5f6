"""How an incident looks: in one row of the list, and whole, stage by stage.

For: `incidents`, `investigate`, `repair`. Not for: the report a person keeps (`tandem.report`).
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.diagnosis import diagnosis_view
from tandem.cli.show.finding import finding_view
from tandem.cli.show.plan import approval, outcomes_view, plan_view
from tandem.cli.show.times import ago, when
from tandem.cli.show.verification import verification_view
from tandem.cli.show.words import (
    LOUD,
    QUIET,
    block,
    indented,
    pairs,
    rows,
    spoken,
    styled,
)
from tandem.facts import Facts
from tandem.records import Incident
from tandem.report.aftermath_section import in_a_word


def incidents_view(incidents: Sequence[Incident], now: float) -> RenderableType:
    """List incidents, newest first: enough to recognise one by."""
    if not incidents:
        return Text("no incident yet")
    listed = [
        (
            incident.id,
            ago(incident.opened_at, now),
            _state(incident),
            Text(_cause(incident)),
        )
        for incident in incidents
    ]
    return rows("incident", "opened", "state", "cause", of=listed)


def _cause(incident: Incident) -> str:
    diagnosis = incident.diagnosis
    if diagnosis is None:
        return "not diagnosed"
    said = spoken(diagnosis.verdict)
    return f"{diagnosis.cause} ({said})" if diagnosis.cause else said


def incident_view(incident: Incident, facts: Facts, folder: Path, now: float) -> Group:
    """Show one incident whole, in the order of the stages."""
    parts: list[RenderableType] = [
        Text.assemble((incident.id, LOUD), ": ", _state(incident)),
        indented(pairs(_answers(incident, now))),
    ]
    if incident.finding is not None:
        parts.append(block("Finding", [finding_view(incident.finding, now)]))
    if incident.diagnosis is not None:
        parts.append(block("Diagnosis", [diagnosis_view(incident.diagnosis, facts)]))
    if incident.plan is not None:
        parts.append(block("Plan", [plan_view(incident.plan)]))
    if incident.outcomes:
        parts.append(block("Repair", [outcomes_view(incident.outcomes)]))
    if incident.verification is not None:
        parts.append(block("Verification", [verification_view(incident.verification)]))
    parts.append(block("Record", [pairs(_kept(incident, folder))]))
    if incident.plan is not None and incident.plan.steps and not incident.outcomes:
        parts += [Text(""), approval(incident.plan, f"tandem repair {incident.id} --approve")]
    return Group(*parts)


def _state(incident: Incident) -> Text:
    """The state; advice to do nothing is called that."""
    idle = incident.plan is not None and not incident.plan.steps
    return (
        Text("nothing proposed") if incident.state == "advised" and idle else styled(incident.state)
    )


def _answers(incident: Incident, now: float) -> list[tuple[str, RenderableType]]:
    """What a person asks first: what, since when, why, and what is done or to be done."""
    found, plan, proof = incident.finding, incident.plan, incident.verification
    what = "nothing wrong that detection could see; a person asked"
    if found is not None:
        what = f"{found.kind} on {found.subject} since {when(found.onset_at, now)}"
    about: list[tuple[str, RenderableType]] = [
        ("found", Text(what)),
        ("cause", Text(_cause(incident))),
    ]
    if incident.diagnosis is not None and incident.diagnosis.hunch is not None:
        hunch = incident.diagnosis.hunch
        about.append(("hunch", Text(f"“{hunch.asked}”: {spoken(hunch.answer)}")))
    if plan is not None and plan.steps:
        done = f"{len(incident.outcomes)} of {len(plan.steps)} steps were taken"
        became = done if incident.outcomes else f"{len(plan.steps)} steps, none taken"
        about.append(("repair", Text(f"{plan.scope}: {became}")))
    if proof is not None:
        about.append(("proof", Text("holds" if proof.passed else "falls short")))
    if since := in_a_word(incident.aftermath):
        about.append(("since", Text(since)))
    if incident.recurrence_of is not None:
        about.append(("again", Text(f"a recurrence of {incident.recurrence_of}")))
    return about


def _kept(incident: Incident, folder: Path) -> list[tuple[str, RenderableType]]:
    """Where the evidence and the report are."""
    about: list[tuple[str, RenderableType]] = [("folder", Text(str(folder)))]
    if incident.seal is not None:
        about.append(("evidence", Text(f"{incident.seal.observations} observations, sealed")))
        about.append(("sha256", Text(incident.seal.sha256)))
        about += [("left out", Text(what)) for what in incident.seal.left_out]
    if incident.report is not None:
        report = incident.report
        commit = Text(f" @ {report.commit}" if report.commit else " (not committed)", style=QUIET)
        about.append(("report", Text.assemble(report.path, commit)))
        if report.subject:
            about.append(("subject", Text(report.subject)))
        if report.note:
            about.append(("note", Text(report.note)))
    return about

"""Report: one incident as text for people, with every claim on its evidence.

For: `render`, the pure text of an incident: a Markdown section, a page, a commit subject. The same
incident and facts give the same bytes. Not for: files or git (`report/document.py`).
"""

from tandem.facts import Facts
from tandem.records import Incident, Rendered
from tandem.report.aftermath_section import in_a_word
from tandem.report.blocks import Block, Bullets, Page, Section, Strong, Table, Text, cited_in
from tandem.report.guidance import guidance
from tandem.report.markdown import markdown
from tandem.report.page import html
from tandem.report.repair_section import fix_and_verification
from tandem.report.sections import differential, evidence, root_cause, symptom
from tandem.report.subject import figures, subject
from tandem.report.words import cut, length, moment, plain

__all__ = ["render"]


def render(incident: Incident, facts: Facts) -> Rendered:
    """Write an incident down; `facts` are those of its sealed evidence."""
    sections = [symptom(incident, facts)]
    if incident.diagnosis is not None:
        sections += [differential(incident.diagnosis, facts), root_cause(incident.diagnosis)]
    sections.append(fix_and_verification(incident))
    advice = guidance(incident, facts)
    sections.append(Section("Operational guidance", (_advice(advice),)))
    page = Page(_title(incident), (_answers(incident),), tuple(sections))
    last = evidence(incident, facts, cited_in(page))
    page = Page(page.title, page.summary, (*sections, last))
    return Rendered(
        incident=incident.id,
        subject=subject(incident),
        markdown=markdown(page),
        html=html(page),
    )


def _advice(advice: tuple[Text, ...]) -> Block:
    return Bullets(advice or (("Nothing follows from what was seen.",),), numbered=bool(advice))


def _title(incident: Incident) -> str:
    found = incident.finding
    what = f"{plain(found.kind)} on {found.subject}" if found else "investigation"
    return f"{moment(incident.opened_at)}: {cut(what, 120)}"


def _answers(incident: Incident) -> Table:
    """The short answers on top: what a person wants to know first."""
    rows: list[tuple[Text, ...]] = [
        (("Incident",), (incident.id,)),
        (("State",), (_state(incident),)),
    ]
    diagnosis = incident.diagnosis
    if diagnosis is not None:
        cause = diagnosis.cause or "none named"
        rows.append((("Cause",), (Strong(cause), f" ({plain(diagnosis.verdict)})")))
        if diagnosis.hunch is not None:
            rows.append(
                (("Hunch",), (cut(diagnosis.hunch.asked, 120), ": ", plain(diagnosis.hunch.answer)))
            )
    if incident.outcomes and incident.plan is not None:
        took = length(incident.outcomes[-1].ended_at - incident.outcomes[0].started_at)
        rows.append((("Repair",), (f"restart of the {incident.plan.scope}, {took}",)))
    elif incident.plan is not None:
        what = "proposed, nothing was touched" if incident.plan.steps else "nothing to be done"
        rows.append((("Repair",), (f"{incident.plan.scope}: {what}",)))
    proof = incident.verification
    if proof is not None:
        held = "holds" if proof.passed else "falls short"
        rows.append((("Proof",), (f"{held}: {figures(proof)}",)))
    if since := in_a_word(incident.aftermath):
        rows.append((("Since",), (Strong(since),)))
    if incident.recurrence_of is not None:
        rows.append((("Again",), (f"a recurrence of {incident.recurrence_of}",)))
    return Table(("Question", "Answer"), tuple(rows))


def _state(incident: Incident) -> str:
    return {
        "advised": "advised, nothing was touched",
        "repaired": "repaired, not yet proven",
        "failed": "needs a person",
        "closed": "closed: repaired and proven",
    }.get(incident.state, incident.state)

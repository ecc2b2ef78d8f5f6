"""The report's fourth section: what was done, what was refused, what it cost, and the proof.

For: plan, outcomes and verification as blocks. Not for: the rest of the report (`sections.py`).
"""

from tandem.records import Incident, Outcome, Plan, Verification
from tandem.report.aftermath_section import aftermath_blocks
from tandem.report.blocks import Block, Bullets, Code, Paragraph, Section, Strong, Table, prose
from tandem.report.words import cut, length, plain, sentence

CAUTION = (
    "A restart of this breadth cures nearly everything: the recovery proves the repair, "
    "not the cause."
)
BAD_MOST = 12
"""Failed verification requests that are listed; the folder has all."""


def fix_and_verification(incident: Incident) -> Section:
    """The plan with what became of each step, then the proof."""
    blocks: list[Block] = []
    if incident.plan is None:
        blocks.append(Paragraph(("No repair was planned.",)))
    else:
        blocks += _plan(incident.plan, incident.outcomes)
    if incident.verification is not None:
        blocks += _proof(incident.verification)
    elif incident.outcomes:
        blocks.append(Paragraph((Strong("Not verified."),)))
    if incident.outcomes and incident.plan is not None and incident.plan.scope != "router":
        blocks.append(Paragraph((CAUTION,)))
    blocks += aftermath_blocks(incident)
    return Section("Fix and verification", tuple(blocks))


def _plan(plan: Plan, outcomes: tuple[Outcome, ...]) -> list[Block]:
    done = "" if outcomes or not plan.steps else " Nothing was touched."
    blocks: list[Block] = [
        Paragraph((Strong(f"Scope: {plan.scope}."), " ", *prose(sentence(plan.because)), done))
    ]
    ended = {outcome.step: outcome for outcome in outcomes}
    if plan.steps:
        rows = []
        for step in plan.steps:
            outcome = ended.get(step.id)
            if outcome is None:
                became, took, detail = ("not reached" if outcomes else "proposed"), "-", step.why
            else:
                became, detail = outcome.status, outcome.detail
                took = length(outcome.ended_at - outcome.started_at)
            rows.append(((Code(step.id),), (became,), (took,), prose(cut(detail))))
        blocks.append(Table(("Step", "Became", "Took", "Seen"), tuple(rows)))
    if plan.refused:
        blocks.append(Paragraph(("Smaller repairs, refused:",)))
        blocks.append(
            Bullets(
                tuple(
                    (Strong(rung.scope), ": ", *prose(sentence(rung.because)))
                    for rung in plan.refused
                )
            )
        )
    if plan.kept:
        blocks.append(Paragraph(("Kept as it is:",)))
        blocks.append(Bullets(tuple((Code(cut(kept, 200)),) for kept in plan.kept)))
    if plan.config_edit:
        blocks.append(Paragraph(("Would revert what is implicated; never applied unasked:",)))
        lines = plan.config_edit.splitlines()
        blocks.append(Bullets(tuple((Code(cut(line, 200)),) for line in lines)))
    if plan.costs:
        blocks.append(Paragraph(("Expected cost:",)))
        blocks.append(Bullets(tuple(prose(sentence(cost)) for cost in plan.costs)))
    return blocks


def _proof(proof: Verification) -> list[Block]:
    gap = "-" if proof.rescored_gap_max is None else f"{proof.rescored_gap_max:.3f}"
    failed = (
        "not shown" if proof.transfer_failed_delta is None else f"+{proof.transfer_failed_delta}"
    )
    inflight = "not shown" if proof.inflight_after is None else str(proof.inflight_after)
    took = length(proof.ended_at - proof.started_at)
    latency = length(proof.sequential_latency_s)
    rows = (
        ("sequential requests", f"{proof.sequential_passed}/{proof.sequential_total}"),
        ("their median latency", latency),
        ("sessions clean", f"{proof.sessions_passed}/{proof.sessions_total}"),
        ("sessions corrupted", str(proof.corrupted)),
        ("tokens re-scored", f"{proof.rescored_tokens}, largest gap {gap}"),
        ("failed hand-offs meanwhile", failed),
        ("hand-offs in flight afterwards", inflight),
        ("requests accounted for", str(len(proof.requests))),
    )
    blocks: list[Block] = [
        Paragraph(
            (
                Strong("The proof holds." if proof.passed else "The proof falls short."),
                f" It took {took}.",
            )
        ),
        Table(("Proof", "Figure"), tuple(((what,), (figure,)) for what, figure in rows)),
    ]
    bad = [one for one in proof.requests if one.status != "clean"]
    if bad:
        blocks.append(Paragraph((f"Requests that were not clean ({len(bad)}):",)))
        blocks.append(
            Bullets(
                tuple(
                    (f"{one.session}, turn {one.turn}: {plain(one.status)} ", Code(cut(one.detail)))
                    for one in bad[:BAD_MOST]
                )
            )
        )
    if proof.not_proven:
        blocks.append(Paragraph((Strong("Not proven:"),)))
        blocks.append(Bullets(tuple(prose(sentence(one)) for one in proof.not_proven)))
    if proof.lost:
        blocks.append(Paragraph(("Requests lost to the repair:",)))
        blocks.append(
            Bullets(
                tuple((f"{one.subject}: {one.count}, {cut(one.detail)}",) for one in proof.lost)
            )
        )
    return blocks

"""What a report says, section by section: symptom, diagnosis, cause, fix and proof, evidence.

For: turning an `Incident` and its `Facts` into blocks, every claim with the evidence it rests on.
Not for: how blocks look (`markdown.py`, `page.py`), or guidance (`guidance.py`).
"""

from itertools import groupby

from tandem.facts import Facts
from tandem.records import (
    Change,
    ChangeVerdict,
    Diagnosis,
    Finding,
    Incident,
    ModeVerdict,
    Observation,
    TestResult,
    Trait,
)
from tandem.report.blocks import (
    Block,
    Bullets,
    Cite,
    Code,
    Inline,
    Paragraph,
    Section,
    Strong,
    Table,
    Text,
    cites,
    prose,
)
from tandem.report.words import (
    changed,
    clock,
    cut,
    ended,
    length,
    moment,
    observed,
    plain,
    sentence,
)

WHEN = "When (UTC)"
ANSWERS = {"supports": "for", "contradicts": "against", "unknown": "missing"}
TIMELINE_MOST = 30
EVIDENCE_MOST = 80


def symptom(incident: Incident, facts: Facts) -> Section:
    """What was seen, by whom, since when, and the order of events."""
    found = incident.finding
    if found is None:
        return Section(
            "Symptom",
            (
                Paragraph(("Nothing was wrong that detection could see; a person asked.",)),
                *_timeline(incident, facts),
            ),
        )
    late = length(found.found_at - found.onset_at)
    lasted = f"was found {late} later{_came_back(found)}"
    return Section(
        "Symptom",
        (
            Paragraph(
                (
                    Strong(plain(found.kind)),
                    f" on {found.subject}: ",
                    *prose(sentence(found.summary)),
                )
            ),
            Paragraph((f"It began at {moment(found.onset_at)}, {lasted}.",)),
            Bullets(
                tuple(
                    (f"{witness.side}: ", *prose(cut(witness.statement)), *cites(witness.evidence))
                    for witness in found.witnesses
                )
            ),
            *_timeline(incident, facts),
        ),
    )


def _came_back(found: Finding) -> str:
    times = len(found.recurred_at)
    if not times:
        return ""
    often = "once" if times == 1 else f"{times} times"
    return f", and cleared and came back {often}, last at {moment(found.recurred_at[-1])}"


def _timeline(incident: Incident, facts: Facts) -> tuple[Block, ...]:
    told = [(change.at, change.subject, changed(change)) for change in facts.changes]
    if incident.finding is not None:
        told.append((incident.finding.onset_at, "", "first sign of the symptom"))
        told.append((incident.finding.found_at, "", "found"))
    if incident.seal is not None:
        told.append((incident.seal.sealed_at, "", "evidence sealed"))
    if incident.outcomes:
        told.append((incident.outcomes[0].started_at, "", "repair began"))
        told.append((incident.outcomes[-1].ended_at, "", "repair ended"))
    if incident.verification is not None:
        told.append((incident.verification.started_at, "", "verification began"))
        told.append((incident.verification.ended_at, "", "verification ended"))
    told.sort(key=lambda one: one[0])
    rows: list[tuple[Text, ...]] = []
    for (when, subject), of in groupby(told, key=lambda one: (clock(one[0], facts.now), one[1])):
        what = ", ".join(said for _, _, said in of)
        rows.append(((when,), prose(cut(f"{subject}: {what}" if subject else what))))
    kept = rows[-TIMELINE_MOST:]
    if not kept:
        return ()
    table = Table((WHEN, "What"), tuple(kept))
    left = len(rows) - len(kept)
    return (Paragraph((f"{left} earlier events are in the folder.",)), table) if left else (table,)


def differential(diagnosis: Diagnosis, facts: Facts) -> Section:
    """Every mode's verdict, the hunch, the judged changes, and what each mode's tests said."""
    blocks: list[Block] = [
        Table(
            ("Failure mode", "Standing", "Because"),
            tuple(
                (
                    (Strong(mode.mode),) if mode.mode == diagnosis.cause else (mode.mode,),
                    (plain(mode.standing),),
                    (*prose(cut(mode.because, 300)), *cites(_decided_by(mode), 3)),
                )
                for mode in diagnosis.modes
            ),
        )
    ]
    if diagnosis.hunch is not None:
        blocks.append(Paragraph(_hunch(diagnosis)))
    blocks += _ledger(diagnosis, facts)
    answers = tuple(said for mode in diagnosis.modes for said in _tests(mode, diagnosis.cause))
    if answers:
        blocks += [Paragraph(("What the tests said:",)), Bullets(answers)]
    return Section("Differential diagnosis", tuple(blocks))


def _decided_by(mode: ModeVerdict) -> tuple[int, ...]:
    """The evidence of the test whose sentence the verdict repeats."""
    return next((one.evidence for one in mode.tests if one.because == mode.because), ())


def _tests(mode: ModeVerdict, cause: str | None) -> list[Text]:
    """An item each for what speaks for a mode (the root cause says it), against it, and missing."""
    items: list[Text] = []
    for answer, name in ANSWERS.items():
        if mode.mode == cause and answer == "supports":
            continue
        parts: list[Inline] = []
        for test in mode.tests:
            if test.answer == answer:
                parts += ["; " if parts else "", *_test(test)]
        if parts:
            items.append((Strong(mode.mode), f", {name}: ", *parts))
    return items


def _test(test: TestResult) -> Text:
    if test.answer == "unknown":
        wanted = f" (would tell: {cut(test.collect, 200)})" if test.collect else ""
        return (*prose(cut(test.because, 300)), wanted, *cites(test.evidence, 2))
    return (f"{test.strength}: ", *prose(cut(test.because, 300)), *cites(test.evidence, 3))


def _hunch(diagnosis: Diagnosis) -> Text:
    hunch = diagnosis.hunch
    if hunch is None:
        return ()
    understood = f", understood as {hunch.matched}" if hunch.matched else ""
    return (
        "The hunch ",
        Code(cut(hunch.asked, 120)),
        f"{understood}: ",
        Strong(plain(hunch.answer)),
        ". ",
        *prose(sentence(hunch.because)),
        *cites(hunch.evidence),
    )


def _ledger(diagnosis: Diagnosis, facts: Facts) -> list[Block]:
    if not diagnosis.changes:
        return [Paragraph(("No change is in the ledger of this window.",))]
    rows = {change.id: change for change in facts.changes}
    return [
        Paragraph(("Every change in the ledger, judged:",)),
        Table(
            (WHEN, "Member", "Change", "Verdict", "Because"),
            tuple(_judged(one, rows.get(one.change), facts) for one in diagnosis.changes),
        ),
    ]


def _judged(judged: ChangeVerdict, change: Change | None, facts: Facts) -> tuple[Text, ...]:
    what = changed(change) if change is not None else judged.what or "restarted"
    because = cut(judged.because, 300)
    inferred = " (inferred)" if judged.inferred and "inferred" not in because else ""
    verdict: Inline = Strong("implicated") if judged.verdict == "implicated" else judged.verdict
    return (
        (clock(judged.at, facts.now),),
        (judged.subject,),
        (what if change is None or not change.what else Code(what),),
        (verdict,),
        (*prose(because), inferred, *cites(judged.evidence, 3)),
    )


def root_cause(diagnosis: Diagnosis) -> Section:
    """The cause with its confidence, and what would settle it."""
    leading = next((mode for mode in diagnosis.modes if mode.mode == diagnosis.cause), None)
    if diagnosis.cause is None:
        said = "No cause is named" if diagnosis.verdict == "none" else "The cause is undetermined"
        first: Text = (Strong(said), f" ({plain(diagnosis.verdict)}).")
    else:
        mechanism = f", mechanism: {diagnosis.mechanism}" if diagnosis.mechanism else ""
        kind = f", of the class {diagnosis.incident_class}" if diagnosis.incident_class else ""
        first = (Strong(diagnosis.cause), f" ({plain(diagnosis.verdict)}){kind}{mechanism}.")
    blocks: list[Block] = [Paragraph(first)]
    if leading is not None:
        rests_on = tuple(_test(test) for test in leading.tests if test.answer == "supports")
        blocks += [Paragraph(("What speaks for it:",)), Bullets(rests_on)] if rests_on else []
    if diagnosis.confidence_note:
        blocks.append(Paragraph(("Confidence: ", *prose(ended(diagnosis.confidence_note)))))
    if diagnosis.next_observation and diagnosis.next_observation not in diagnosis.confidence_note:
        blocks.append(
            Paragraph(("What would settle it: ", *prose(ended(diagnosis.next_observation))))
        )
    return Section("Root cause", tuple(blocks))


def evidence(incident: Incident, facts: Facts, cited: tuple[int, ...]) -> Section:
    """Where the evidence lies, its hash, what did not fit, and what each citation says."""
    seal = incident.seal
    blocks: list[Block] = []
    if seal is None:
        blocks.append(Paragraph(("The evidence was not sealed.",)))
    else:
        folder = Code(f".tandem/incidents/{incident.id}")
        blocks.append(
            Paragraph(
                (
                    "Sealed in ",
                    folder,
                    f": {seal.observations} observations, {seal.size_bytes} bytes, sha256 ",
                    Code(seal.sha256),
                    ".",
                )
            )
        )
        blocks.append(Bullets(tuple(("left out: ", cut(one, 200)) for one in seal.left_out)))
    if incident.diagnosis is not None:
        blocks.append(
            Paragraph(("Judged with knowledge ", Code(incident.diagnosis.knowledge_version), "."))
        )
    shown_rows = cited[:EVIDENCE_MOST]
    blocks.append(
        Table(
            ("Evidence", WHEN, "Subject", "What it says"),
            tuple(_evidence_row(number, facts) for number in shown_rows),
        )
    )
    if len(cited) > len(shown_rows):
        left = len(cited) - len(shown_rows)
        blocks.append(Paragraph((f"{left} further citations are in the folder.",)))
    return Section("Evidence", tuple(blocks))


def _evidence_row(number: int, facts: Facts) -> tuple[Text, ...]:
    said: Observation | Change | Trait | None = facts.observation(number)
    if said is None:
        said = next((change for change in facts.changes if change.id == number), None)
    if said is None:
        said = next((trait for trait in facts.traits if trait.id == number), None)
    if said is None:
        return ((Cite(number),), ("-",), ("-",), ("not in the sealed window",))
    return ((Cite(number),), (clock(said.at, facts.now),), (said.subject,), _what(said))


def _what(said: Observation | Change | Trait) -> Text:
    if isinstance(said, Change):
        what = changed(said)
        known = f" (known from {said.how_known or 'the ledger'})"
        return (Code(what) if said.what else what, known)
    label = f"[{cut(said.label, 80)}]" if said.label else ""
    if isinstance(said, Observation) and said.missing is not None:
        return (f"{said.source}: {said.name}{label} not seen: ", Code(cut(said.missing)))
    source = f"{said.source}: " if isinstance(said, Observation) else "trait: "
    return (f"{source}{said.name}{label} = ", Code(observed(said.name, said.value)))

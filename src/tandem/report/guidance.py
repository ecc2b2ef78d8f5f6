"""What to do from now on, drawn from this incident's own evidence.

For: the operational guidance of a report: what never to do, what to watch, what to have ready, and
where this report's claim ends. Not for: general advice; a sentence without evidence is left out.
"""

from tandem.facts import Facts
from tandem.records import Finding, Incident, Member, Role
from tandem.records import vocabulary as v
from tandem.report.blocks import Code, Inline, Text, cites, prose
from tandem.report.words import cut, ended

READY_MOST = 4
LIVES = ("", "restart", "start", "stop")
"""What a change is called that is an event in a member's life, not a setting."""
IN_ORDER = "Restart the pair in order: stop decode, stop prefill, start prefill, start decode."
UNTRUE = "Do not trust health endpoints: all answered 200 between the first sign and the finding"
EARLY = {
    v.TRANSFER_FAILED_TOTAL: "failed hand-offs",
    v.BOOTSTRAP_FAILED_TOTAL: "failed bootstraps",
    v.ABORTED_TOTAL: "aborted requests",
}


def guidance(incident: Incident, facts: Facts) -> tuple[Text, ...]:
    """The sentences, most binding first."""
    found = incident.finding
    said = _never_alone(facts, incident)
    if found is not None:
        said += _early_counters(facts, found)
        said += _untrue_health(facts, found)
    said += _have_ready(incident)
    said += _limit(incident)
    return tuple(said)


def _never_alone(facts: Facts, incident: Incident) -> list[Text]:
    said: list[Text] = []
    judged = incident.diagnosis.changes if incident.diagnosis else ()
    blamed = {one.subject for one in judged if one.verdict == "implicated" and one.what in LIVES}
    prefills = facts.deployment.of(Role.PREFILL)
    prefill = prefills[0].name if len(prefills) == 1 else "its prefill"
    for decode in facts.deployment.of(Role.DECODE):
        trait = facts.trait(decode.name, v.T_DECODE_ALONE_RESTART_HURTS)
        hurts = trait is not None and trait.value is True
        if not hurts and decode.name not in blamed:
            continue
        because = f": {cut(trait.because)}" if trait is not None and trait.because else ""
        rule = f"Never restart {decode.name} alone against a long-running {prefill}{because}. "
        said.append((rule + IN_ORDER,))
    return said


def _early_counters(facts: Facts, found: Finding) -> list[Text]:
    said: list[Text] = []
    for member in _engines(facts):
        moved: list[Inline] = []
        for name, what in EARLY.items():
            rows = [one for one in facts.numbers(member.name, name) if one.at <= found.found_at]
            if len(rows) < 2 or rows[-1].value <= rows[0].value:
                continue
            grown = rows[-1].value - rows[0].value
            moved += [
                ", " if moved else "",
                Code(name),
                f" ({grown:.0f} {what}",
                *cites([rows[0].id, rows[-1].id]),
                ")",
            ]
        if moved:
            before = f"Watch what {member.name} counted before this was found: "
            said.append((before, *moved, "."))
        held = [
            one
            for one in facts.numbers(member.name, v.INFLIGHT_QUEUE_REQS)
            if one.at <= found.found_at
        ]
        if held and held[-1].value > 0:
            said.append(
                (
                    "Watch the floor of ",
                    Code(v.INFLIGHT_QUEUE_REQS),
                    f" of {member.name}: hand-offs that never leave it are lost slots",
                    *cites([held[-1].id]),
                    ".",
                )
            )
    return said


def _untrue_health(facts: Facts, found: Finding) -> list[Text]:
    seen = [
        row
        for member in _engines(facts)
        for row in facts.rows(member.name, v.HEALTH_STATUS)
        if found.onset_at <= row.at <= found.found_at
    ]
    if not seen or any(row.value != 200 for row in seen):
        return []
    return [
        (
            UNTRUE,
            *cites([seen[0].id, seen[-1].id]),
            ". Keep ",
            Code("tandem watch"),
            ", or another watchdog that completes real requests, running.",
        )
    ]


def _have_ready(incident: Incident) -> list[Text]:
    """What tests could not see this time."""
    if incident.diagnosis is None:
        return []
    wanted: list[str] = []
    for mode in incident.diagnosis.modes:
        if mode.standing in ("confirmed", "ruled_out"):
            continue
        wanted += [
            test.collect
            for test in mode.tests
            if test.answer == "unknown"
            and test.collect
            and test.collect not in wanted
            # What would settle it stands in the limit of the report.
            and test.collect != incident.diagnosis.next_observation
        ]
    return [("Have ready for the next time: ", *prose(ended(one))) for one in wanted[:READY_MOST]]


def _limit(incident: Incident) -> list[Text]:
    diagnosis = incident.diagnosis
    if diagnosis is None or diagnosis.verdict == "none":
        return []
    look = (
        f" Observe first: {ended(diagnosis.next_observation)}" if diagnosis.next_observation else ""
    )
    if diagnosis.cause is None:
        return [prose(f"If it recurs, the cause is still open.{look}")]
    blamed = [one for one in diagnosis.changes if one.verdict == "implicated"]
    names = ", ".join(sorted({_named(one.subject, one.what) for one in blamed}))
    without = f"without what is implicated here ({names})" if names else "without the signs above"
    return [
        prose(f"The limit of this report: if it recurs {without}, the cause is another one.{look}")
    ]


def _named(subject: str, what: str) -> str:
    return f"restarts of {subject}" if what in LIVES else f"{what} of {subject}"


def _engines(facts: Facts) -> list[Member]:
    return [member for member in facts.deployment.members if member.role is not Role.ROUTER]

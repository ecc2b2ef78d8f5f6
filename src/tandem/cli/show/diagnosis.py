"""How a diagnosis looks: the verdict, the differential, the changes, the hunch, what to look at.

For: `diagnose`, `investigate`, `incidents show`. Not for: judging.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.evidence import evidence
from tandem.cli.show.times import utc
from tandem.cli.show.words import (
    LOUD,
    QUIET,
    STYLES,
    block,
    indented,
    pairs,
    rows,
    spoken,
    styled,
)
from tandem.facts import Facts
from tandem.records import ChangeVerdict, Diagnosis, ModeVerdict, TestResult
from tandem.report.words import changed

STRENGTHS = ("decisive", "strong", "moderate", "weak")
ANSWERS = (("supports", "for"), ("contradicts", "against"), ("unknown", "missing"))


def diagnosis_view(diagnosis: Diagnosis, facts: Facts) -> Group:
    """Show the whole diagnosis; `facts` give times and the values that evidence cites."""
    return Group(
        verdict_view(diagnosis),
        block("Differential", _differential(diagnosis)),
        block("Changes", _changes(diagnosis, facts)),
        block("Hunch", _hunch(diagnosis)),
        block("Next observation", _next(diagnosis)),
    )


def verdict_view(diagnosis: Diagnosis) -> Group:
    """Show the verdict in a few lines: what it is, on whom, how sure and why not surer."""
    headline = Text.assemble(
        (spoken(diagnosis.verdict), STYLES.get(diagnosis.verdict, "")),
        (f": {diagnosis.cause}" if diagnosis.cause else "", LOUD),
    )
    about: list[tuple[str, RenderableType]] = []
    if diagnosis.subject:
        about.append(("on", Text(diagnosis.subject)))
    if diagnosis.incident_class:
        about.append(("class", Text(diagnosis.incident_class)))
    if diagnosis.mechanism:
        about.append(("mechanism", Text(diagnosis.mechanism)))
    about.append(("certainty", Text(diagnosis.confidence_note)))
    return Group(headline, indented(pairs(about)))


def _differential(diagnosis: Diagnosis) -> list[RenderableType]:
    """One aligned line per mode, and below it the sentence that decided it."""
    if not diagnosis.modes:
        return []
    width = max(len(mode.mode) for mode in diagnosis.modes)
    head = f"{'standing':<14}  {'failure mode':<{width}}  {'for':<12}{'against':<12}missing"
    lines: list[RenderableType] = [Text(head, style=QUIET)]
    for mode in diagnosis.modes:
        counts = [_count(mode.tests, answer) for answer, _ in ANSWERS]
        line = styled(mode.standing)
        line.pad_right(16 - len(line))
        line.append(f"{mode.mode:<{width}}  {counts[0]:<12}{counts[1]:<12}{counts[2]}")
        lines.append(line)
        if mode.standing != "untestable":
            lines.append(indented(Text(mode.because, style=QUIET), 16))
    return [*lines, Text("`--why MODE` shows the tests and the observations they rest on.", QUIET)]


def _count(tests: Sequence[TestResult], answer: str) -> str:
    """Say how many tests gave an answer, and the greatest strength among them: `3 strong`."""
    found = [test.strength for test in tests if test.answer == answer]
    if not found:
        return "-"
    strongest = min(found, key=STRENGTHS.index)
    return str(len(found)) if answer == "unknown" else f"{len(found)} {strongest}"


def why_view(mode: ModeVerdict, facts: Facts) -> Group:
    """Show one mode down to the observations: every test, its reason, its evidence with values."""
    headline = Text.assemble((mode.mode, LOUD), ": ", styled(mode.standing))
    about = pairs(
        [
            ("because", Text(mode.because)),
            ("class", Text(mode.incident_class)),
            ("score", Text(f"{mode.score:+.2f} log-odds; compare within this diagnosis only")),
            ("repair", Text(f"scope {mode.scope}")),
        ]
    )
    parts: list[RenderableType] = [headline, indented(about)]
    for answer, name in ANSWERS:
        tests = [test for test in mode.tests if test.answer == answer]
        views = [_test(test, facts) for test in tests]
        parts.append(block(f"{name.capitalize()} ({len(views)})", views))
    return Group(*parts)


def _test(test: TestResult, facts: Facts) -> Group:
    views: list[RenderableType] = [
        Text.assemble((test.test, LOUD), f" ({test.strength})"),
        indented(Text(test.because)),
    ]
    if test.collect:
        views.append(indented(Text(f"would be answered by: {test.collect}")))
    if test.evidence:
        views.append(indented(evidence(test.evidence, facts)))
    return Group(*views)


def _unsaid(change: ChangeVerdict) -> bool:
    return change.inferred and "(inferred)" not in change.because


def _changes(diagnosis: Diagnosis, facts: Facts) -> list[RenderableType]:
    if not diagnosis.changes:
        return []
    known = {one.id: changed(one) for one in facts.changes}
    listed = [
        (
            utc(change.at, facts.now),
            change.subject,
            styled(change.verdict),
            Text.assemble(
                known.get(change.change, change.what or "-"),
                (f"\n{change.because}{' (inferred)' if _unsaid(change) else ''}", QUIET),
            ),
        )
        for change in diagnosis.changes
    ]
    return [rows("when", "member", "verdict", "change, and because", of=listed)]


def _hunch(diagnosis: Diagnosis) -> list[RenderableType]:
    hunch = diagnosis.hunch
    if hunch is None:
        return []
    answered = Text.assemble(f"“{hunch.asked}”: ", (spoken(hunch.answer), LOUD))
    if hunch.matched:
        answered.append(f" (understood as {hunch.matched})")
    return [answered, Text(hunch.because)]


def _next(diagnosis: Diagnosis) -> list[RenderableType]:
    """What to look at next, unless the certainty has said it already."""
    wanted = diagnosis.next_observation
    return [Text(wanted)] if wanted and wanted not in diagnosis.confidence_note else []

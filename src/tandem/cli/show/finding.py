"""How findings look: what is wrong, since when, and both witnesses.

For: `detect`, `investigate`, `incidents show`. Not for: detecting.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.times import duration, when
from tandem.cli.show.words import BAD, DOUBT, GOOD, LOUD, QUIET, indented, pairs
from tandem.records import Finding

CITED_MAX = 4
"""Observations named of each witness; --json has all."""


def finding_view(finding: Finding, now: float) -> Group:
    """Show one finding with its witnesses."""
    style = GOOD if finding.closed_at is not None else BAD if finding.actionable else DOUBT
    noticed = f"{duration(finding.found_at - finding.onset_at)} later"
    about: list[tuple[str, RenderableType]] = [
        ("what", Text(finding.summary)),
        ("since", Text(f"{when(finding.onset_at, now)}, found {noticed}")),
    ]
    if finding.recurred_at:
        about.append(("came back", Text(when(finding.recurred_at[-1], now))))
    if finding.closed_at is not None:
        about.append(("cleared", Text(when(finding.closed_at, now))))
    if not finding.actionable:
        about.append(("told only", Text("a repair is never planned for it")))
    for witness in finding.witnesses:
        cited = " ".join(f"#{number}" for number in witness.evidence[:CITED_MAX])
        if len(witness.evidence) > CITED_MAX:
            cited += f" and {len(witness.evidence) - CITED_MAX} more"
        said = Text.assemble(witness.statement, (f" {cited}" if cited else "", QUIET))
        about.append((f"{witness.side} says", said))
    return Group(
        Text.assemble((finding.kind, f"{LOUD} {style}"), f" on {finding.subject}"),
        indented(pairs(about)),
    )


def findings_view(findings: Sequence[Finding], now: float) -> Group:
    """Show every finding, or say that there is none."""
    if not findings:
        return Group(Text("nothing is found wrong", style=GOOD))
    return Group(*(finding_view(finding, now) for finding in findings))

"""How one sweep of collect looks: what was seen, and with equal rank what could not be.

For: `collect`. Not for: collecting.
"""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.evidence import value_text
from tandem.cli.show.times import utc
from tandem.cli.show.words import DOUBT, block, rows
from tandem.ports import Harvest
from tandem.records import Change, Observation, Trait
from tandem.report.words import changed


def sweep_view(harvest: Harvest, now: float) -> Group:
    """Show one harvest: a headline of counts, then missing, seen, changes and traits."""
    missing = [one for one in harvest.observations if one.missing is not None]
    seen = len(harvest.observations) - len(missing)
    headline = f"{seen} things seen, {len(missing)} could not be"
    return Group(
        Text(headline, style=DOUBT if missing else ""),
        block("Missing", _missing(missing)),
        block("Seen", _seen(harvest.observations)),
        block("Changes", _changes(harvest.changes, now)),
        block("Traits", _traits(harvest.traits)),
    )


def _missing(observations: Sequence[Observation]) -> list[RenderableType]:
    """One row per member, source and reason, with the names of what it hid."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in observations:
        named = f"{one.name}[{one.label}]" if one.label else one.name
        found.setdefault((one.subject, one.source, one.missing or ""), []).append(named)
    listed = [
        (subject, source, Text.assemble((why, DOUBT), f": {', '.join(names)}"))
        for (subject, source, why), names in found.items()
    ]
    return [rows("subject", "source", "why, and what of it", of=listed)] if listed else []


def _seen(observations: Sequence[Observation]) -> list[RenderableType]:
    """One row per member and source; what is labelled is gathered, counts of nothing are left."""
    found: dict[tuple[str, str], list[str]] = {}
    seen = [one for one in observations if one.missing is None]
    seen.sort(key=lambda one: (one.subject, one.source, one.name, one.label))
    for (subject, source, name), of in groupby(
        seen, lambda one: (one.subject, one.source, one.name)
    ):
        every = list(of)
        told = [one for one in every if not (one.label and one.value == 0)]
        said = ", ".join(f"{one.label} {value_text(one.value, name=name)}".strip() for one in told)
        left = f"{len(every) - len(told)} are 0" if len(told) < len(every) else ""
        what = "; ".join(part for part in (said, left) if part)
        labelled = bool(every[0].label)
        found.setdefault((subject, source), []).append(
            f"{name}: {what}" if labelled else f"{name} {what}"
        )
    listed = [(who, source, Text("; ".join(said))) for (who, source), said in sorted(found.items())]
    return [rows("subject", "source", "seen", of=listed)] if listed else []


def _changes(changes: Sequence[Change], now: float) -> list[RenderableType]:
    listed = [
        (utc(one.at, now), one.subject, Text(f"{changed(one)} (known from {one.how_known})"))
        for one in changes
    ]
    return [rows("when", "member", "change", of=listed)] if listed else []


def _traits(traits: Sequence[Trait]) -> list[RenderableType]:
    """One row per member; what is known of many flags or gauges is counted, --json has it all."""
    found: dict[str, list[str]] = {}
    many: dict[tuple[str, str], int] = {}
    for one in traits:
        if one.label:
            many[one.subject, one.name] = many.get((one.subject, one.name), 0) + 1
        else:
            said = f"{one.name} {value_text(one.value, name=one.name)}"
            found.setdefault(one.subject, []).append(said)
    for (subject, name), count in many.items():
        found.setdefault(subject, []).append(f"{name} known of {count}")
    listed = [(subject, Text("; ".join(said))) for subject, said in found.items()]
    return [rows("subject", "known of it", of=listed)] if listed else []

"""How one sweep of collect looks: what was seen, and with equal rank what could not be.

For: `collect`. Not for: collecting.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.evidence import value_text
from tandem.cli.show.times import utc
from tandem.cli.show.words import DOUBT, block, rows
from tandem.ports import Harvest
from tandem.records import Change, Observation, Trait


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
    listed = [
        (one.subject, one.source, one.name, Text(one.missing or "", style=DOUBT))
        for one in observations
    ]
    return [rows("subject", "source", "name", "why", of=listed)] if listed else []


def _seen(observations: Sequence[Observation]) -> list[RenderableType]:
    """One row per member and source; what is labelled is gathered, counts of nothing are left."""
    found: dict[tuple[str, str], list[str]] = {}
    none: dict[tuple[str, str, str], int] = {}
    for one in sorted(observations, key=lambda one: (one.subject, one.source, one.name, one.label)):
        if one.missing is not None:
            continue
        if one.label and one.value == 0:
            none[one.subject, one.source, one.name] = (
                none.get((one.subject, one.source, one.name), 0) + 1
            )
            continue
        named = f"{one.name}[{one.label}]" if one.label else one.name
        said = f"{named} {value_text(one.value, name=one.name)}"
        found.setdefault((one.subject, one.source), []).append(said)
    for (subject, source, name), count in none.items():
        found.setdefault((subject, source), []).append(f"{count} of {name} are 0")
    listed = [(who, source, Text("; ".join(said))) for (who, source), said in sorted(found.items())]
    return [rows("subject", "source", "seen", of=listed)] if listed else []


def _changes(changes: Sequence[Change], now: float) -> list[RenderableType]:
    listed = [
        (
            utc(one.at, now),
            one.subject,
            f"{one.kind} {one.what}".strip(),
            Text(f"{one.before or '-'} -> {one.after or '-'}  ({one.how_known})"),
        )
        for one in changes
    ]
    return [rows("when", "member", "change", "before -> after", of=listed)] if listed else []


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

"""How evidence looks: one cited record a line, with its id, its time, and its value or its lack.

For: `--why` and every list of observations. Not for: choosing what counts as evidence.
"""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tandem.cli.show.times import utc
from tandem.cli.show.words import DOUBT, QUIET, rows
from tandem.facts import Facts
from tandem.records import Change, Observation, Trait, Value
from tandem.report.words import changed

VALUE_COLUMNS = 60
"""A longer value is cut; the sealed file has it whole."""


def evidence(ids: Sequence[int], facts: Facts) -> Table:
    """Show the cited records in the order of their ids; one that is not in `facts` says so."""
    rest: dict[int, Change | Trait] = {one.id: one for one in facts.traits}
    rest |= {one.id: one for one in facts.changes}
    lines = [
        _line(number, facts.observation(number) or rest.get(number), facts.now)
        for number in sorted(set(ids))
    ]
    return rows("", "", "", "", of=lines)


def _line(
    number: int, record: Observation | Change | Trait | None, now: float
) -> tuple[Text, str, str, Text]:
    cited = Text(f"#{number}", style=QUIET)
    if record is None:
        return cited, "", "", Text("not in this window", style=DOUBT)
    if isinstance(record, Change):
        return cited, utc(record.at, now), record.subject, Text(changed(record))
    named = f"{record.name}[{record.label}]" if record.label else record.name
    if isinstance(record, Observation) and record.missing is not None:
        return (
            cited,
            utc(record.at, now),
            record.subject,
            Text(f"{named}: {record.missing}", style=DOUBT),
        )
    said = Text(f"{named} = {value_text(record.value, name=record.name)}")
    if isinstance(record, Trait) and record.because:
        said.append(f" (trait: {record.because})", style=QUIET)
    return cited, utc(record.at, now), record.subject, said


def value_text(value: Value, columns: int = VALUE_COLUMNS, *, name: str = "") -> str:
    """Write a value on one line of at most `columns` characters, in the unit its name ends in."""
    if name.endswith("_at") and isinstance(value, int | float):
        text = utc(value)
    elif name.endswith("_bytes") and isinstance(value, int | float):
        text = f"{value / 1e6:.1f} MB"
    elif isinstance(value, bool) or value is None:
        text = {True: "yes", False: "no", None: "-"}[value]
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, tuple):
        text = " ".join(value)
    else:
        text = str(value)
    text = " | ".join(" ".join(line.split()) for line in text.splitlines())
    return text if len(text) <= columns else text[: columns - 1] + "…"

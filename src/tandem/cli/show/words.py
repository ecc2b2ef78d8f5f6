"""The few typographic pieces every view is made of: headings, aligned rows, indented sentences.

For: views that look alike and fit 80 columns. Not for: what they say.
"""

import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GOOD, BAD, DOUBT, QUIET, LOUD = "green", "red", "yellow", "dim", "bold"
"""Colours only repeat what a word beside them says."""

STYLES = {
    "confirmed": BAD,
    "best_supported": BAD,
    "possible": DOUBT,
    "undetermined": DOUBT,
    "untestable": DOUBT,
    "ruled_out": QUIET,
    "none": GOOD,
    "implicated": BAD,
    "open": DOUBT,
    "exonerated": GOOD,
    "done": GOOD,
    "already": GOOD,
    "failed": BAD,
    "skipped": QUIET,
    "interrupted": BAD,
    "clean": GOOD,
    "corrupted": BAD,
    "timed_out": BAD,
    "up": GOOD,
    "serving": GOOD,
    "unwatched": DOUBT,
    "repairing": DOUBT,
    "partly-down": BAD,
    "down": BAD,
    "unreachable": BAD,
    "sick": BAD,
    "repaired": GOOD,
    "closed": GOOD,
    "advised": DOUBT,
}


CITED = re.compile(r"\[e(\d+)\]")


def cited(sentence: str) -> str:
    """Write a record's sentence with its citations as a screen has them: `[e12]` becomes `#12`."""
    return CITED.sub(r"#\1", sentence)


def spoken(word: str) -> str:
    """Write a record's word as people say it: `best_supported` becomes `best supported`."""
    return word.replace("_", " ")


def styled(word: str) -> Text:
    """Write a record's word in the colour that repeats it; what is appended stays plain."""
    return Text.assemble((spoken(word), STYLES.get(word, "")))


def heading(text: str) -> Text:
    """Write the name of a block."""
    return Text(text, style=LOUD)


def indented(view: RenderableType, columns: int = 2) -> Padding:
    """Set a view in by some columns; its wrapped lines too."""
    return Padding(view, (0, 0, 0, columns))


def block(name: str, views: Sequence[RenderableType]) -> Group:
    """Put a blank line and a heading above indented views; nothing at all when there are none."""
    if not views:
        return Group()
    return Group(Text(""), heading(name), *(indented(view) for view in views))


def rows(
    *columns: str,
    of: Iterable[Sequence[RenderableType]],
    right: Sequence[str] = (),
    gap: int = 2,
) -> Table:
    """Align rows under quiet headings (none when all are empty), without lines; the last wraps."""
    table = Table(
        box=None,
        pad_edge=False,
        show_header=any(columns),
        header_style=QUIET,
        padding=(0, gap, 0, 0),
    )
    for number, column in enumerate(columns, start=1):
        last = number == len(columns)
        table.add_column(
            column,
            no_wrap=not last,
            overflow="fold",
            justify="right" if column in right else "left",
        )
    for row in of:
        table.add_row(*row)
    return table


def bullets(of: Iterable[str], style: str = "") -> list[RenderableType]:
    """List sentences, their wrapped lines set in; nothing when there are none."""
    listed = [("-", Text(cited(one), style=style)) for one in of]
    return [rows("", "", of=listed, gap=1)] if listed else []


def pairs(of: Iterable[tuple[str, RenderableType]]) -> Table:
    """Align names and what they are: the head of a view."""
    return rows("", "", of=[(Text(name, style=QUIET), what) for name, what in of])

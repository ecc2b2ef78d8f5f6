"""How the knowledge looks: the list of failure modes, and one of them as a page of a book.

For: `failures`. Not for: testing a mode against evidence (`diagnose`).
"""

import inspect
import sys
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.words import LOUD, block, indented, pairs, rows
from tandem.ports import Mode


def book(mode: Mode) -> str:
    """Give the page of a mode: the docstring of its file, which `discover` has loaded."""
    file = sys.modules.get(f"tandem.failures.{mode.slug.replace('-', '_')}")
    return inspect.cleandoc((file.__doc__ if file else None) or "")


def first_sentence(mode: Mode) -> str:
    """Give the first line of the page of a mode."""
    return book(mode).partition("\n")[0]


def modes_view(modes: Sequence[Mode]) -> RenderableType:
    """List what Tandem can tell apart."""
    listed = [
        (mode.slug, mode.incident_class, mode.scope, Text(first_sentence(mode))) for mode in modes
    ]
    return rows("failure", "class", "repair", "what it is", of=listed)


def mode_view(mode: Mode) -> Group:
    """Show one mode as a page: what it is, how it is tested, what the repair is and its safety."""
    aliases = ", ".join(mode.aliases) or "-"
    tests = [
        (
            test.__name__.strip("_").replace("_", "-"),
            Text(" ".join((inspect.getdoc(test) or "").split())),
        )
        for test in mode.tests
    ]
    return Group(
        Text(mode.slug, style=LOUD),
        indented(
            pairs(
                [
                    ("class", Text(mode.incident_class)),
                    ("repair", Text(f"{mode.scope}: {mode.safety}")),
                    ("also called", Text(aliases)),
                ]
            )
        ),
        Text(""),
        *_page(book(mode)),
        block("Tests", [rows("", "", of=tests)]),
    )


def _page(text: str) -> list[RenderableType]:
    """Set a page: its headings stand at the margin, its paragraphs are indented below them."""
    views: list[RenderableType] = []
    for paragraph in text.split("\n\n"):
        head, *body = paragraph.splitlines()
        if not body or body[0].startswith(" "):
            views += [Text(head, style=LOUD if body else "")]
            views += [indented(Text(" ".join(line.strip() for line in body)))] if body else []
        else:
            views.append(Text(" ".join(line.strip() for line in paragraph.splitlines())))
        views.append(Text(""))
    return views[:-1]

"""Help that teaches by example: sections of words, examples below each, options alike everywhere.

For: the shapes every word's help shares. Not for: any word.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tandem.cli import complete
from tandem.visible import one_line

HUNCH_MAX = 500
"""Characters of a hunch: it names something; a pasted log names nothing."""


def _on_one_line(text: str | None) -> str | None:
    return None if text is None else one_line(text)[:HUNCH_MAX]


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="The tandem.toml to use; else $TANDEM_CONFIG, else the nearest one upwards.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the record as JSON, and nothing else, on stdout.")
]
Hunch = Annotated[
    str | None,
    typer.Option(
        "--hunch",
        metavar="TEXT",
        callback=_on_one_line,
        help="What you suspect; it is answered by name, never believed.",
    ),
]
Folder = Annotated[
    str,
    typer.Argument(
        metavar="INCIDENT",
        help="An incident's folder or id, or `latest`.",
        autocompletion=complete.incidents,
        show_default=False,
    ),
]

DEPLOYMENT = "The deployment"
INCIDENT = "In an incident"
STAGES = "The stages of the loop, one at a time"
MEMORY = "What is known"
REHEARSAL = "Rehearsal"
SECTIONS = (DEPLOYMENT, INCIDENT, STAGES, MEMORY, REHEARSAL)


def examples(*lines: tuple[str, str]) -> str:
    """Write (command, what it does) pairs as an aligned block that help does not re-wrap."""
    width = max(len(command) for command, _ in lines)
    rows = [f"  {command:<{width}}  {what}".rstrip() for command, what in lines]
    return "\n".join(["\b", "Examples:", *rows])


class Words(TyperGroup):
    """The top of the command line: its help lists the words by section, in order of use."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's context is private
        """Keep the order in which the words were added."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - likewise
        """Write one definition list per section."""
        limit = formatter.width - 6 - max(len(name) for name in self.commands)
        for section in SECTIONS:
            rows = [
                (name, command.get_short_help_str(limit))
                for name, command in self.commands.items()
                if getattr(command, "rich_help_panel", None) == section and not command.hidden
            ]
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)

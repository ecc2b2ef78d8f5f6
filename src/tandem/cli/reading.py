"""The words that read what is known: incidents and failures.

For: looking back, and reading the knowledge like a book. Not for: judging anew (`stages.py`).
"""

import time
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli import complete
from tandem.cli.help import MEMORY, Config, Folder, Json, examples
from tandem.cli.screen import Screen
from tandem.errors import TandemError


def add_words(app: typer.Typer) -> None:
    """Add this group to the command line."""
    group = typer.Typer(
        rich_markup_mode=None,
        epilog=examples(
            ("tandem incidents", "every incident, newest first"),
            ("tandem incidents show", "the newest one, whole"),
            ("tandem incidents show 2026-11-29T21-14", "one by its id, or the beginning of it"),
        ),
    )
    group.callback(invoke_without_command=True)(incidents)
    group.command("list")(listing)
    group.command("show")(show)
    app.add_typer(group, name="incidents", rich_help_panel=MEMORY)
    app.command(
        rich_help_panel=MEMORY,
        epilog=examples(
            ("tandem failures", "the failures Tandem can tell apart"),
            ("tandem failures degraded-pair-after-decode-restarts", "one of them, as a page"),
        ),
    )(failures)


def incidents(context: typer.Context, config: Config = None, json: Json = False) -> None:
    """List this deployment's incidents, or show one whole."""
    if context.invoked_subcommand is None:
        listing(config, json)


def listing(config: Config = None, json: Json = False) -> None:
    """List every incident, newest first."""
    from tandem.cli.folders import incident_folders, incidents_home
    from tandem.cli.show.incident import incidents_view
    from tandem.store import load_records

    screen = Screen(json=json)
    found = []
    for folder in incident_folders(incidents_home(config)):
        try:
            found.append(load_records(folder))
        except TandemError as damaged:
            screen.tell(str(damaged))
    screen.answer(found, incidents_view(found, time.time()))


def show(incident: Folder = "latest", config: Config = None, json: Json = False) -> None:
    """Show one incident whole, stage by stage, as it was recorded."""
    from tandem.cli.sealed import open_sealed
    from tandem.cli.show.incident import incident_view

    screen = Screen(json=json)
    sealed = open_sealed(incident, config)
    view = incident_view(sealed.incident, sealed.facts, Path(sealed.folder), time.time())
    screen.answer(sealed.incident, view)


def failures(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="The failure to read about.", autocompletion=complete.failures
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Read the failures Tandem can tell apart.

    What each one is, how it is tested, which repair it calls for and why that is safe.
    """
    from tandem.cli.show.failure import book, first_sentence, mode_view, modes_view
    from tandem.failures import discover

    screen = Screen(json=json)
    modes = discover()
    if name is None:
        record = [
            {"name": mode.slug, "class": mode.incident_class, "about": first_sentence(mode)}
            for mode in modes
        ]
        screen.answer(record, modes_view(modes))
        return
    wanted = next((mode for mode in modes if name in (mode.slug, *mode.aliases)), None)
    if wanted is None:
        known = ", ".join(mode.slug for mode in modes)
        raise typer.BadParameter(f"no failure is called {name}; known are {known}")
    page = {
        "name": wanted.slug,
        "class": wanted.incident_class,
        "repair": wanted.scope,
        "safety": wanted.safety,
        "aliases": wanted.aliases,
        "page": book(wanted),
    }
    screen.answer(page, mode_view(wanted))

"""The words around the clock and in an incident: watch and investigate.

For: running the loop, and one turn of it by hand. Not for: the single stages (`stages.py`).
"""

import sys
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tandem.cli.help import DEPLOYMENT, INCIDENT, Config, Hunch, Json, examples
from tandem.cli.screen import Screen

if TYPE_CHECKING:
    from tandem.parts import Parts


def add_words(app: typer.Typer) -> None:
    """Add this group to the command line."""
    app.command(
        rich_help_panel=DEPLOYMENT,
        epilog=examples(
            ("tandem watch", "run the loop until Ctrl-C; policy `advise` acts on nothing"),
            ("tandem watch --hunch 'overlap schedule'", "answer this suspicion in each incident"),
            ("tandem watch --json >> watch.jsonl", "one event a line, for another program"),
        ),
    )(watch)
    app.command(
        rich_help_panel=INCIDENT,
        epilog=examples(
            ("tandem investigate", "look now, seal, judge, propose; act on nothing"),
            ("tandem investigate --hunch 'overlap schedule'", "and have your suspicion answered"),
            ("tandem investigate --since 3d", "judge the changes of three days"),
        ),
    )(investigate)


def watch(hunch: Hunch = None, config: Config = None, json: Json = False) -> None:
    """Run the loop until told to stop.

    It looks every second, and hands what it finds to the other stages. What it may do by itself
    is `[policy]` in tandem.toml: `advise` (the default) seals evidence, diagnoses, plans and
    reports, and leaves acting to you.
    """
    import faulthandler
    import os

    from tandem.cli.running import with_parts
    from tandem.cli.show.times import utc
    from tandem.service import Notifier, serve

    screen = Screen(json=json)
    notifier = Notifier.of(os.environ)
    if notifier.listened_to:
        # The watchdog ends a turn that hangs with SIGABRT: the journal then has where it hung.
        faulthandler.enable()

    def tell(sentence: str) -> None:
        now = time.time()
        if json:
            event = {"at": round(now, 3), "text": sentence}
            sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
            sys.stdout.flush()
        else:
            screen.line(f"{utc(now)}  {sentence}")

    def work(parts: "Parts") -> Awaitable[None]:
        return serve(parts, hunch=hunch, tell=tell, notifier=notifier)

    with_parts(screen, config, work)


def investigate(
    hunch: Hunch = None,
    since: Annotated[
        str, typer.Option("--since", metavar="LENGTH", help="How far back: 90m, 24h, 3d.")
    ] = "24h",
    config: Config = None,
    json: Json = False,
) -> None:
    """Find out what is wrong now, and touch nothing.

    It collects, seals the evidence, detects, diagnoses, judges every change of the time before,
    answers your hunch, and plans the repair that keeps the improvements.
    """
    from tandem.cli.running import with_parts
    from tandem.cli.sealed import open_sealed
    from tandem.cli.show.incident import incident_view
    from tandem.cli.show.times import length
    from tandem.loop import investigate as run_investigate

    try:
        since_s = length(since)
    except ValueError:
        raise typer.BadParameter(f"--since {since}: give a length such as 90m, 24h or 3d") from None
    screen = Screen(json=json)
    incident = with_parts(
        screen,
        config,
        lambda parts: run_investigate(parts, hunch=hunch, since_s=since_s, tell=screen.tell),
        said="investigating",
    )
    if json:
        screen.answer(incident)
        return
    sealed = open_sealed(incident.id, config)
    screen.show(incident_view(sealed.incident, sealed.facts, sealed.folder, time.time()))

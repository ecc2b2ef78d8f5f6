"""The words of rehearsal: drill and demo.

For: making things fail on a throw-away deployment, and seeing the loop at work.
Not for: what is injected and how it is scored (`tandem.drills`, imported only when one runs).
"""

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.help import REHEARSAL, examples
from tandem.cli.screen import Screen


def add_words(app: typer.Typer) -> None:
    """Add this group to the command line."""
    app.command(
        rich_help_panel=REHEARSAL,
        epilog=examples(
            ("tandem drill", "list the drills"),
            ("tandem drill idle", "run one: at most two minutes"),
            ("tandem drill idle --seed 7 --json -", "replay a seed; the score as JSON"),
        ),
    )(drill)
    app.command(
        rich_help_panel=REHEARSAL,
        epilog=examples(
            ("tandem demo", "a pair goes silent here, and is found, explained, repaired, proven"),
            ("tandem demo --workspace ./demo", "keep the folder where you can look around"),
        ),
    )(demo)


def drill(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which drill.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the drills and end.")] = False,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the score as JSON.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Replays a run.")] = 1,
) -> None:
    """Rehearse one failure, and score the loop from outside.

    It runs on a throw-away deployment of its own. Only the drill knows what it injected; the
    loop it scores sees tandem.toml alone. Near misses and controls pass when nothing is accused
    and nothing is touched.
    """
    from tandem.cli import running
    from tandem.cli.show.drills import drills_view
    from tandem.drills import listing, run

    screen = Screen(json=json_to == "-")
    if listed or name is None:
        record = [
            {"drill": one.name, "about": one.about, "stall_expected": one.stall_expected}
            for one in listing()
        ]
        screen.answer(record, drills_view(listing()))
        return
    with screen.working(f"rehearsing {name} with seed {seed}"):
        running.run(run(name, seed=seed, json_to=json_to, tell=screen.tell))


def demo(
    workspace: Annotated[
        Path | None,
        typer.Option("--workspace", metavar="DIR", help="A new or empty folder; else a temporary."),
    ] = None,
) -> None:
    """See a pair go silent here, and the loop deal with it.

    It takes about three minutes, needs no GPU, touches nothing outside its folder and leaves
    nothing running. It ends with status 0 only when everything it tells truly happened.
    """
    from tandem.cli.running import run
    from tandem.drills import demo as play

    run(play(workspace))

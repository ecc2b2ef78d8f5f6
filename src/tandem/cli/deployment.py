"""The words about the deployment itself: up, down, status, restart.

For: bringing members to life and to rest in the right order. Not for: repairing what is sick.
"""

import getpass
import os
import time
from typing import Annotated

import typer

from tandem.cli import complete
from tandem.cli.help import DEPLOYMENT, Config, Json, examples
from tandem.cli.screen import Screen


def add_words(app: typer.Typer) -> None:
    """Add this group to the command line."""
    add = app.command
    add(
        rich_help_panel=DEPLOYMENT,
        epilog=examples(
            ("tandem up", "start every member, each gated on being truly ready"),
            ("tandem up --config gpu1/tandem.toml", "another deployment of this host"),
        ),
    )(up)
    add(
        rich_help_panel=DEPLOYMENT,
        epilog=examples(
            ("tandem down", "stop every member, in stop order, and see that nothing is left"),
        ),
    )(down)
    add(
        rich_help_panel=DEPLOYMENT,
        epilog=examples(
            ("tandem status", "state, since when, the next safe command, what not to do"),
            ("tandem status --json", "the same for a script"),
        ),
    )(status)
    add(
        rich_help_panel=DEPLOYMENT,
        epilog=examples(
            ("tandem restart router", "restart the router alone"),
            ("tandem restart prefill-0", "with the flags that tandem.toml now gives it"),
            ("tandem restart decode-0 --force --why 'prefill is drained'", "yours to answer for"),
        ),
    )(restart)


def up(config: Config = None, json: Json = False) -> None:
    """Start every member in order, each behind its gate.

    Prefill until its bootstrap answers, decode, a real hand-off, the router, a routed request.
    What runs already is left alone and said so. When a member does not become ready, what this
    command started is stopped again.
    """
    from tandem.cli.running import with_parts
    from tandem.cli.show.plan import outcomes_view
    from tandem.standing import bring_up

    screen = Screen(json=json)
    outcomes = with_parts(
        screen,
        config,
        lambda parts: bring_up(parts, tell=screen.tell),
        said="bringing the deployment up",
    )
    screen.answer(outcomes, outcomes_view(outcomes))
    if any(one.step.startswith("start:") and one.status == "done" for one in outcomes):
        screen.tell("up; watch it: `tandem watch`")
    else:
        screen.tell("it was up already; nothing was started")


def down(config: Config = None, json: Json = False) -> None:
    """Stop every member in order, and see that nothing is left.

    Router, decode, prefill; then their processes, ports and shared memory have to be gone.
    """
    from tandem.cli.running import with_parts
    from tandem.cli.show.plan import outcomes_view
    from tandem.standing import take_down

    screen = Screen(json=json)
    outcomes = with_parts(
        screen,
        config,
        lambda parts: take_down(parts, tell=screen.tell),
        said="taking the deployment down",
    )
    screen.answer(outcomes, outcomes_view(outcomes))


def status(config: Config = None, json: Json = False) -> None:
    """Say how it stands, and what to do next.

    The first line is the state, since when, the next safe command, and what not to do. It
    touches nothing: it reads what is known and asks each member once.
    """
    from tandem.cli.running import with_parts
    from tandem.cli.show.status import status_view
    from tandem.standing import status as look

    screen = Screen(json=json)
    found = with_parts(screen, config, look)
    screen.answer(found, status_view(found, time.time()))


def restart(
    member: Annotated[
        str,
        typer.Argument(metavar="MEMBER", help="Whom to restart.", autocompletion=complete.members),
    ],
    force: Annotated[bool, typer.Option("--force", help="Do it although it may hurt.")] = False,
    why: Annotated[
        str | None,
        typer.Option("--why", metavar="TEXT", help="Your reason; it is kept with your name."),
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Restart one member as tandem.toml now says.

    It waits until the member answers. A decode alone against a running prefill is refused: such
    restarts add up to a silent stall hours later. The refusal names the safe command; `--force
    --why TEXT` overrides it and is recorded with your name.
    """
    from tandem.cli.running import with_parts
    from tandem.standing import restart as restart_member

    if force and not (why or "").strip():
        raise typer.BadParameter("--force needs --why TEXT: the reason is kept with the restart")
    said = f"{why or 'no reason given'} ({_who()})"
    screen = Screen(json=json)
    life = with_parts(
        screen,
        config,
        lambda parts: restart_member(parts, member, why=said, force=force, tell=screen.tell),
        said=f"about to restart {member}",
    )
    screen.answer(life, f"{member} runs as {life.id}")


def _who() -> str:
    """The user's name; in a container that gives anyone a number, the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"

"""The word `export`: what the tools around Tandem are given.

For: printing it. Not for: its content (`tandem.exports`), or installing it.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.help import DEPLOYMENT, Config, Json, examples
from tandem.cli.screen import Screen
from tandem.errors import ConfigError


def add_words(app: typer.Typer) -> None:
    """Add this group to the command line."""
    group = typer.Typer(
        rich_markup_mode=None,
        epilog=examples(
            ("tandem export", "what there is to export"),
            ("tandem export watch-unit", "a unit for systemd"),
            ("tandem export prometheus-rules", "alerting rules"),
            ("tandem export grafana-dashboard", "a dashboard"),
        ),
    )
    group.callback(invoke_without_command=True)(export)
    add = group.command
    add(
        epilog=examples(
            ("tandem export watch-unit --user sglang", "a system service of that user"),
            ("tandem export watch-unit --manager user", "a service of your own, without root"),
        ),
    )(watch_unit)
    add(
        epilog=examples(
            ("tandem export prometheus-rules > tandem.yml", "for `rule_files` of Prometheus"),
        ),
    )(prometheus_rules)
    add(
        epilog=examples(
            ("tandem export grafana-dashboard > tandem.json", "for Dashboards, Import in Grafana"),
        ),
    )(grafana_dashboard)
    app.add_typer(group, name="export", rich_help_panel=DEPLOYMENT)


def export(context: typer.Context, json: Json = False) -> None:
    """Print what systemd, Prometheus and Grafana are given."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from tandem.exports import NAMES

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, about in NAMES.items():
        table.add_row(f"tandem export {name}", about)
    Screen(json=json).answer([{"name": name, "about": NAMES[name]} for name in NAMES], table)


def watch_unit(
    manager: Annotated[
        str, typer.Option("--manager", metavar="WHICH", help="`system`, or `user`: without root.")
    ] = "system",
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="NAME", help="Who runs it: the user of the engines."),
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Print a systemd unit that runs `tandem watch` for this deployment.

    It is restarted when a turn hangs, may write where its reports go, and is bounded in memory.
    """
    if manager not in ("system", "user"):
        raise typer.BadParameter(f"--manager {manager}: it is `system` or `user`")
    from tandem.exports import watch_unit as unit
    from tandem.wiring import find_config, find_settings

    place = find_config(config).resolve()
    settings = find_settings(place)
    if any(ord(one) < 32 for one in f"{place}{sys.executable}"):
        raise ConfigError(
            f"{place} cannot be named in a unit: its path holds control characters.",
            next_step="Move it elsewhere.",
        )
    text = unit(
        settings,
        config=place,
        python=sys.executable,
        manager="user" if manager == "user" else "system",
        user=user,
        writable=_repositories(Path(settings.report.document)),
    )
    _answer("tandem-watch.service", text, json=json)


def prometheus_rules(json: Json = False) -> None:
    """Print alerting rules over the engines' metrics and Tandem's own.

    Each says what it cannot see; one fires when Tandem itself is gone.
    """
    from tandem.exports import prometheus_rules as rules

    _answer("tandem-rules.yml", rules(), json=json)


def grafana_dashboard(json: Json = False) -> None:
    """Print a Grafana dashboard: queues that never empty, hand-offs, probes, findings."""
    from tandem.exports import grafana_dashboard as dashboard

    _answer("tandem-dashboard.json", dashboard(), json=json)


def _answer(name: str, text: str, *, json: bool) -> None:
    if json:
        Screen(json=True).answer({"name": name, "text": text})
    else:
        sys.stdout.write(text)


def _repositories(document: Path) -> tuple[Path, ...]:
    """The folder of the git repository that the document is in: a commit writes there."""
    folders = [one for one in document.parents if os.path.lexists(one / ".git")]
    return tuple(folders[:1])

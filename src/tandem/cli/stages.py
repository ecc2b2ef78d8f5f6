"""The stages of the loop as words: collect, detect, diagnose, plan, repair, verify, report.

For: one stage at a time, by hand. On a sealed folder `diagnose`, `plan` and `report` need neither
adapters nor tandem.toml. Not for: the loop (`watching.py`).
"""

import time
from typing import Annotated

import typer

from tandem.cli import complete
from tandem.cli.help import STAGES, Config, Folder, Hunch, Json, examples
from tandem.cli.screen import Screen
from tandem.errors import NotProvenError


def add_words(app: typer.Typer) -> None:
    """Add this group to the command line, in the order of the loop."""
    taught = (
        (collect, (("tandem collect", "one sweep: what is seen, and what could not be"),)),
        (detect, (("tandem detect", "what is wrong by what was collected last"),)),
        (
            diagnose,
            (
                ("tandem diagnose", "the newest incident's differential"),
                ("tandem diagnose --why overload-not-stall", "one mode, down to the observations"),
                ("tandem diagnose --hunch 'overlap schedule'", "answer this suspicion as well"),
                ("tandem diagnose ./bundle --json", "a stranger's folder; the same bytes twice"),
            ),
        ),
        (plan, (("tandem plan", "the smallest sufficient repair, and why nothing smaller"),)),
        (
            repair,
            (
                ("tandem repair", "show what would be done"),
                ("tandem repair --approve", "do it: ordered, gated, then proven and reported"),
            ),
        ),
        (verify, (("tandem verify", "the proof of [verify], on the deployment as it is"),)),
        (
            report,
            (
                ("tandem report", "the newest incident's report as Markdown"),
                ("tandem report --html > incident.html", "the same as a page"),
                ("tandem report --publish", "into the incident document, and commit"),
            ),
        ),
    )
    for word, lines in taught:
        app.command(rich_help_panel=STAGES, epilog=examples(*lines))(word)


def collect(config: Config = None, json: Json = False) -> None:
    """Look once, and show what is seen and what is missing.

    Failing to see is evidence too: it is listed first, with the reason. It sends a tiny request
    over every path, where the engine is known to bear it.
    """
    from tandem.cli.running import with_parts
    from tandem.cli.show.sweep import sweep_view
    from tandem.parts import look_closely

    screen = Screen(json=json)
    harvest = with_parts(screen, config, look_closely, said="looking once at every member")
    screen.answer(harvest, sweep_view(harvest, time.time()))


def detect(config: Config = None, json: Json = False) -> None:
    """Say what is wrong by what was collected last.

    `watch` runs this stage every second. By hand it needs observations: a running watch, or
    several `tandem collect`.
    """
    from tandem.cli.rolling import findings_now
    from tandem.cli.show.finding import findings_view

    screen = Screen(json=json)
    findings, newest_at, now = findings_now(config)
    if newest_at is None or now - newest_at > 60.0:
        screen.tell("no observation is younger than a minute: `tandem watch` or `collect` first")
    screen.answer(findings, findings_view(findings, now))


def diagnose(
    incident: Folder = "latest",
    hunch: Hunch = None,
    why: Annotated[
        str | None,
        typer.Option(
            "--why",
            metavar="MODE",
            help="Show one mode's tests and evidence.",
            autocompletion=complete.failures,
        ),
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Judge a sealed incident: for, against, missing.

    Every failure mode, every change and your hunch get a verdict. It reads the folder and the
    knowledge, nothing else: the same folder gives the same answer.
    """
    from tandem.cli.sealed import open_sealed
    from tandem.cli.show.diagnosis import diagnosis_view, why_view

    screen = Screen(json=json)
    sealed = open_sealed(incident, config)
    diagnosis = sealed.diagnosis(hunch)
    if why is None:
        screen.answer(diagnosis, diagnosis_view(diagnosis, sealed.facts))
        return
    asked = next((mode for mode in diagnosis.modes if mode.mode == why), None)
    if asked is None:
        known = ", ".join(mode.mode for mode in diagnosis.modes)
        raise typer.BadParameter(f"--why {why}: this diagnosis judges {known or 'no mode'}")
    screen.answer(asked, why_view(asked, sealed.facts))


def plan(incident: Folder = "latest", config: Config = None, json: Json = False) -> None:
    """Plan the smallest repair that suffices.

    It says why nothing smaller would do, what is kept, and what it costs. The policy is that of
    tandem.toml where there is one, else `advise`. Nothing is done.
    """
    from tandem.cli.sealed import open_sealed, policy_of
    from tandem.cli.show.plan import plan_view

    screen = Screen(json=json)
    sealed = open_sealed(incident, config)
    made = sealed.plan(policy_of(sealed.folder, config))
    screen.answer(made, plan_view(made, f"tandem repair {sealed.incident.id} --approve"))


def repair(
    incident: Folder = "latest",
    approve: Annotated[
        bool, typer.Option("--approve", help="You have read the plan and want it done.")
    ] = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Carry out an incident's plan, prove it, write it down.

    Without `--approve` the plan is shown and, unless the policy allows it, nothing is done.
    """
    from tandem.cli.repairing import approved_plan, repair_here
    from tandem.cli.running import with_parts
    from tandem.cli.sealed import open_sealed
    from tandem.cli.show.incident import incident_view

    screen = Screen(json=json)
    sealed = open_sealed(incident, config)
    found = sealed.incident
    plan = approved_plan(found, approve=approve, show=screen.show, now=time.time())
    done = with_parts(
        screen,
        config,
        lambda parts: repair_here(parts, sealed, screen.tell),
        said=f"repairing {plan.scope}",
    )
    screen.answer(done, incident_view(done, sealed.facts, sealed.folder, time.time()))
    if done.state == "failed":
        raise NotProvenError(
            f"The repair of {done.id} did not end in a proof.",
            next_step=f"Read where it stopped: `tandem incidents show {done.id}`.",
        )


def verify(config: Config = None, json: Json = False) -> None:
    """Prove under load that the deployment serves.

    Sequential requests first, then sessions with markers that must not leak. How much proof is
    `[verify]` in tandem.toml. Produced tokens of a sample of sessions are scored again by a
    clean prefill; every request is accounted for.
    """
    from tandem.cli.running import with_parts
    from tandem.cli.show.verification import verification_view
    from tandem.handling import run_verify

    screen = Screen(json=json)
    proof = with_parts(
        screen,
        config,
        lambda parts: run_verify(parts, tell=screen.tell),
        said="proving the deployment under load",
    )
    screen.answer(proof, verification_view(proof))
    if not proof.passed:
        raise NotProvenError(
            "The deployment did not pass its verification.",
            next_step="Find out why: `tandem investigate`.",
        )


def report(
    incident: Folder = "latest",
    html: Annotated[bool, typer.Option("--html", help="Print the report as HTML.")] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="Put it into the document of [report], and commit.")
    ] = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Write down an incident for people.

    Symptom, differential diagnosis, root cause, fix and proof, guidance. It prints; with
    `--publish` it renews the incident's section in the living document and commits it. Text a
    person wrote there survives.
    """
    from tandem.cli.sealed import open_sealed
    from tandem.report import render

    screen = Screen(json=json)
    sealed = open_sealed(incident, config)
    rendered = render(sealed.incident, sealed.facts)
    if publish:
        from tandem.report.document import publish as put_into_document
        from tandem.wiring import find_settings

        reference = put_into_document(rendered, find_settings(config), sealed.folder)
        said = f"{reference.path} @ {reference.commit}" if reference.commit else reference.path
        screen.answer(reference, f"{said} ({reference.note})" if reference.note else said)
        return
    if json:
        screen.answer(rendered)
    else:
        typer.echo(rendered.html if html else rendered.markdown)

"""How a plan and its outcomes look: the steps in order, what was refused, kept, and what it costs.

For: `plan`, `repair`, `up`, `down`. Not for: planning.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.times import duration
from tandem.cli.show.words import DOUBT, LOUD, QUIET, block, indented, pairs, rows, styled
from tandem.records import Outcome, Plan


def plan_view(plan: Plan, approve: str | None = None) -> Group:
    """Show the whole plan; `approve` is the command that would run it."""
    parts: list[RenderableType] = [
        Text.assemble("repair scope: ", (plan.scope, LOUD)),
        indented(pairs([("because", Text(plan.because))])),
        block("Steps", _steps(plan)),
    ]
    if plan.config_edit:
        parts.append(block("Configuration edit", [Text(plan.config_edit)]))
    parts += [
        block("Smaller repairs, refused", _refused(plan)),
        block("Kept as it is", [Text(f"- {kept}") for kept in plan.kept]),
        block("Cost", [Text(f"- {cost}") for cost in plan.costs]),
    ]
    if plan.steps and approve:
        said = "A person has to approve it" if plan.needs_approval else "The policy allows it"
        parts += [Text(""), Text(f"{said}: {approve}", style=DOUBT)]
    return Group(*parts)


def _steps(plan: Plan) -> list[RenderableType]:
    if not plan.steps:
        return [Text("none: nothing is touched")]
    listed = [
        (
            Text(str(number), style=QUIET),
            step.verb,
            step.target,
            step.gate if step.gate != "none" else "-",
            duration(step.timeout_s),
            Text(step.why + (" (a failure is let pass)" if step.on_failure == "continue" else "")),
        )
        for number, step in enumerate(plan.steps, start=1)
    ]
    columns = ("", "step", "target", "gate", "at most", "why")
    return [rows(*columns, of=listed, right=("at most",))]


def _refused(plan: Plan) -> list[RenderableType]:
    return (
        [rows("", "", of=[(rung.scope, Text(rung.because)) for rung in plan.refused])]
        if (plan.refused)
        else []
    )


def outcomes_view(outcomes: Sequence[Outcome]) -> RenderableType:
    """Show what became of each step, in order."""
    listed = [
        (
            Text(outcome.step),
            styled(outcome.status),
            duration(outcome.ended_at - outcome.started_at),
            Text(outcome.detail),
        )
        for outcome in outcomes
    ]
    return rows("step", "became", "took", "what was seen", of=listed, right=("took",))

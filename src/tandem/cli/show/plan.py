"""How a plan and its outcomes look: the steps in order, what was refused, kept, and what it costs.

For: `plan`, `repair`, `up`, `down`. Not for: planning.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.times import duration
from tandem.cli.show.words import (
    DOUBT,
    LOUD,
    QUIET,
    block,
    bullets,
    cited,
    indented,
    pairs,
    rows,
    styled,
)
from tandem.records import Outcome, Plan, Step


def plan_view(plan: Plan, approve: str | None = None) -> Group:
    """Show the whole plan; `approve` is the command that would run it."""
    parts: list[RenderableType] = [
        Text.assemble("repair scope: ", (plan.scope, LOUD)),
        indented(pairs([("because", Text(cited(plan.because)))])),
        block("Steps", _steps(plan)),
    ]
    if plan.config_edit:
        parts.append(block("Configuration edit", [Text(plan.config_edit)]))
    parts += [
        block("Smaller repairs, refused", _refused(plan)),
        block("Kept as it is", bullets(plan.kept)),
        block("Cost", bullets(plan.costs)),
    ]
    if plan.steps and approve:
        parts += [Text(""), approval(plan, approve)]
    return Group(*parts)


def approval(plan: Plan, command: str) -> Text:
    """Show the command that would carry the plan out, on one line however long: it is copied."""
    said = "A person has to approve it" if plan.needs_approval else "The policy allows it"
    return Text(f"{said}: {command}", style=DOUBT, no_wrap=True, overflow="ignore")


def _steps(plan: Plan) -> list[RenderableType]:
    if not plan.steps:
        return [Text("none: nothing is touched")]
    listed = []
    for steps in _alike(plan.steps):
        (first, step), last = steps[0], steps[-1][0]
        gate = f", gate: {step.gate}" if step.gate != "none" else ""
        let_pass = " (a failure is let pass)" if step.on_failure == "continue" else ""
        listed.append(
            (
                Text(str(first) if first == last else f"{first}-{last}", style=QUIET),
                duration(step.timeout_s),
                Text.assemble(
                    f"{step.verb} {', '.join(one.target for _, one in steps)}{gate}",
                    (f"\n{step.why}{let_pass}", QUIET),
                ),
            )
        )
    return [rows("", "at most", "step, and why", of=listed, right=("at most",))]


def _alike(steps: Sequence[Step]) -> list[list[tuple[int, Step]]]:
    """The numbered steps; neighbours that do the same to several members are one entry."""
    found: list[list[tuple[int, Step]]] = []
    for number, step in enumerate(steps, start=1):
        before = found[-1][-1][1] if found else None
        if before is not None and before.verb == step.verb and before.why == step.why:
            found[-1].append((number, step))
        else:
            found.append([(number, step)])
    return found


def _refused(plan: Plan) -> list[RenderableType]:
    listed = [(rung.scope, Text(cited(rung.because))) for rung in plan.refused]
    return [rows("", "", of=listed)] if listed else []


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

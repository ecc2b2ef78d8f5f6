"""Carrying out an approved plan, where it still speaks of this deployment as it lives now.

For: `repair`. Not for: the loop's own repairs, which follow their evidence by seconds.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import RenderableType

from tandem.cli.sealed import Sealed
from tandem.cli.show.plan import plan_view
from tandem.cli.show.times import ago
from tandem.errors import RefusedError, WorldError
from tandem.records import Incident, Plan

if TYPE_CHECKING:
    from tandem.parts import Parts, Tell


CUT_SHORT = ("repairing", "repaired")
"""States of an incident whose repair, or its proof, began and has not ended."""


def approved_plan(
    incident: Incident, *, approve: bool, show: Callable[[RenderableType], None], now: float
) -> Plan:
    """Give the plan that may run, or show the one that may not yet.

    One that was cut short may run on. Raises WorldError when there is none; RefusedError when it
    ran already, has no steps, or waits for a person's approval.
    """
    plan, command = incident.plan, f"tandem repair {incident.id} --approve"
    if plan is None:
        raise WorldError(
            f"Incident {incident.id} has no plan.", next_step="Look again: `tandem investigate`."
        )
    if incident.state in CUT_SHORT:
        if plan.needs_approval and not approve:
            raise RefusedError(
                f"The repair of {incident.id} was cut short; nothing was done now.",
                next_step=f"Let it go on from there with `{command}`, or by `tandem watch`.",
            )
        return plan
    if incident.outcomes:
        raise RefusedError(
            f"Incident {incident.id} was acted on already ({incident.state}).",
            next_step="If something is wrong now: `tandem investigate`.",
        )
    if not plan.steps:
        show(plan_view(plan))
        raise RefusedError(
            "Nothing was done: the plan is to touch nothing.",
            next_step=f"Read why: `tandem diagnose {incident.id}`.",
        )
    if plan.needs_approval and not approve:
        show(plan_view(plan, command))
        raise RefusedError(
            f"Nothing was done: this plan ({ago(incident.opened_at, now)}) wants your approval.",
            next_step=f"Read it, then run `{command}`.",
        )
    return plan


async def repair_here(parts: "Parts", sealed: Sealed, tell: "Tell") -> Incident:
    """Run the incident's plan under the repair lock, prove it, and write it down.

    Raises RefusedError when the incident is of another deployment, or when a member it would touch
    has been restarted since: the plan then speaks of a life that is over.
    """
    from tandem.handling import run_repair

    incident = sealed.incident
    if parts.store.folder(incident.id).resolve() != sealed.folder.resolve():
        raise RefusedError(
            f"{sealed.folder} is not an incident of {parts.settings.deployment.name}.",
            next_step="Repair it where it happened; `tandem plan` shows its plan anywhere.",
        )
    if incident.state in CUT_SHORT:
        from tandem.unfinished import finish

        return await finish(parts, incident, tell)
    for name in await _restarted(parts, incident):
        raise RefusedError(
            f"{name} was restarted after the evidence was sealed: this plan is out of date.",
            next_step="Look again: `tandem investigate`.",
        )
    return await run_repair(parts, incident, tell=tell)


async def _restarted(parts: "Parts", incident: Incident) -> list[str]:
    """The members whose life is another than the one the finding speaks of, or dead then."""
    changed = []
    known = incident.finding.incarnations if incident.finding else {}
    named = incident.finding.subject.split(">") if incident.finding else []
    for name in dict.fromkeys([*known, *named]):
        member = parts.settings.deployment.member(name)
        supervisor = parts.hands.supervisors.get(member.supervisor) if member else None
        if member is None or supervisor is None:
            continue
        now = await supervisor.inspect(member)
        if now is not None and now.id != known.get(name) and now.started_at > incident.opened_at:
            changed.append(name)
    return changed

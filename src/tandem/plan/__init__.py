"""Plan: the smallest sufficient repair as ordered steps, and why nothing smaller will do.

For: `plan_repair` after a diagnosis, `bring_up` and `take_down` for a whole deployment.
Not for: acting (`repair`) or for approving: a plan only says whether a person must.

Pure: the same diagnosis and facts give the same plan.
"""

from collections.abc import Collection

from tandem.facts import Facts
from tandem.plan.case import Case, listed
from tandem.plan.costs import costs, unsupervised
from tandem.plan.ladder import Choice, choose, refusals
from tandem.plan.steps import (
    START_ORDER,
    STOP_ORDER,
    bring_up_steps,
    order_from_trait,
    restart_steps,
    take_down_steps,
)
from tandem.records import (
    Change,
    Deployment,
    Diagnosis,
    Finding,
    Plan,
    Policy,
    Role,
    Step,
)
from tandem.records import vocabulary as v

__all__ = ["bring_up", "plan_repair", "take_down"]

NEVER_AUTO = ("role", "all", "config")
"""Scopes that always need a person, whatever the policy says."""
LIVES = ("restart", "start", "stop")
"""Ledger rows that are events, not settings: there is nothing to keep or to revert in them."""


def plan_repair(
    diagnosis: Diagnosis, finding: Finding | None, facts: Facts, policy: Policy
) -> Plan:
    """The plan for a diagnosis; scope `nothing` with the reason where nothing is to be done."""
    case = Case(diagnosis, finding, facts, policy)
    choice = choose(case)
    steps = _steps(case, choice)
    approval = _approval(case, choice)
    because = [f"{(choice.because or _because(case, choice)).rstrip('.')}."]
    if steps and not case.one_pair and Role.ROUTER not in {m.role for m in choice.members}:
        because.append(
            "The router keeps running and the other paths keep serving; it has no drain, so "
            "requests it sends to the restarted members until it sees them down will fail."
        )
    if approval and (steps or choice.scope == "config"):
        because.append(f"Needs approval: {approval}.")
    return Plan(
        scope=choice.scope,
        steps=steps,
        refused=refusals(case, choice),
        kept=_kept(case),
        costs=costs(case, choice.members),
        because=" ".join(because),
        needs_approval=bool(approval),
        config_edit=_config_edit(case),
    )


def bring_up(deployment: Deployment, policy: Policy) -> Plan:
    """Start every member in order, each gated on being truly ready; what runs is left running.

    Members nobody supervises are waited for.
    """
    return Plan(
        scope="all",
        steps=bring_up_steps(deployment, policy),
        refused=(),
        kept=(),
        costs=unsupervised(deployment.members),
        because=f"Bring {deployment.name} up: prefill, decode, a real hand-off, router.",
        needs_approval=False,
    )


def take_down(
    deployment: Deployment, policy: Policy, *, only: Collection[str] | None = None
) -> Plan:
    """Stop every supervised member (or those in `only`) in order; see that nothing is left."""
    return Plan(
        scope="all",
        steps=take_down_steps(deployment, policy, only),
        refused=(),
        kept=(),
        costs=unsupervised(deployment.members),
        because=f"Take {deployment.name} down: router, decode, prefill.",
        needs_approval=False,
    )


def _steps(case: Case, choice: Choice) -> tuple[Step, ...]:
    if not choice.members:
        return ()
    engines = [member for member in choice.members if member.role is not Role.ROUTER]
    drained = [member.name for member in engines if not case.dead(member)]
    if choice.scope == "pair":
        ends = {member.role: member.name for member in engines}
        drained = [f"{ends[Role.PREFILL]}>{ends[Role.DECODE]}"]
    started = case.trait(v.T_START_ORDER)
    stopped = case.trait(v.T_STOP_ORDER)
    return restart_steps(
        case.deployment,
        choice.members,
        drained,
        case.policy,
        start_order=order_from_trait(started.value if started else None, START_ORDER),
        stop_order=order_from_trait(stopped.value if stopped else None, STOP_ORDER),
    )


def _because(case: Case, choice: Choice) -> str:
    mode = case.leading
    if mode is None:
        return ""
    names = listed([member.name for member in choice.members])
    certain = case.diagnosis.verdict.replace("_", " ")
    return (
        f"{mode.mode} ({certain}) calls for a restart of the {choice.scope} ({names}): "
        f"{mode.because}"
    )


def _approval(case: Case, choice: Choice) -> str:
    """Why a person must approve; empty when the policy lets Tandem act alone."""
    policy = case.policy
    if choice.scope in NEVER_AUTO:
        return f"scope {choice.scope} is never repaired without a person"
    if case.diagnosis.verdict not in ("confirmed", "best_supported"):
        return f"the diagnosis is {case.diagnosis.verdict}"
    if policy.mode != "auto":
        return f"the policy is {policy.mode}"
    if choice.scope not in policy.auto_scopes:
        return f"scope {choice.scope} is not in auto_scopes"
    if unsupervised(choice.members):
        return "Tandem cannot restart every member itself"
    for member in case.deployment.members:
        age_s = case.loading(member)
        if age_s is not None:
            return f"{member.name} is still loading, started {age_s:.0f} s ago"
    return ""


def _text(change: Change) -> str:
    before = "absent" if change.before is None else change.before
    after = "absent" if change.after is None else change.after
    return f"{change.subject}: {change.what or change.kind} {before} -> {after}"


def _kept(case: Case) -> tuple[str, ...]:
    """Every setting that was not implicated stays as it is."""
    rows = {change.id: change for change in case.facts.changes if change.kind not in LIVES}
    return tuple(
        _text(rows[judged.change])
        for judged in case.diagnosis.changes
        if judged.verdict != "implicated" and judged.change in rows
    )


def _config_edit(case: Case) -> str | None:
    """The exact edits that would revert what is implicated, one a line; None when nothing is."""
    rows = {change.id: change for change in case.facts.changes if change.kind not in LIVES}
    edits = [
        f"{row.subject}: set {row.what} back from "
        f"{'absent' if row.after is None else row.after} to "
        f"{'absent' if row.before is None else row.before}"
        for judged in case.diagnosis.changes
        if judged.verdict == "implicated" and (row := rows.get(judged.change))
    ]
    return "\n".join(edits) or None

"""Bringing a deployment up and down by hand, and saying in one line how it stands.

For: the words `up`, `down`, `restart`, `status`. Not for: the loop (`loop.py`).
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
import psutil

from tandem import signs
from tandem.errors import NotProvenError, RefusedError, WorldError
from tandem.fetch import host_of
from tandem.parts import STANDING, Parts, Tell, look, look_back, say
from tandem.plan import bring_up as plan_bring_up
from tandem.plan import take_down as plan_take_down
from tandem.processes import listening_life, state_of
from tandem.records import (
    Finding,
    Incarnation,
    Incident,
    Member,
    MemberStatus,
    Outcome,
    Plan,
    Role,
    Status,
)
from tandem.records import vocabulary as v
from tandem.repair import repair, succeeded
from tandem.repair.waiting import to_its_end
from tandem.unfinished import unfinished

NEVER_DECODE_ALONE = "never restart decode alone against a prefill that keeps running"
NEVER_INTERFERE = "start and stop nothing by hand until it ends"
READY_TIMEOUT_S = 2.0
HAND_OFFS = {
    Role.PREFILL: (v.BOOTSTRAP_QUEUE_REQS, v.INFLIGHT_QUEUE_REQS),
    Role.DECODE: (v.PREALLOC_QUEUE_REQS, v.TRANSFER_QUEUE_REQS),
}
"""Queues that a stall fills, and traffic only for a moment."""
STRANGER_TIMEOUT_S = 1.0
RESTART_MARGIN_S = 45.0
"""What stopping and starting one member may take beyond its grace."""


async def bring_up(parts: Parts, *, tell: Tell) -> tuple[Outcome, ...]:
    """Start every member in order, each gated on being truly ready; what runs is left running.

    When a step fails, what this call started is stopped again and `WorldError` says why. Raises
    `RefusedError` where it would start a decode alone against a running prefill.
    """
    _supervised(parts)
    with parts.store.lock("repair"):
        before = {member.name: await _life(parts, member) for member in _members(parts)}
        _refuse_decode_alone(parts, before)
        await _refuse_obstacles(parts, before)
        plan = plan_bring_up(parts.settings.deployment, parts.settings.policy)
        try:
            outcomes = await _carry_out(parts, plan, tell)
            if succeeded(plan, outcomes):
                await _keep_the_ledger(parts)
                return outcomes
        except BaseException:
            await _put_away(parts, before, tell)
            raise
        raise await _did_not_come_up(parts, before, outcomes[-1], tell)


def _refuse_decode_alone(parts: Parts, lives: dict[str, Incarnation | None]) -> None:
    """`up` is no way around the guard of `restart`: the prefill outlived that decode."""
    deployment = parts.settings.deployment
    old = [one.name for one in deployment.of(Role.PREFILL) if lives.get(one.name)]
    gone = [
        one.name
        for one in deployment.of(Role.DECODE)
        if lives.get(one.name, True) is None and _hurts(parts, one)
    ]
    if old and gone:
        raise RefusedError(
            f"{', '.join(gone)} is down while {', '.join(old)} has been running, and a decode "
            "started alone against such a prefill is how silent stalls begin.",
            next_step="Restart them together: `tandem down`, then `tandem up`.",
        )


async def _refuse_obstacles(parts: Parts, lives: dict[str, Incarnation | None]) -> None:
    """Models take minutes to load: what would stop the last member is told before the first."""
    found: list[str] = []
    for member in _members(parts):
        if lives[member.name] is None:
            found += await parts.hands.supervisor(member).obstacles(member)
    if found:
        raise WorldError(
            f"{parts.settings.deployment.name} cannot come up: {'; '.join(found)}.",
            next_step="Nothing was started: end that, or give the member another port in "
            "tandem.toml.",
        )


async def _did_not_come_up(
    parts: Parts, before: dict[str, Incarnation | None], failed: Outcome, tell: Tell
) -> WorldError:
    """Put away what was started; the error that says what failed, and what is left."""
    name, detail = parts.settings.deployment.name, failed.detail.rstrip(".")
    if all(before.values()):
        return WorldError(
            f"{name} runs already but does not serve: {detail}.",
            next_step="Nothing was started or stopped: find out why with `tandem investigate`.",
        )
    left = await _put_away(parts, before, tell)
    if left:
        return WorldError(
            f"{name} did not come up: {detail}; and what was started is not wholly gone: {left}.",
            next_step="End that yourself, mend the first, and run `tandem up`.",
        )
    return WorldError(
        f"{name} did not come up: {detail}.",
        next_step="What was started is stopped again; mend that and run `tandem up`.",
    )


async def take_down(parts: Parts, *, tell: Tell) -> tuple[Outcome, ...]:
    """Stop every member we may stop, in stop order, and check that nothing is left.

    Raises `NotProvenError` when something is.
    """
    _supervised(parts)
    with parts.store.lock("repair"):
        plan = await _take_down_plan(parts, {one.name for one in _members(parts)})
        outcomes = await _carry_out(parts, plan, tell)
        if not succeeded(plan, outcomes):
            failed = next(one for one in outcomes if one.status == "failed")
            raise NotProvenError(
                f"{parts.settings.deployment.name} is not wholly down: {failed.detail}.",
                next_step="End the named holder yourself and run `tandem down` again.",
            )
    return outcomes


async def _take_down_plan(parts: Parts, names: set[str]) -> Plan:
    """Stop these; who does not run is cleared up after, and what holds its ports only told.

    That is nobody we started: waiting for it to go, or failing for its sake, would mend nothing.
    """
    policy = parts.settings.policy
    plan = plan_take_down(parts.settings.deployment, policy, only=names)
    alive = {one.name for one in _members(parts) if await _life(parts, one) is not None}
    steps = tuple(
        msgspec.structs.replace(step, timeout_s=STRANGER_TIMEOUT_S, on_failure="continue")
        if step.verb == "expect-gone" and step.target not in alive
        else step
        for step in plan.steps
    )
    return msgspec.structs.replace(plan, steps=steps)


async def restart(parts: Parts, name: str, *, why: str, force: bool, tell: Tell) -> Incarnation:
    """Restart one member as `tandem.toml` now says, where that is known not to hurt.

    A decode alone against a running prefill is refused unless forced; who and why is recorded.
    Once stopped it is started again even when this is cancelled. Raises `RefusedError`, or
    `WorldError` when it does not come back.
    """
    member = parts.settings.deployment.member(name)
    if member is None or member.supervisor not in parts.hands.supervisors:
        known = ", ".join(one.name for one in _members(parts)) or "none"
        raise RefusedError(
            f"{name} is not a member Tandem may restart.",
            next_step=f"Those it may: {known}.",
        )
    hurts = member.role == Role.DECODE and any(
        [await _life(parts, other) for other in parts.settings.deployment.of(Role.PREFILL)]
    )
    if hurts and not force and _hurts(parts, member):
        raise RefusedError(
            f"Restarting {name} alone against a running prefill is how silent stalls begin.",
            next_step="Restart the pair (`tandem down`, `tandem up`), or give --force --why TEXT.",
        )
    with parts.store.lock("repair"):
        await _keep_the_ledger(parts)
        said = f"restarting {name}: {why}"
        say(parts, tell, "restart", said, member=name, why=why, forced=force)
        bound_s = parts.settings.policy.stop_grace_s + RESTART_MARGIN_S
        life = await to_its_end(_stop_and_start(parts, member), bound_s)
        await _until_ready(parts, member)
    await _keep_the_ledger(parts)
    return life


async def _stop_and_start(parts: Parts, member: Member) -> Incarnation:
    supervisor = parts.hands.supervisors[member.supervisor]
    await supervisor.stop(member, parts.settings.policy.stop_grace_s)
    return await supervisor.start(member)


async def _until_ready(parts: Parts, member: Member) -> None:
    supervisor = parts.hands.supervisors[member.supervisor]
    deadline = parts.clock.now() + parts.settings.policy.start_timeout_s
    while not await _answers(parts, member):
        if parts.clock.now() > deadline or await supervisor.inspect(member) is None:
            raise WorldError(
                f"{member.name} was started but does not answer at {member.url}.",
                next_step=f"Read its log: {supervisor.log_path(member)}.",
            )
        await parts.clock.sleep(0.1)


async def status(parts: Parts) -> Status:
    """How the deployment stands: looked at now, with what the store remembers."""
    deployment = parts.settings.deployment
    members = await asyncio.gather(*(_member_status(parts, one) for one in deployment.members))
    up = [one for one in members if one.state == "up"]
    watched = parts.store.holder("watch") is not None
    finding = next((one for one in parts.store.open_findings() if one.actionable), None)
    incident = _pending(parts, members, finding, watched=watched)
    cut_short = next(iter(unfinished(parts)), None)
    since = max((one.since for one in up if one.since is not None), default=None)
    name = deployment.name
    state, summary, command = "serving", f"{name} serves and is watched", "tandem investigate"
    if parts.store.holder("repair") is not None:
        # Before all else: members that are away in the middle of a repair are no call to act.
        state, summary = "repairing", f"{name} is being repaired, brought up or taken down"
        command = "tandem incidents"
    elif cut_short is not None and not watched:
        state, summary = "interrupted", f"the repair of {cut_short.id} was cut short"
        command = f"tandem repair {cut_short.id} --approve"
    elif not up:
        state, summary, command = "down", f"{name} is down", "tandem up"
    elif len(up) < len(members):
        gone = ", ".join(one.name for one in members if one.state != "up")
        state, summary = "partly-down", f"{name} is partly down ({gone})"
        command = "tandem investigate"
    elif incident is not None and incident.finding is not None:
        state, summary, since = "sick", incident.finding.summary, incident.finding.onset_at
        acts = incident.plan is not None and incident.plan.steps
        command = f"tandem {'repair' if acts else 'diagnose'} {incident.id}"
    elif finding is not None and watched:
        state, summary, since = "sick", finding.summary, finding.onset_at
        command = "tandem investigate"
    elif not watched:
        state, summary, command = "unwatched", f"{name} is up and nobody watches it", "tandem watch"
        if held := await _held(parts):
            # Whether it moves takes a longer look than this word may take.
            summary, command = f"{summary}; {held}: do they move?", "tandem investigate"
    return Status(
        deployment=name,
        state=state,
        since=since,
        summary=summary,
        next_command=command,
        never=_never(parts, state),
        members=tuple(members),
        incident=incident.id if incident else None,
    )


def _pending(
    parts: Parts, members: Sequence[MemberStatus], finding: Finding | None, *, watched: bool
) -> Incident | None:
    """The newest incident, when it waits for a person and still speaks of what lives now.

    What a watch sees no more is over. Without a watch, only a plan that acts is worth a word.
    """
    newest = next(iter(parts.store.incidents()), None)
    if newest is None or newest.state != "advised" or newest.finding is None:
        return None
    if parts.store.is_over(newest.finding):
        return None
    if watched and (finding is None or finding.subject != newest.finding.subject):
        return None
    if not watched and (newest.plan is None or not newest.plan.steps):
        return None
    for one in members:
        if one.name in newest.finding.subject.split(">") and (one.since or 0.0) > newest.opened_at:
            return None
    lives = {one.name: one.incarnation for one in members}
    known = newest.finding.incarnations.items()
    return newest if all(lives.get(name) in (life, None) for name, life in known) else None


async def _held(parts: Parts) -> str:
    """Requests that wait for a hand-off at this moment, and where; empty when none do."""
    found = []
    for role, names in HAND_OFFS.items():
        for member in parts.settings.deployment.of(role):
            engine = parts.hands.engines.get(member.engine)
            if engine is None:
                continue
            seen = await engine.observe(member, READY_TIMEOUT_S)
            levels = [
                int(one.value)
                for one in seen.observations
                if one.source == "loads"
                and one.name in names
                and isinstance(one.value, int | float)
            ]
            if sum(levels):
                found.append(f"{sum(levels)} requests wait for a hand-off on {member.name}")
    return " and ".join(found)


def _never(parts: Parts, state: str) -> str:
    if state == "repairing":
        return NEVER_INTERFERE
    decodes = parts.settings.deployment.of(Role.DECODE)
    return NEVER_DECODE_ALONE if any(_hurts(parts, one) for one in decodes) else ""


def _hurts(parts: Parts, decode: Member) -> bool:
    """Whether restarting this decode alone hurts, as far as is known: it does until told not."""
    trait = look_back(parts).trait(decode.name, v.T_DECODE_ALONE_RESTART_HURTS)
    return trait is None or trait.value is not False


def _members(parts: Parts) -> tuple[Member, ...]:
    known = parts.hands.supervisors
    return tuple(one for one in parts.settings.deployment.members if one.supervisor in known)


def _supervised(parts: Parts) -> None:
    if not _members(parts):
        raise RefusedError(
            "No member of this deployment has a supervisor, so Tandem starts and stops nothing.",
            next_step='Give members `supervisor = "local"` and `argv` in tandem.toml.',
        )


async def _keep_the_ledger(parts: Parts) -> None:
    """Look once where no watch does, so that the ledger has every life and flag we change.

    Whoever investigates a night nobody watched finds each restart there, and what came with it.
    """
    if parts.store.holder("watch") is None:
        await look(parts)


async def _life(parts: Parts, member: Member) -> Incarnation | None:
    supervisor = parts.hands.supervisors.get(member.supervisor)
    return await supervisor.inspect(member) if supervisor else None


async def _carry_out(parts: Parts, plan: Plan, tell: Tell) -> tuple[Outcome, ...]:
    return await repair(
        plan,
        parts.hands,
        parts.store.journal_for(STANDING),
        parts.clock,
        tell=lambda text: say(parts, tell, "step", text),
        settings=parts.settings,
    )


async def _put_away(parts: Parts, before: dict[str, Incarnation | None], tell: Tell) -> str:
    """Stop what this call started, and only that, in stop order; what is left of it, in words."""
    left = []
    plan = await _take_down_plan(parts, {name for name, life in before.items() if life is None})
    # One member that will not go must not keep the others running.
    for step in plan.steps:
        alone = msgspec.structs.replace(plan, steps=(step,))
        try:
            outcomes = await _carry_out(parts, alone, tell)
        except (WorldError, OSError):
            # A disk too full for the journal must not keep it running either.
            await _stop_unwritten(parts, step.target, tell)
            continue
        if not succeeded(alone, outcomes):
            left += [one.detail for one in outcomes]
    return "; ".join(left)


async def _stop_unwritten(parts: Parts, name: str, tell: Tell) -> None:
    member = parts.settings.deployment.member(name)
    if member is not None and await _life(parts, member) is not None:
        tell(f"stopping {name}, though it cannot be written down")
        supervisor = parts.hands.supervisors[member.supervisor]
        await supervisor.stop(member, parts.settings.policy.stop_grace_s)


async def _answers(parts: Parts, member: Member) -> bool:
    adapter = parts.hands.engines.get(member.engine) or parts.hands.routers.get(member.engine)
    return adapter is not None and await adapter.ready(member, READY_TIMEOUT_S)


async def _member_status(parts: Parts, member: Member) -> MemberStatus:
    ours, answers = await _life(parts, member), await _answers(parts, member)
    life = ours or await asyncio.to_thread(_by_hand, member)
    state = "up" if answers else ("unreachable" if life else "down")
    # One that ended and was not reaped is no life any more, but a state worth a word.
    seen = life or look_back(parts).incarnation(member.name)
    process = state_of(seen.pid) if seen is not None and seen.pid is not None else None
    if life is None and process != "Z":
        process = None
    return MemberStatus(
        name=member.name,
        role=member.role.value,
        state=state,
        since=life.started_at if life else None,
        incarnation=life.id if life else None,
        process=process,
        process_since=_process_since(parts, member, seen, process),
        detail=_detail(member, answers=answers, known=ours is not None),
    )


def _by_hand(member: Member) -> Incarnation | None:
    """The life of a member that somebody else started: who listens on its port."""
    with contextlib.suppress(WorldError, OSError, psutil.Error):
        return listening_life(host_of(member.url), int(member.url.rpartition(":")[2]))
    return None


def _process_since(
    parts: Parts, member: Member, life: Incarnation | None, process: str | None
) -> float | None:
    """Since when a process has been in its state, as far as a watch has seen it."""
    if life is None or process is None:
        return None
    rows = look_back(parts).rows(member.name, v.PROCESS_STATE)
    first = signs.held_since([row for row in rows if row.incarnation == life.id], process)
    return None if first is None else first.at


def _detail(member: Member, *, answers: bool, known: bool) -> str:
    if not answers:
        return f"no answer at {member.url}"
    # Neither `down` nor a repair can stop it.
    return "" if known or member.supervisor == "none" else "somebody else started it"


__all__ = ["bring_up", "restart", "status", "take_down"]

"""Bringing a deployment up and down by hand, and saying in one line how it stands.

For: the words `up`, `down`, `restart`, `status`. Not for: the loop (`loop.py`).
"""

from collections.abc import Sequence

from tandem.errors import NotProvenError, RefusedError, WorldError
from tandem.parts import Parts, Tell, look, look_back, say
from tandem.plan import bring_up as plan_bring_up
from tandem.plan import take_down as plan_take_down
from tandem.records import (
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

NEVER_DECODE_ALONE = "never restart decode alone against a prefill that keeps running"


async def bring_up(parts: Parts, *, tell: Tell) -> tuple[Outcome, ...]:
    """Start every member in order, each gated on being truly ready.

    When a step fails, what this call started is stopped again and `WorldError` says why. A decode
    that is gone while its prefill lives on is not started alone: `RefusedError`.
    """
    _supervised(parts)
    with parts.store.lock("repair"):
        before = {member.name: await _life(parts, member) for member in _members(parts)}
        _refuse_decode_alone(parts, before)
        plan = plan_bring_up(parts.settings.deployment, parts.settings.policy)
        try:
            outcomes = await _carry_out(parts, plan, tell)
        except BaseException:
            await _put_away(parts, before, tell)
            raise
        if not succeeded(plan, outcomes):
            failed = outcomes[-1]
            await _put_away(parts, before, tell)
            raise WorldError(
                f"{parts.settings.deployment.name} did not come up: {failed.detail}.",
                next_step="What was started is stopped again; mend that and run `tandem up`.",
            )
    await _keep_the_ledger(parts)
    return outcomes


def _refuse_decode_alone(parts: Parts, lives: dict[str, Incarnation | None]) -> None:
    """`up` is no way around the guard of `restart`: the prefill outlived that decode."""
    deployment = parts.settings.deployment
    old = [one.name for one in deployment.of(Role.PREFILL) if lives.get(one.name)]
    gone = [one.name for one in deployment.of(Role.DECODE) if lives.get(one.name, True) is None]
    if old and gone:
        raise RefusedError(
            f"{', '.join(gone)} is down while {', '.join(old)} has been running, and a decode "
            "started alone against such a prefill is how silent stalls begin.",
            next_step="Restart them together: `tandem down`, then `tandem up`.",
        )


async def take_down(parts: Parts, *, tell: Tell) -> tuple[Outcome, ...]:
    """Stop every member we may stop, in stop order, and check that nothing is left."""
    _supervised(parts)
    with parts.store.lock("repair"):
        plan = plan_take_down(parts.settings.deployment, parts.settings.policy)
        outcomes = await _carry_out(parts, plan, tell)
        if not succeeded(plan, outcomes):
            failed = next(one for one in outcomes if one.status == "failed")
            raise NotProvenError(
                f"{parts.settings.deployment.name} is not wholly down: {failed.detail}.",
                next_step="End the named holder yourself and run `tandem down` again.",
            )
    return outcomes


async def restart(parts: Parts, name: str, *, why: str, force: bool, tell: Tell) -> Incarnation:
    """Restart one member as `tandem.toml` now says, where that is known not to hurt.

    A decode alone against a running prefill is refused unless forced; who and why is recorded.
    Raises `RefusedError`, or `WorldError` when it does not come back.
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
    if hurts and not force:
        raise RefusedError(
            f"Restarting {name} alone against a running prefill is how silent stalls begin.",
            next_step="Restart the pair (`tandem down`, `tandem up`), or give --force --why TEXT.",
        )
    with parts.store.lock("repair"):
        await _keep_the_ledger(parts)
        supervisor = parts.hands.supervisors[member.supervisor]
        say(parts, tell, "restart", f"restarting {name}: {why}", member=name, why=why)
        await supervisor.stop(member, parts.settings.policy.stop_grace_s)
        life = await supervisor.start(member)
        engine = parts.hands.engines.get(member.engine) or parts.hands.routers[member.engine]
        deadline = parts.clock.now() + parts.settings.policy.start_timeout_s
        while not await engine.ready(member, 2.0):
            if parts.clock.now() > deadline or await supervisor.inspect(member) is None:
                raise WorldError(
                    f"{name} was started but does not answer at {member.url}.",
                    next_step=f"Read its log: {supervisor.log_path(member)}.",
                )
            await parts.clock.sleep(0.1)
    await _keep_the_ledger(parts)
    return life


async def status(parts: Parts) -> Status:
    """How the deployment stands: looked at now, with what the store remembers."""
    members = [await _member_status(parts, one) for one in parts.settings.deployment.members]
    up = [one for one in members if one.state == "up"]
    since = max((one.since for one in up if one.since is not None), default=None)
    incident = _pending(parts, members)
    name = parts.settings.deployment.name
    watched = parts.store.holder("watch") is not None
    finding = next((one for one in parts.store.open_findings() if one.actionable), None)
    state, summary, command = "serving", f"{name} serves and is watched", "tandem verify"
    if not up:
        state, summary, command = "down", f"{name} is down", "tandem up"
    elif len(up) < len(members):
        gone = ", ".join(one.name for one in members if one.state != "up")
        state, summary = "partly-down", f"{name} is partly down ({gone})"
        command = "tandem investigate"
    elif parts.store.holder("repair") is not None:
        state, summary, command = "repairing", f"{name} is being repaired", "tandem incidents"
    elif incident is not None and incident.finding is not None:
        state, summary, since = "sick", incident.finding.summary, incident.finding.onset_at
        command = f"tandem repair {incident.id}"
    elif finding is not None and watched:
        state, summary, since = "sick", finding.summary, finding.onset_at
        command = "tandem investigate"
    elif not watched:
        state, summary, command = "unwatched", f"{name} is up and nobody watches it", "tandem watch"
    facts = look_back(parts)
    decode = next(iter(parts.settings.deployment.of(Role.DECODE)), None)
    trait = facts.trait(decode.name, v.T_DECODE_ALONE_RESTART_HURTS) if decode else None
    never = NEVER_DECODE_ALONE if trait is None or trait.value is not False else ""
    return Status(
        deployment=name,
        state=state,
        since=since,
        summary=summary,
        next_command=command,
        never=never,
        members=tuple(members),
        incident=incident.id if incident else None,
    )


def _pending(parts: Parts, members: Sequence[MemberStatus]) -> Incident | None:
    """The newest incident, when it waits for a person and still speaks of what lives now."""
    newest = next(iter(parts.store.incidents()), None)
    if newest is None or newest.state != "advised" or newest.finding is None:
        return None
    if newest.plan is None or not newest.plan.steps:
        return None
    lives = {one.name: one.incarnation for one in members}
    known = newest.finding.incarnations.items()
    return newest if all(lives.get(name) in (life, None) for name, life in known) else None


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
        parts.store.journal_for("standing"),
        parts.clock,
        tell=lambda text: say(parts, tell, "step", text),
        settings=parts.settings,
    )


async def _put_away(parts: Parts, before: dict[str, Incarnation | None], tell: Tell) -> None:
    """Stop what this call started, and only that."""
    for member in reversed(_members(parts)):
        if before.get(member.name) is None and await _life(parts, member) is not None:
            tell(f"stopping {member.name} again")
            supervisor = parts.hands.supervisors[member.supervisor]
            await supervisor.stop(member, parts.settings.policy.stop_grace_s)


async def _member_status(parts: Parts, member: Member) -> MemberStatus:
    life = await _life(parts, member)
    adapter = parts.hands.engines.get(member.engine) or parts.hands.routers.get(member.engine)
    answers = adapter is not None and await adapter.ready(member, 2.0)
    state = "up" if answers else ("unreachable" if life else "down")
    return MemberStatus(
        name=member.name,
        role=member.role.value,
        state=state,
        since=life.started_at if life else None,
        incarnation=life.id if life else None,
        detail="" if answers else f"no answer at {member.url}",
    )


__all__ = ["bring_up", "restart", "status", "take_down"]

"""The steps of plans and their order: how to bring members up, take them down, restart them.

For: one place that knows that the stop order is not the start order, and which gate follows what.
Not for: deciding what to restart (`plan/__init__.py`) or doing it (`repair`).

Start: prefill until its bootstrap answers, decode until alive, a real hand-off over every path
between them, router, a routed request. Stop: router, decode, prefill, and only then a check that
nothing of them is left. The order is SGLang's (sglang-pd-protocol: a decode that meets a stale
prefill keeps its endpoints); an engine's own order may come as traits.
"""

from collections.abc import Collection, Sequence

import msgspec

from tandem.records import Deployment, Member, Path, Policy, Role, Step

START_ORDER: tuple[Role, ...] = (Role.PREFILL, Role.DECODE, Role.ROUTER)
STOP_ORDER: tuple[Role, ...] = (Role.ROUTER, Role.DECODE, Role.PREFILL)

GONE_TIMEOUT_S = 15.0
"""How long ports and memory of a dead process may linger before a person is told."""
STOP_MARGIN_S = 10.0
"""What a stop may take beyond its grace: SIGKILL, and a kernel that is busy."""


def bring_up_steps(deployment: Deployment, policy: Policy) -> tuple[Step, ...]:
    """Every member, in start order, each gated on being truly ready.

    A member nobody supervises is waited for and not started: somebody else brings it up.
    """
    steps = _start_in_order(deployment, deployment.members, deployment.cells(), policy, START_ORDER)
    foreign = {member.name for member in deployment.members if member.supervisor == "none"}
    return tuple(
        _awaited(step) if step.verb == "start" and step.target in foreign else step
        for step in steps
    )


def take_down_steps(
    deployment: Deployment, policy: Policy, only: Collection[str] | None = None
) -> tuple[Step, ...]:
    """Every supervised member (or those named in `only`), in stop order, each seen gone."""
    members = [
        member
        for member in deployment.members
        if member.supervisor != "none" and (only is None or member.name in only)
    ]
    return _stop_in_order(members, policy, STOP_ORDER)


def restart_steps(
    deployment: Deployment,
    members: Sequence[Member],
    drained: Sequence[str],
    policy: Policy,
    *,
    start_order: Sequence[Role] = START_ORDER,
    stop_order: Sequence[Role] = STOP_ORDER,
) -> tuple[Step, ...]:
    """Drain what moves, stop `members` in stop order, see them gone, start them in start order.

    Hand-offs are gated on every path that touches a restarted engine. Routers that are not in
    `members` keep running and get a routed request at the end.
    """
    names = {member.name for member in members}
    touched = [cell for cell in deployment.cells() if names & {cell.prefill, cell.decode}]
    steps = [_drain(target, policy) for target in drained]
    steps += _stop_in_order(members, policy, stop_order)
    steps += _start_in_order(deployment, members, touched, policy, start_order)
    kept = [router for router in deployment.of(Role.ROUTER) if router.name not in names]
    steps += [_routed(router, policy) for router in kept]
    return tuple(steps)


def order_from_trait(value: object, default: tuple[Role, ...]) -> tuple[Role, ...]:
    """An engine's own order of roles, where it names each role once and the router at its place.

    Without the router an order of the two engine roles is completed; anything else is ignored.
    """
    words = tuple(value) if isinstance(value, tuple) else ()
    engines = [Role(word) for word in words if word in (Role.PREFILL, Role.DECODE)]
    if sorted(engines) != [Role.DECODE, Role.PREFILL]:
        return default
    return (Role.ROUTER, *engines) if default[0] is Role.ROUTER else (*engines, Role.ROUTER)


def _of(members: Sequence[Member], role: Role) -> list[Member]:
    return [member for member in members if member.role is role]


def _stop_in_order(
    members: Sequence[Member], policy: Policy, order: Sequence[Role]
) -> tuple[Step, ...]:
    ordered = [member for role in order for member in _of(members, role)]
    stops = [_stop(member, policy) for member in ordered]
    return (*stops, *(_gone(member) for member in ordered))


def _start_in_order(
    deployment: Deployment,
    members: Sequence[Member],
    cells: Sequence[Path],
    policy: Policy,
    order: Sequence[Role],
) -> tuple[Step, ...]:
    engines = [member for role in order for member in _of(members, role) if role != Role.ROUTER]
    routers = _of(members, Role.ROUTER)
    steps = [_start(member, policy) for member in engines]
    steps += [_handoff(cell, policy) for cell in cells]
    steps += [_start(router, policy) for router in routers]
    if deployment.of(Role.PREFILL) and deployment.of(Role.DECODE):
        steps += [_routed(router, policy) for router in routers]
    return tuple(steps)


def _drain(target: str, policy: Policy) -> Step:
    return Step(
        id=f"drain:{target}",
        verb="drain",
        target=target,
        gate="drained",
        timeout_s=policy.drain_s,
        on_failure="continue",
        why="what still moves may finish; the bound keeps what is stuck from holding the repair",
    )


_STOP_WHY = {
    Role.ROUTER: "first, so that no new request meets a half-restarted pair",
    Role.DECODE: "before its prefill, so that it never meets a prefill in between",
    Role.PREFILL: "last: it holds the hand-offs of the others",
}

_START_WHY = {
    Role.PREFILL: "its bootstrap must answer before a decode asks for it",
    Role.DECODE: "it finds a fresh bootstrap and announces itself to it once",
    Role.ROUTER: "last, so that it finds fresh workers only",
}


def _stop(member: Member, policy: Policy) -> Step:
    return Step(
        id=f"stop:{member.name}",
        verb="stop",
        target=member.name,
        gate="none",
        timeout_s=policy.stop_grace_s + STOP_MARGIN_S,
        on_failure="stop",
        why=_STOP_WHY[member.role],
    )


def _gone(member: Member) -> Step:
    return Step(
        id=f"gone:{member.name}",
        verb="expect-gone",
        target=member.name,
        gate="gone",
        timeout_s=GONE_TIMEOUT_S,
        on_failure="stop",
        why="a process, port or shared memory left over would meet the new life",
    )


def _start(member: Member, policy: Policy) -> Step:
    return Step(
        id=f"start:{member.name}",
        verb="start",
        target=member.name,
        gate="bootstrap" if member.role is Role.PREFILL else "alive",
        timeout_s=policy.start_timeout_s,
        on_failure="stop",
        why=_START_WHY[member.role],
    )


def _awaited(start: Step) -> Step:
    """The same gate without the start."""
    return msgspec.structs.replace(
        start, id=f"ready:{start.target}", verb="gate", why="somebody else starts it"
    )


def _handoff(cell: Path, policy: Policy) -> Step:
    return Step(
        id=f"handoff:{cell.subject}",
        verb="gate",
        target=cell.subject,
        gate="handoff",
        timeout_s=policy.start_timeout_s,
        on_failure="stop",
        why="health says nothing of the hand-off: a short and a long prompt must really move KV",
    )


def _routed(router: Member, policy: Policy) -> Step:
    return Step(
        id=f"routed:{router.name}",
        verb="gate",
        target=router.name,
        gate="routed",
        timeout_s=policy.start_timeout_s,
        on_failure="stop",
        why="a request as clients send it is the only proof that clients are served",
    )

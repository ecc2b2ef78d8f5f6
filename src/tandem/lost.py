"""The requests that a restart kills, counted once each, as they stood just before the first stop.

A request waits in the router's hands, on the prefill and on the decode at the same time: the
router's number is the honest one, and the engines' queues only say where its requests were.

For: the list in the proof of a repair. Not for: what a plan says it will cost (`plan/costs.py`).

Pure: the same facts and plan give the same list.
"""

from collections.abc import Sequence

from tandem.facts import Facts
from tandem.records import LostRequest, Member, Plan, Role
from tandem.records import vocabulary as v

FRESH_S = 15.0
"""What was last seen longer ago than this says nothing of the moment of the stop."""
LIVE = "loads"
"""The source whose queue counts do not freeze: a gauge that stood still counts nobody."""

QUEUES = {
    Role.PREFILL: (
        (v.INFLIGHT_QUEUE_REQS, "computed and waiting for their hand-off"),
        (v.BOOTSTRAP_QUEUE_REQS, "waiting for the decode's metadata"),
        (v.WAITING_REQS, "waiting for their turn"),
    ),
    Role.DECODE: (
        (v.TRANSFER_QUEUE_REQS, "waiting for their KV"),
        (v.PREALLOC_QUEUE_REQS, "waiting for room"),
        (v.RETRACTED_QUEUE_REQS, "pushed out"),
        (v.WAITING_REQS, "waiting for their turn"),
        (v.RUNNING_REQS, "decoding"),
    ),
    Role.ROUTER: (),
}


def lost_requests(facts: Facts, plan: Plan) -> tuple[LostRequest, ...]:
    """What the plan's stops killed, as far as anyone but the clients can count it.

    `facts` are those at the first stop. Where a router counts, one row is its number and the
    engines' queues are the detail; else one row has the larger of both sides of the hand-off.
    """
    targets = {step.target for step in plan.steps if step.verb == "stop"}
    stopped = [member for member in facts.deployment.members if member.name in targets]
    engines = [member for member in stopped if member.role is not Role.ROUTER]
    where = _where(facts, engines)
    direct = _own_direct(facts, targets)
    if direct and where:
        where += f" ({direct} of these our own direct {_probes(direct)})"
    found = []
    for router in facts.deployment.of(Role.ROUTER):
        counted = _routed(facts, router, engines, whole=router.name in targets)
        if counted is None:
            continue
        own = _overdue(facts, router.name) and router.name in targets
        said = "in its hands" + (", 1 of them our own probe" if own else "")
        detail = f"{said}; they were {where}" if where else said
        found.append(LostRequest(subject=router.name, count=counted, detail=detail))
    if not found:
        found = _unrouted(facts, engines, where)
    return tuple(one for one in found if one.count > 0)


def _routed(facts: Facts, router: Member, engines: Sequence[Member], *, whole: bool) -> int | None:
    """What the router holds that the stops kill: all of it, or what it sent to these engines."""
    if whole:
        return _number(facts, router.name, v.ROUTER_ACTIVE_REQS)
    sides = [
        [
            number
            for member in engines
            if member.role is role
            and (number := _number(facts, router.name, v.WORKER_ACTIVE_REQS, member.name))
            is not None
        ]
        for role in (Role.PREFILL, Role.DECODE)
    ]
    # A request is counted at its prefill and at its decode.
    return max(sum(side) for side in sides) if any(sides) else None


def _unrouted(facts: Facts, engines: Sequence[Member], where: str) -> list[LostRequest]:
    """Without a router's number: the fuller side of the hand-off holds every request, or nearly."""
    sides = [
        sum(count for one in engines if one.role is role for count, _ in _held(facts, one))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    names = " and ".join(one.name for one in engines)
    return [LostRequest(subject=names, count=max(sides), detail=f"or more: {where}")]


def _where(facts: Facts, engines: Sequence[Member]) -> str:
    """Where on the engines requests were held, in words; empty when nowhere."""
    return "; ".join(
        f"{', '.join(f'{count} {what}' for count, what in held)} on {member.name}"
        for member in engines
        if (held := _held(facts, member))
    )


def _held(facts: Facts, member: Member) -> list[tuple[int, str]]:
    counted = [
        (_number(facts, member.name, name, source=LIVE), what) for name, what in QUEUES[member.role]
    ]
    return [(count, what) for count, what in counted if count]


def _own_direct(facts: Facts, targets: set[str]) -> int:
    """Our own probes that were out on the stopped paths, sent around the router."""
    cells = [cell for cell in facts.deployment.cells() if {cell.prefill, cell.decode} & targets]
    return sum(_overdue(facts, cell.subject) for cell in cells)


def _overdue(facts: Facts, subject: str) -> bool:
    """Whether our probe of this path or router was still out."""
    seen = facts.latest(subject, v.PROBE)
    fresh = seen is not None and facts.now - seen.at <= FRESH_S
    return fresh and seen is not None and seen.value in ("late", "stuck")


def _probes(count: int) -> str:
    return "probe" if count == 1 else "probes"


def _number(
    facts: Facts, subject: str, name: str, label: str = "", *, source: str | None = None
) -> int | None:
    samples = facts.numbers(subject, name, label, since=facts.now - FRESH_S, source=source)
    return int(samples[-1].value) if samples else None


__all__ = ["lost_requests"]

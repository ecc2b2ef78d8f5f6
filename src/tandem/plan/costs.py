"""What a plan will cost: learned start times, the outage, the requests that will be lost.

For: sentences for a person who decides at night. Not for: deciding.
"""

from collections.abc import Sequence
from statistics import median

from tandem.plan.case import Case, cite, listed
from tandem.records import Member, Role
from tandem.records import vocabulary as v

SEEN_BEFORE_S = 5.0
"""A start time counts as learned only when somebody looked at most this long before it."""
GATES_S = 3.0
"""What a hand-off gate and a routed request take on a healthy pair, roughly."""

HELD = (
    v.RUNNING_REQS,
    v.WAITING_REQS,
    v.BOOTSTRAP_QUEUE_REQS,
    v.INFLIGHT_QUEUE_REQS,
    v.PREALLOC_QUEUE_REQS,
    v.TRANSFER_QUEUE_REQS,
)


def costs(case: Case, members: Sequence[Member]) -> tuple[str, ...]:
    """One sentence each: start times, outage, requests that will be lost, what blocks acting."""
    if not members:
        return ()
    engines = [member for member in members if member.role is not Role.ROUTER]
    starts = [(member, start_time_s(case, member)) for member in members]
    return (
        *(_start_sentence(member, seconds) for member, seconds in starts),
        _outage(case, starts),
        _lost(case, engines or list(members)),
        *unsupervised(members),
    )


def start_time_s(case: Case, member: Member) -> float | None:
    """Seconds from start to the first answer, the median of what was watched; None if never.

    A start was watched when a look at the member precedes its answer by little more than the start
    itself; otherwise the first answer only says when we began to look.
    """
    lives = {
        seen.incarnation: float(seen.value)
        for seen in case.facts.rows(member.name, v.STARTED_AT)
        if seen.incarnation and isinstance(seen.value, int | float)
    }
    looks = case.answers(member)
    learned = []
    for began in lives.values():
        after = [at for at, well in looks if well and at >= began]
        if not after:
            continue
        watched = any(began - SEEN_BEFORE_S <= at < after[0] for at, _ in looks)
        replaced = any(began < other <= after[0] for other in lives.values())
        if watched and not replaced:
            learned.append(after[0] - began)
    return median(learned) if learned else None


def unsupervised(members: Sequence[Member]) -> tuple[str, ...]:
    """The sentence that says which members Tandem cannot restart itself; empty when none."""
    names = [member.name for member in members if member.supervisor == "none"]
    if not names:
        return ()
    who = f"Nobody told Tandem how to stop and start {listed(names)} (supervisor = none)"
    return (f"{who}: these steps are yours.",)


def _start_sentence(member: Member, seconds: float | None) -> str:
    if seconds is None:
        return f"{member.name}: start time not yet known."
    return f"{member.name}: ready {seconds:.1f} s after its start, as last seen."


def _outage(case: Case, starts: Sequence[tuple[Member, float | None]]) -> str:
    known_s = sum(seconds for _, seconds in starts if seconds is not None)
    known_s += case.policy.drain_s + GATES_S
    unknown = [member.name for member, seconds in starts if seconds is None]
    if case.one_pair or any(member.role is Role.ROUTER for member, _ in starts):
        what = "Outage"
    else:
        names = listed([member.name for member, _ in starts])
        what = f"Outage of the paths over {names} (the others keep serving)"
    if unknown:
        return f"{what}: about {known_s:.0f} s plus the start of {listed(unknown)}."
    return f"{what}: about {known_s:.0f} s."


def _held(member: Member) -> tuple[str, ...]:
    """The queues of a role; on a prefill the running requests are only those of its last batch."""
    return HELD[1:] if member.role is Role.PREFILL else HELD


def _lost(case: Case, members: Sequence[Member]) -> str:
    routers = case.deployment.of(Role.ROUTER)
    active = [case.number(router.name, v.ROUTER_ACTIVE_REQS) for router in routers]
    known = [reading for reading in active if reading]
    if case.one_pair and known:
        count = int(sum(value for value, _ in known))
        said = f"the router counts {count} active{cite(number for _, number in known)}"
    else:
        readings = [case.queued([member], _held(member)) for member in members]
        # Both sides of a pair hold the same request: the larger count is the honest one.
        count = max((held for held, _ in readings), default=0)
        cited = [number for _, evidence in readings for number in evidence]
        if not any(case.live(member.name, name) for member in members for name in HELD):
            return "Requests lost: not known, no load was observed."
        said = f"held by {listed([member.name for member in members])}{cite(cited[:4])}"
    if count == 0:
        return f"Requests lost: none in flight when this was planned; {said}."
    return f"Requests lost: up to {count}, those in flight; {said}."

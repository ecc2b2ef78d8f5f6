"""A member that is away: its process is gone, or nothing it serves answers.

For: `member-down`. Not for: a member that is being restarted or is still starting, nor for one
that answers but makes no progress (`stall`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.facts import Facts
from tandem.records import Incarnation, Member, Role, Thresholds, Witness
from tandem.records import vocabulary as v

STARTING_S = 60.0
"""A process this young may still be loading its model."""
HTTP_NAMES = {
    Role.ROUTER: (v.ROUTER_REQUESTS_TOTAL, v.WORKER_HEALTHY, v.ROUTER_ACTIVE_REQS),
    Role.PREFILL: (v.HEALTH_STATUS, v.INFLIGHT_QUEUE_REQS, v.RUNNING_REQS, v.REQUESTS_TOTAL),
    Role.DECODE: (v.HEALTH_STATUS, v.TRANSFER_QUEUE_REQS, v.RUNNING_REQS, v.REQUESTS_TOTAL),
}
"""Observations that only an answer over HTTP can bring."""
HTTP_SOURCES = ("health", "loads", "metrics", "router", "server_info")


def away(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """Every member that is down at this moment."""
    members = facts.deployment.members
    return [found for one in members if (found := _down(facts, one, thresholds))]


def _down(facts: Facts, member: Member, thresholds: Thresholds) -> Candidate | None:
    answered_at, refusals, why = _asked(facts, member)
    gone = _gone(facts, member.name)
    life = facts.incarnation(member.name)
    if not gone and (life is None or _starts(facts, life, answered_at)):
        # Without a process in sight, silence over HTTP may be a wrong address or our own network.
        return None
    quiet_since = max(answered_at, refusals[0][0] if refusals else float("-inf"))
    silent_s = facts.now - quiet_since if refusals else 0.0
    if gone:
        gone_s = facts.now - gone[0]
        if gone_s < thresholds.down_s or answered_at > gone[0]:
            return None
        onset_at = gone[0]
        statement = f"the process of {member.name} has been gone for {gone_s:.0f} s"
        witnesses = [server(statement, gone[1])]
    elif silent_s >= thresholds.down_s and len(refusals) >= 3:
        onset_at = quiet_since
        witnesses = [_mute(facts, member)]
    else:
        return None
    if refusals:
        said = f"{member.url} has not answered for {silent_s:.0f} s ({why})"
        cited = (refusals[0][1], refusals[-1][1])
        witnesses.insert(0, client(said, cited))
    unrouted = _unrouted(facts, member)
    if unrouted is not None:
        witnesses.append(unrouted)
    return Candidate(
        kind="member-down",
        subject=member.name,
        members=(member.name,),
        onset_at=onset_at,
        summary=f"{member.name} is down: {' and '.join(one.statement for one in witnesses)}",
        witnesses=tuple(witnesses),
    )


def _mute(facts: Facts, member: Member) -> Witness:
    """What is seen of a process that answers nothing: somebody may hold it."""
    stopped = signs.held_since(facts.rows(member.name, v.PROCESS_STATE), "T")
    if stopped is not None:
        return server(f"the process of {member.name} is stopped (state T)", (stopped.id,))
    alive = facts.latest(member.name, v.ALIVE)
    statement = f"the process of {member.name} lives but answers nothing"
    return server(statement, (alive.id,) if alive else ())


def _starts(facts: Facts, life: Incarnation, answered_at: float) -> bool:
    """Whether a life may still be loading: it is young, and has not answered yet."""
    return answered_at < life.started_at and facts.now - life.started_at < STARTING_S


def _asked(facts: Facts, member: Member) -> tuple[float, list[tuple[float, int]], str]:
    """When it last answered over HTTP, the failed asks since (no long gap between), the reason."""
    rows = [
        seen
        for name in HTTP_NAMES[member.role]
        for label in facts.labels(member.name, name) or ("",)
        for seen in facts.rows(member.name, name, label)
        if seen.source in HTTP_SOURCES
    ]
    answered_at = max((s.at for s in rows if s.missing is None), default=float("-inf"))
    failed = sorted((s.at, s.id, s.missing or "") for s in rows if s.missing and s.at > answered_at)
    for place in range(len(failed) - 1, 0, -1):
        if failed[place][0] - failed[place - 1][0] > signs.UNWATCHED_S:
            failed = failed[place:]
            break
    return answered_at, [(at, cite) for at, cite, _ in failed], failed[-1][2] if failed else ""


def _gone(facts: Facts, member: str) -> tuple[float, tuple[int, ...]] | None:
    """Since when the process collector sees no process, or a zombie; None when it lives."""
    for name, value in ((v.ALIVE, False), (v.PROCESS_STATE, "Z")):
        rows = facts.rows(member, name)
        first = signs.held_since(rows, value)
        if first is not None:
            return first.at, (first.id, rows[-1].id)
    return None


def _unrouted(facts: Facts, member: Member) -> Witness | None:
    for router in facts.deployment.of(Role.ROUTER):
        seen = facts.latest(router.name, v.WORKER_HEALTHY, member.name)
        if seen is not None and seen.value is False and facts.now - seen.at < signs.LOOK_FRESH_S:
            return client(f"{router.name} counts {member.name} as unhealthy", (seen.id,))
    return None

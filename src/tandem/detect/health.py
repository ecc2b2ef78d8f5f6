"""Health endpoints that lie: green while the path is dead, red while it is useful.

For: `health-lies`. Green is told where requests get no answer, nothing moves and no queue holds
them, so that no stall can be claimed; a stall says itself how `/health` answered. Red is told so
that nobody restarts for its sake. Not for: a member that answers nothing at all (`down`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, joined, server
from tandem.detect.settled import completed_nothing, settled
from tandem.detect.waiting import HELD_UP_S, backlog, held_up, overdue_probe
from tandem.facts import Facts
from tandem.records import Member, Observation, Path, Role, Thresholds, Witness
from tandem.records import vocabulary as v

GREEN_S = 20.0
"""No forward step is this long; a probe that is out for longer met none."""
GREEN_IDLE_S = 10.0
"""The same where both processes idle: then there is no step."""
RED_S = 20.0
"""Red for this long is what somebody restarts for."""
LOOKS_MIN = 3
COMPLETED_MIN = 2.0


def lying(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """The paths that are green and dead, as one, and every engine that is red and useful."""
    cells = facts.deployment.cells()
    green = [found for one in cells if (found := _green(facts, one, thresholds))]
    engines = (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE))
    red = [found for one in engines if (found := _red(facts, one))]
    return ([joined(facts, green, "are green and dead")] if green else []) + red


def _green(facts: Facts, cell: Path, thresholds: Thresholds) -> Candidate | None:
    """200 on both ends while a probe is out and neither end moves a token or holds a request."""
    probe = overdue_probe(facts, cell.subject)
    if probe is None or probe.value != "stuck":
        return None
    members = (cell.prefill, cell.decode)
    late = _overdue_since(facts, cell.subject)
    idle = _idle(facts, members)
    window_s = GREEN_IDLE_S if idle else GREEN_S
    if not idle and any(_may_work(facts, name) for name in members):
        return None
    if late is None or not settled(facts, members, window_s):
        return None
    sent_at = late.at - thresholds.probe_deadline_s
    if facts.now - sent_at < window_s:
        return None
    if facts.now - sent_at < HELD_UP_S and held_up(facts, cell, thresholds):
        return None
    cited: list[int] = []
    for name in members:
        tokens = signs.beyond_health(facts, name, window_s)
        done = signs.completed(facts, name, window_s)
        if tokens is None or tokens.value > 0 or (done is not None and done.value > 0):
            return None
        cited += tokens.evidence
    looks = [_health(facts, name, window_s) for name in members]
    if any(len(rows) < LOOKS_MIN or any(one.value != 200 for one in rows) for rows in looks):
        return None
    lasted_s = facts.now - sent_at
    waits = client(
        f"a probe of {cell.subject} has had no answer for {lasted_s:.0f} s", (late.id, probe.id)
    )
    dead = server(
        f"/health of {cell.prefill} and {cell.decode} answered 200 in all {sum(map(len, looks))} "
        f"looks while neither completed anything or computed a token beyond health checks",
        (*(rows[-1].id for rows in looks), *cited),
    )
    others = _others_wait(facts, window_s)
    said = f", and {others.statement}" if others else "; it may be the one answer that got lost"
    return Candidate(
        kind="health-lies",
        subject=cell.subject,
        members=members,
        onset_at=sent_at,
        summary=f"{cell.subject} is green and dead: {waits.statement}, {dead.statement}{said}",
        witnesses=(waits, dead, *((others,) if others else ())),
        actionable=others is not None,
    )


def _others_wait(facts: Facts, window_s: float) -> Witness | None:
    """Another client that waits: one lost answer is not a dead path."""
    for router in facts.deployment.of(Role.ROUTER):
        routed = overdue_probe(facts, router.name)
        if routed is not None:
            said = f"the probe through {router.name} got no answer either ({routed.value})"
            return client(said, (routed.id,))
    return backlog(facts, window_s)


def _may_work(facts: Facts, member: str) -> bool:
    """Whether a member that computes may be at work unseen: a cold start, or an unwired counter."""
    unwired = signs.never_moved(facts, member, v.PROGRESS_TOKENS_TOTAL)
    return unwired or completed_nothing(facts, member)


def _idle(facts: Facts, members: tuple[str, ...]) -> bool:
    used = [signs.busy(facts, name, GREEN_IDLE_S) for name in members]
    return all(one is not None and one.value < signs.BUSY_CPU for one in used)


def _overdue_since(facts: Facts, subject: str) -> Observation | None:
    """The first word that the probe which is out is overdue."""
    first = None
    for seen in reversed(facts.rows(subject, v.PROBE)):
        if seen.missing is not None:
            continue
        if seen.value not in ("late", "stuck"):
            break
        first = seen
    return first


def _health(facts: Facts, member: str, window_s: float) -> list[Observation]:
    since = facts.now - window_s
    return [seen for seen in facts.rows(member, v.HEALTH_STATUS) if seen.at > since]


def _red(facts: Facts, engine: Member) -> Candidate | None:
    """No 200 for a while, and requests complete all along."""
    newest = facts.last(engine.name, v.HEALTH_STATUS)
    if newest is None or newest.value == 200:
        return None
    rows = _health(facts, engine.name, RED_S)
    first = rows[0] if rows else newest
    if len(rows) < LOOKS_MIN or any(one.value == 200 for one in rows):
        return None
    early = signs.completed(facts.at(facts.now - RED_S / 2), engine.name, RED_S / 2)
    late = signs.completed(facts, engine.name, RED_S / 2)
    if early is None or late is None or min(early.value, late.value) < COMPLETED_MIN:
        return None
    answers = f"HTTP {newest.value}" if newest.missing is None else newest.missing
    red = server(
        f"/health of {engine.name} has not answered 200 for {facts.now - first.at:.0f} s "
        f"({answers})",
        (first.id, newest.id),
    )
    works = server(
        f"it completed {early.value + late.value:.0f} requests meanwhile",
        (*early.evidence, *late.evidence),
    )
    return Candidate(
        kind="health-lies",
        subject=engine.name,
        members=(engine.name,),
        onset_at=first.at,
        summary=f"{engine.name} is red and useful: {red.statement}, and {works.statement}: "
        "do not restart it for that",
        witnesses=(red, works),
        actionable=False,
    )

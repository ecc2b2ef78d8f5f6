"""Restarts: a member that does not stay up, and a decode restarted alone against an old prefill.

For: `member-restarting` (a crash loop) and `restart-hazard` (noted, probed at one page and at long
length, then cleared or escalated). Not for: a restart as such, which is no fault.
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.detect.ends import crashes, last_end, restarted_by
from tandem.facts import Facts
from tandem.records import Change, Member, Path, Role, Thresholds, Witness
from tandem.records import vocabulary as v

LOOP_S = 300.0
"""Restarts within this long are one loop."""
OVER_S = 120.0
"""A life that lasted this long ended the loop."""
CRASHES_MIN = 3
"""So many lives that ended badly, or never served, are a crash loop."""
RESTARTS_MIN = 5
"""So many restarts are worth a word, whoever made them."""
HAZARD_S = 170.0
"""How long a restarted decode is under suspicion: as long as its probes stay in sight."""
SAME_LIFE_S = 5.0
MISSED = ("late", "stuck", "failed")
MISSES_MIN = 2


def restarting(facts: Facts) -> list[Candidate]:
    """Every member that does not stay up."""
    recent = _recent(facts, LOOP_S)
    return [
        found
        for one in facts.deployment.members
        if len(recent.get(one.name, ())) >= CRASHES_MIN
        and (found := _loop(facts, one, recent[one.name]))
    ]


def _recent(facts: Facts, within_s: float) -> dict[str, list[Change]]:
    """The restarts of each member within the last seconds, oldest first."""
    found: dict[str, list[Change]] = {}
    for change in reversed(facts.changes):
        if change.at < facts.now - within_s:
            break
        if change.kind == "restart":
            found.setdefault(change.subject, []).insert(0, change)
    return found


def _loop(facts: Facts, member: Member, restarts: list[Change]) -> Candidate | None:
    if facts.now - restarts[-1].at > OVER_S:
        return None
    crashed = _crashed(facts, member, restarts) or _unserved(facts, member, restarts)
    actionable = crashed is not None
    if not actionable and len(restarts) < RESTARTS_MIN:
        return None
    within_s = facts.now - restarts[0].at
    lives = server(
        f"{member.name} was restarted {len(restarts)} times in the last {within_s:.0f} s",
        tuple(
            seen.id
            for seen in (facts.latest(member.name, v.STARTED_AT), facts.last(member.name, v.ALIVE))
            if seen is not None
        ),
    )
    by = restarted_by(facts, member.name)
    witnesses = tuple(one for one in (crashed, lives, by) if one is not None)
    why = " and ".join(one.statement for one in (crashed, by) if one is not None)
    return Candidate(
        kind="member-restarting",
        subject=member.name,
        members=(member.name,),
        onset_at=restarts[0].at,
        summary=f"{member.name} does not stay up: {lives.statement}; "
        f"{why or 'who restarts it is not known'}",
        witnesses=witnesses,
        actionable=actionable,
        outlives=True,
    )


def _crashed(facts: Facts, member: Member, restarts: list[Change]) -> Witness | None:
    """Ends that nobody asked for, of as many lives."""
    seen = crashes(facts, member.name, restarts[0].at - OVER_S)
    if len(seen) < CRASHES_MIN:
        return None
    last = last_end(facts, member.name, seen[-1].at)
    how = last.statement.removeprefix("it ended with ") if last else f"exit code {seen[-1].value}"
    return server(
        f"{len(seen)} of its lives crashed, the last with {how}",
        tuple(one.id for one in seen[-CRASHES_MIN:]),
    )


def _unserved(facts: Facts, member: Member, restarts: list[Change]) -> Witness | None:
    """None of these lives ever answered: it dies before it serves."""
    since = restarts[-CRASHES_MIN].at
    if member.role is Role.ROUTER:
        names: tuple[str, ...] = (v.ROUTER_REQUESTS_TOTAL,)
    else:
        names = (v.HEALTH_STATUS, v.REQUESTS_TOTAL, v.RUNNING_REQS, v.PROGRESS_TOKENS_TOTAL)
    rows = [seen for name in names for seen in facts.rows(member.name, name) if seen.at >= since]
    # A life begins a moment before the first look at it.
    if not rows or rows[0].at - since > signs.STARTED_LATELY_S:
        return None
    if any(seen.missing is None and seen.value != 503 for seen in rows):
        return None
    newest = max(rows, key=lambda seen: seen.at)
    return client(
        f"none of its last {CRASHES_MIN} lives ever answered ({newest.missing or newest.value})",
        (newest.id,),
    )


def hazards(facts: Facts, _thresholds: Thresholds) -> list[Candidate]:
    """Every decode that was restarted alone against a prefill that keeps running."""
    recent = _recent(facts, HAZARD_S)
    return [
        found
        for cell in facts.deployment.cells()
        if cell.decode in recent and (found := _hazard(facts, cell, recent[cell.decode][-1]))
    ]


def _hazard(facts: Facts, cell: Path, restart: Change) -> Candidate | None:
    trait = facts.trait(cell.decode, v.T_DECODE_ALONE_RESTART_HURTS)
    prefill, decode = facts.incarnation(cell.prefill), facts.incarnation(cell.decode)
    if trait is None or trait.value is not True or prefill is None or decode is None:
        return None
    if restart.incarnation not in (None, decode.id):
        return None
    met = [
        life
        for life in signs.lives(facts, cell.decode)
        if life.started_at < restart.at - SAME_LIFE_S and life.last_seen_at > prefill.started_at
    ]
    if not met:
        # No earlier life of the decode met this life of the prefill: they started together.
        return None
    short, long, missed = _probed(facts, cell, restart.at)
    if short and long:
        return None
    old_s = restart.at - prefill.started_at
    alone = server(
        f"{cell.decode} was restarted alone against {cell.prefill}, which had been running for "
        f"{old_s:.0f} s, and that is known to hurt ({trait.because})",
        _cited(facts, cell),
    )
    probed = client(
        f"since then {_said(short, 'one page')} and {_said(long, 'long prompts')}",
        (*short, *long, *missed),
    )
    escalated = bool(short) and not long and len(missed) >= MISSES_MIN
    return Candidate(
        kind="restart-hazard",
        subject=cell.subject,
        members=(cell.prefill, cell.decode),
        onset_at=restart.at,
        summary=f"a hazard on {cell.subject}: {alone.statement}; {probed.statement}",
        witnesses=(probed, alone),
        actionable=escalated,
    )


def _probed(
    facts: Facts, cell: Path, since: float
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Probes since the restart: one that completed, a long one that did, and long ones missed."""
    every = [seen for seen in facts.rows(cell.subject, v.PROBE) if seen.at > since]
    long = [seen for seen in facts.rows(cell.subject, v.PROBE, v.LONG) if seen.at > since]
    passed = [seen.id for seen in every if seen.value == "completed"]
    passed_long = [seen.id for seen in long if seen.value == "completed"]
    missed = [seen.id for seen in long if seen.value in MISSED]
    return tuple(passed[:1]), tuple(passed_long[:1]), tuple(missed[-MISSES_MIN:])


def _said(passed: tuple[int, ...], what: str) -> str:
    return f"a probe of {what} completed" if passed else f"no probe of {what} completed yet"


def _cited(facts: Facts, cell: Path) -> tuple[int, ...]:
    rows = [facts.latest(name, v.STARTED_AT) for name in (cell.prefill, cell.decode)]
    return tuple(seen.id for seen in rows if seen is not None)

"""The ladder of repairs: the smallest rung that suffices, and why each smaller one does not.

For: turning the leading mode's scope into members, and refusing rungs with reasons that cite this
night's evidence. Not for: the order of steps (`steps.py`) or their price (`costs.py`).
"""

from dataclasses import dataclass

from tandem.facts import Facts
from tandem.plan.case import Case, cite, listed
from tandem.records import Member, ModeVerdict, RefusedRung, Role, Trait
from tandem.records import vocabulary as v

LADDER = ("nothing", "router", "engine", "pair", "role", "all")
"""Smallest first. `config` stands beside it: an exact edit, never applied without approval."""

PAUSED = "member-paused"
"""A finding that names what ends it, which is never a restart."""
STOPPED = "T"
BAD_PROBES = ("late", "failed", "stuck")
DECODE_WAITS = (v.TRANSFER_QUEUE_REQS, v.PREALLOC_QUEUE_REQS)


@dataclass(frozen=True, slots=True)
class Choice:
    """A rung, the members it restarts, and the reason when nothing can be chosen."""

    scope: str
    members: tuple[Member, ...] = ()
    because: str = ""


def choose(case: Case) -> Choice:
    """The smallest rung that the leading mode and the traits allow, with its members."""
    if case.finding is not None and not case.finding.actionable:
        return Choice("nothing", because=f"{case.finding.summary}: told, never repaired.")
    if (paused := _paused(case)) is not None:
        return Choice("nothing", because=paused)
    if case.diagnosis.verdict == "undetermined":
        look = case.diagnosis.next_observation or "collect more evidence"
        return Choice(
            "nothing",
            because=f"The cause is undetermined, so nothing is touched. Observe next: {look}",
        )
    if case.diagnosis.verdict == "none" or case.leading is None:
        return Choice("nothing", because="No failure mode explains a fault here.")
    return _rung(case, case.leading)


def _paused(case: Case) -> str | None:
    """What ends a pause; a restart before that would lose what the member holds."""
    first = "Do that first: a restart would lose what it holds"
    if case.finding is not None and case.finding.kind == PAUSED:
        return f"{case.finding.summary}. {first}"
    for member in (one for role in Role for one in case.sick(role)):
        seen = case.facts.latest(member.name, v.PROCESS_STATE)
        if seen is not None and seen.value == STOPPED:
            life = case.facts.incarnation(member.name)
            pid = life.pid if life is not None and life.pid is not None else "PID"
            said = f"The process of {member.name} is stopped (state T)"
            return f"{said}: `kill -CONT {pid}` lets it go on. {first}{cite([seen.id])}"
    return None


def _rung(case: Case, mode: ModeVerdict) -> Choice:
    scope, _, role = mode.scope.partition(":")
    if scope in ("nothing", "config"):
        return Choice(scope, because=mode.because)
    if scope == "router":
        return _members(case, scope, case.sick(Role.ROUTER) or case.deployment.of(Role.ROUTER))
    if scope == "engine":
        return _engine(case, role)
    if scope == "pair":
        return _pair(case)
    if scope == "role":
        return _role(case, role)
    return _members(case, "all", case.deployment.members)


def _members(case: Case, scope: str, members: tuple[Member, ...]) -> Choice:
    if not members:
        return Choice(
            "nothing",
            because=f"The cause calls for a restart of the {scope}, but nothing says which member "
            f"is sick (subject: {case.subject or 'none'}): probe every path directly first.",
        )
    return Choice(scope, members)


def _engine(case: Case, role: str) -> Choice:
    roles = [Role(role)] if role in tuple(Role) else [Role.DECODE, Role.PREFILL]
    named = [member for one in roles for member in case.sick(one)]
    sick = [member for member in named if len(named) == 1 or case.dead(member)]
    if len(sick) != 1 or (case.one_pair and len(_dead(case)) > 1):
        return _pair(case)
    if sick[0].role is Role.DECODE and restart_hurts(case.facts, sick[0]) is not None:
        return _pair(case)
    return Choice("engine", (sick[0],))


def _pair(case: Case) -> Choice:
    prefills, decodes = case.sick(Role.PREFILL), case.sick(Role.DECODE)
    if len(prefills) != 1 or len(decodes) != 1:
        prefills, decodes = _worst_cell(case, prefills, decodes)
    if not prefills or not decodes:
        return _members(case, "pair", ())
    routers = case.deployment.of(Role.ROUTER) if case.one_pair else ()
    return Choice("pair", (*prefills, *decodes, *routers))


def _worst_cell(
    case: Case, prefills: tuple[Member, ...], decodes: tuple[Member, ...]
) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    """The one cell whose direct probe does not complete, among those the subject leaves."""
    bad = [
        (prefill, decode)
        for prefill in prefills or case.deployment.of(Role.PREFILL)
        for decode in decodes or case.deployment.of(Role.DECODE)
        if (seen := case.facts.latest(f"{prefill.name}>{decode.name}", v.PROBE))
        and seen.value in BAD_PROBES
    ]
    return ((bad[0][0],), (bad[0][1],)) if len(bad) == 1 else ((), ())


def _role(case: Case, role: str) -> Choice:
    roles = [Role(role)] if role in tuple(Role) else []
    if not roles:
        roles = [one for one in (Role.PREFILL, Role.DECODE) if case.sick(one)]
    if len(roles) != 1:
        return _members(case, "all", case.deployment.members)
    return _members(case, "role", case.deployment.of(roles[0]))


def restart_hurts(facts: Facts, decode: Member) -> Trait | None:
    """The trait that says a restart of this decode alone hurts, or None."""
    trait = facts.trait(decode.name, v.T_DECODE_ALONE_RESTART_HURTS)
    return trait if trait is not None and trait.value is True else None


def refusals(case: Case, choice: Choice) -> tuple[RefusedRung, ...]:
    """Every rung below the chosen one, with why it does not suffice."""
    if choice.scope not in LADDER:
        return ()
    reasons = {"nothing": _not_nothing, "router": _not_router, "engine": _not_engine}
    smaller = LADDER[: LADDER.index(choice.scope)]
    return tuple(
        RefusedRung(scope=scope, because=reasons.get(scope, _not_wider)(case)) for scope in smaller
    )


def _not_nothing(case: Case) -> str:
    if case.finding is None:
        return f"{case.diagnosis.cause} stands, and nothing seen ends it by itself."
    lasted_s = max(case.facts.now - case.finding.onset_at, 0.0)
    cited = [number for witness in case.finding.witnesses for number in witness.evidence]
    timeout = case.trait(v.T_WAITING_TIMEOUT_S)
    ends = (
        f"the engine's own timeout of {timeout.value} s fails requests and mends nothing"
        if timeout is not None
        else "nothing seen ends it by itself"
    )
    return (
        f"{case.finding.kind} on {case.finding.subject} has lasted {lasted_s:.0f} s; {ends}."
        f"{cite(cited[:2])}"
    )


def _not_router(case: Case) -> str:
    for prefill in case.sick(Role.PREFILL) or case.deployment.of(Role.PREFILL):
        for decode in case.sick(Role.DECODE) or case.deployment.of(Role.DECODE):
            path = f"{prefill.name}>{decode.name}"
            seen = case.facts.latest(path, v.PROBE)
            if seen is not None and seen.value in BAD_PROBES:
                return (
                    f"The direct probe of {path}, which passes no router, was {seen.value} too."
                    f"{cite([seen.id])}"
                )
    prefills = case.sick(Role.PREFILL)
    held, cited = case.queued(prefills, [v.INFLIGHT_QUEUE_REQS])
    if held:
        names = listed([member.name for member in prefills])
        return f"{names} holds {held} hand-offs that no router restart releases.{cite(cited)}"
    for member in case.deployment.members:
        if member.role is not Role.ROUTER and case.dead(member):
            return f"{member.name} is dead behind the router."
    leading = case.leading
    return f"Nothing points at the router: {leading.because if leading else case.subject}"


def _dead(case: Case) -> list[Member]:
    return [member for member in case.deployment.members if case.dead(member)]


def _not_engine(case: Case) -> str:
    dead = _dead(case)
    if len(dead) > 1:
        names = listed([member.name for member in dead])
        return f"{names} are dead: one of them alone would wait for the others at its gates."
    decodes, prefills = case.sick(Role.DECODE), case.sick(Role.PREFILL)
    sentences = [_not_decode_alone(case, decode, prefills) for decode in decodes]
    sentences += [_not_prefill_alone(case, prefill, decodes) for prefill in prefills]
    return " ".join(sentences) or "No single engine is named by the evidence."


def _not_decode_alone(case: Case, decode: Member, prefills: tuple[Member, ...]) -> str:
    life = case.facts.incarnation(prefills[0].name) if prefills else None
    since = life.started_at if life else None
    restarts = case.facts.changes_of(decode.name, "restart", since=since)
    trait = restart_hurts(case.facts, decode)
    known = f" (trait {trait.name}: {trait.because})" if trait else ""
    if restarts and prefills:
        times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
        return (
            f"Restarting {decode.name} alone is what led here: it was restarted {times} against "
            f"the same life of {prefills[0].name}{known}."
        )
    if trait:
        return f"Restarting {decode.name} alone against a running prefill hurts{known}."
    prefill = prefills[0].name if prefills else "its prefill"
    return f"Restarting {decode.name} alone leaves {prefill} with what it holds of the old one."


def _not_prefill_alone(case: Case, prefill: Member, decodes: tuple[Member, ...]) -> str:
    held, cited = case.queued(decodes, DECODE_WAITS)
    decode = listed([member.name for member in decodes]) or "its decode"
    if held:
        return (
            f"Restarting {prefill.name} alone leaves {decode} with {held} requests that wait for "
            f"the old one's hand-offs.{cite(cited)}"
        )
    return f"Restarting {prefill.name} alone leaves {decode} with the old one's endpoints."


def _not_wider(case: Case) -> str:
    mode = case.leading
    return (
        f"The fault is not confined to {case.subject or 'one pair'}: {mode.because if mode else ''}"
    )

"""How the floor of the inflight queue rose: at restarts of the decode, or between them.

For: dating the floor against the restarts, and telling a stale peer from an orphaned transfer, the
two mechanisms that leave the signature of a pair degraded by decode-only restarts. Not for: the
other evidence of that failure.

A hand-off that never ends stays in the queue for ever, so the number of them is the floor that the
queue never goes below again; each step of that floor is the birth of one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tandem import signs
from tandem.facts import Facts, Sample
from tandem.failures.answers import (
    DYING_S,
    SETTLE_S,
    Alone,
    clock,
    contradicts,
    decode_alone,
    held,
    supports,
    unknown,
)
from tandem.records import Role, TestResult
from tandem.records import vocabulary as v

TAIL_S = 9.0
"""The newest looks may show ordinary traffic above the floor; steps of the floor end before."""
CURED_MIN = 20
"""Hand-offs completed after a restart, with the queue empty again, that clear that restart: with
even one dead peer beside the live one, 20 rooms in a row miss it once in a million."""
DOUBTED_MIN = 8
"""As many cast doubt: one in 250."""
EMPTY_LOOKS_MIN = 5
"""Looks at an empty queue that show it really was empty again."""
FLOWED_MIN = 8
"""Hand-offs completed while no decode restarted: as many rooms would not all miss a stale peer."""


def held_since_a_restart(facts: Facts, subject: str) -> TestResult:
    """Whether the inflight floor rose at or after a decode-only restart, and not before."""
    test = "held-since-a-restart"
    prefill, decode = signs.ends(facts, subject)
    alone = decode_alone(facts, prefill, decode) if prefill and decode else None
    if prefill is None or alone is None or not alone.restarts:
        return unknown(test, "strong", "no decode-only restart is known to measure against")
    looks = facts.numbers(prefill, v.INFLIGHT_QUEUE_REQS, source=signs.LIVE)
    rose = signs.risen(facts, prefill, v.INFLIGHT_QUEUE_REQS)
    if rose is None:
        return unknown(test, "strong", "nothing is held now, so there is no rise to date")
    first = alone.restarts[0].started_at
    earlier = [
        life
        for life, died_at in zip(alone.restarts, alone.deaths, strict=True)
        if died_at - DYING_S <= rose.at
    ]
    if not earlier:
        return _held_before(facts, test, prefill, rose, first)
    if rose.at == looks[0].at:
        return unknown(
            test,
            "strong",
            f"hand-offs were held as far back as is known ({clock(rose.at)})",
            f"{prefill}'s inflight queue from before the decode restart at {clock(first)}",
        )
    return _held_after(facts, test, prefill, rose, earlier)


def _held_before(facts: Facts, test: str, prefill: str, rose: Sample, first: float) -> TestResult:
    """The queue was above zero before any restart: by traffic, or by another fault."""
    low = held(facts, prefill, v.INFLIGHT_QUEUE_REQS)
    level = signs.risen(facts, prefill, v.INFLIGHT_QUEUE_REQS, low.value) if low else None
    if level is not None and level.at > first - DYING_S:
        # Weak: under load the queue is rarely empty, so only the present height can be dated.
        why = f"{prefill}'s inflight queue reached its present floor only at {clock(level.at)}"
        return supports(test, "weak", why, (level.id,))
    # Decisive: an effect does not precede its cause.
    why = (
        f"{prefill} held hand-offs since {clock(rose.at)}, before the decode was first restarted "
        f"alone ({clock(first)})"
    )
    return contradicts(test, "decisive", why, (rose.id,))


def _held_after(
    facts: Facts, test: str, prefill: str, rose: Sample, restarts: Sequence[signs.Life]
) -> TestResult:
    """The queue rose after a restart: at once, or only after it had long worked again."""
    restart = restarts[-1]
    since = restart.started_at + SETTLE_S
    looks = facts.numbers(prefill, v.INFLIGHT_QUEUE_REQS, since=since, source=signs.LIVE)
    empty = [look for look in looks if look.at < rose.at and look.value == 0]
    done = _completed(facts, prefill, since, rose.at)
    cited = (*restart.evidence[-1:], *(look.id for look in empty[-1:]), rose.id)
    emptied = len(empty) >= EMPTY_LOOKS_MIN
    if emptied and done is None:
        why = f"the inflight queue was empty again until {clock(rose.at)}, by how much work is open"
        ask = f"hand-offs completed by {prefill} since {clock(restart.started_at)}"
        return unknown(test, "strong", why, ask)
    if emptied and done is not None and done >= DOUBTED_MIN:
        why = (
            f"after the decode restart at {clock(restart.started_at)} {done:.0f} hand-offs "
            f"completed and the inflight queue was empty again until {clock(rose.at)}"
        )
        # Decisive past CURED_MIN: neither mechanism lets a queue work that long and then fill.
        return contradicts(test, "decisive" if done >= CURED_MIN else "strong", why, cited)
    # Strong: the fault and the restart coincide to within seconds, in the right order: what was in
    # flight when a decode died had been taken up before the next one started.
    near = min(restarts, key=lambda life: abs(life.started_at - rose.at))
    restarted = "had been" if near.started_at <= rose.at else "was then being"
    why = (
        f"{prefill}'s inflight queue was last empty just before {clock(rose.at)} and has not been "
        f"since; the decode {restarted} restarted alone (started {clock(near.started_at)})"
    )
    return supports(test, "strong", why, (*near.evidence[-1:], *cited[1:]))


def _completed(facts: Facts, prefill: str, since: float, until: float) -> float | None:
    """Hand-offs completed in a stretch, by whoever counted most; None when nobody did.

    The prefill counts them, the decodes and the router count the requests that needed them, and a
    completed probe is one.
    """
    counters = [(prefill, v.TRANSFERS_TOTAL), (prefill, v.REQUESTS_TOTAL)]
    counters += [(one.name, v.REQUESTS_TOTAL) for one in facts.deployment.of(Role.DECODE)]
    counters += [(one.name, v.ROUTER_RESPONSES_TOTAL) for one in facts.deployment.of(Role.ROUTER)]
    counts = [
        signs.growth(samples).value
        for member, name in counters
        if len(samples := [s for s in facts.numbers(member, name, since=since) if s.at <= until])
        > 1
    ]
    probes = [
        seen
        for cell in facts.deployment.cells()
        if cell.prefill == prefill
        for seen in facts.rows(cell.subject, v.PROBE)
        if since <= seen.at <= until and seen.value == "completed"
    ]
    return max([*counts, float(len(probes))] if counts or probes else [], default=None)


class Steps(NamedTuple):
    """How the floor that was never gone below again rose: at restarts, and between them."""

    at_restarts: float
    between: float
    flowed: float
    """Hand-offs that completed while no decode was restarting."""
    evidence: tuple[int, ...]


def mechanism(facts: Facts, subject: str) -> tuple[str | None, TestResult | None]:
    """Stale peer or orphaned transfer, when the steps of the inflight floor tell them apart."""
    test = "steps-of-the-floor"
    prefill, decode = signs.ends(facts, subject)
    alone = decode_alone(facts, prefill, decode) if prefill and decode else None
    if prefill is None or alone is None or not alone.restarts:
        return None, None
    steps = _steps(facts, prefill, alone)
    if steps is None:
        return None, None
    if steps.between >= 1:
        # Strong from two on: an orphan cannot be born while every decode lives.
        strong = steps.between >= 2
        why = (
            f"the floor of {prefill}'s inflight queue rose by {steps.between:.0f} while no decode "
            f"was restarting ({steps.at_restarts:.0f} at restarts)"
        )
        said = supports(test, "strong" if strong else "moderate", why, steps.evidence)
        return "stale-peer", said
    if steps.at_restarts >= 1 and steps.flowed >= FLOWED_MIN:
        # Strong: stale peers would have caught some of the rooms that completed.
        why = (
            f"the floor of {prefill}'s inflight queue rose only at restarts (by "
            f"{steps.at_restarts:.0f}); {steps.flowed:.0f} hand-offs completed while none restarted"
        )
        return "orphaned-transfer", supports(test, "strong", why, steps.evidence)
    return None, None


def _steps(facts: Facts, prefill: str, alone: Alone) -> Steps | None:
    """Attribute each rise of the never-again-undercut floor to a restart or to none."""
    looks = facts.numbers(prefill, v.INFLIGHT_QUEUE_REQS, source=signs.LIVE)
    if len(looks) < 2 or looks[-1].value < 1 or looks[0].at > alone.deaths[0]:
        return None
    looks = [look for look in looks if look.at >= alone.deaths[0] - DYING_S]
    lowest = looks[-1].value
    floors: list[float] = []
    for look in reversed(looks):
        lowest = min(lowest, look.value)
        floors.insert(0, lowest)
    at_restarts = between = 0.0
    cited: list[int] = []
    end = facts.now - TAIL_S
    for (before, low), (after, high) in pairwise(zip(looks, floors, strict=True)):
        if high <= low or after.at > end:
            continue
        cited += [before.id, after.id]
        if _near_a_restart(alone, before.at, after.at):
            at_restarts += high - low
        else:
            between += high - low
    moved = facts.numbers(prefill, v.TRANSFERS_TOTAL, since=alone.deaths[0])
    flowed = sum(
        max(0.0, after.value - before.value)
        for before, after in pairwise(moved)
        if not _near_a_restart(alone, before.at, after.at)
    )
    return Steps(at_restarts, between, flowed, tuple(dict.fromkeys(cited)))


def _near_a_restart(alone: Alone, since: float, until: float) -> bool:
    return any(
        until >= died_at - DYING_S and since <= life.started_at + SETTLE_S
        for life, died_at in zip(alone.restarts, alone.deaths, strict=True)
    )

"""How the floor of the inflight queue rose: at restarts of the decode, or between them.

For: telling a stale peer from an orphaned transfer, the two mechanisms that leave the signature of
a pair degraded by decode-only restarts. Not for: deciding that it is that failure at all.

A hand-off that never ends stays in the queue for ever, so the number of them is the floor that the
queue never goes below again; each step of that floor is the birth of one.
"""

from itertools import pairwise
from typing import NamedTuple

from tandem import signs
from tandem.facts import Facts
from tandem.failures.answers import DYING_S, SETTLE_S, Alone, decode_alone, supports
from tandem.records import TestResult
from tandem.records import vocabulary as v

TAIL_S = 9.0
"""The newest looks may show ordinary traffic above the floor; steps of the floor end before."""
FLOWED_MIN = 8
"""Hand-offs completed while no decode restarted: as many rooms would not all miss a stale peer."""


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

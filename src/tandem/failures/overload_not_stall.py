"""More work than the pair can do: slow, with queues, and nothing is broken.

What you see
    Latency grows, queues stay filled, some clients give up. It looks like a stall from outside.

Why it is silent
    Nothing is wrong that could be logged; a long prompt alone fills a prefill for half a minute.

What rules it in
    Queues that do not empty while tokens are computed or requests complete all along.

What rules it out
    Counters that stand still; hand-offs held longer than their traffic explains; nobody waiting.

Repair and its safety
    Nothing. A restart throws the work in progress away and comes back to the same queue. Shed,
    scale or rebalance.

References
    lightseekorg/tokenspeed#1427 (failures in waves every 300 s were a queue of 32 on a window of
    4: the wave size is the running limit, the age the deadline).
"""

from tandem import signs
from tandem.facts import Facts
from tandem.failures.answers import LOOK_S, contradicts, supports, unknown
from tandem.ports import Mode
from tandem.records import Role, TestResult
from tandem.records import vocabulary as v

WAITING = (v.WAITING_REQS, v.BOOTSTRAP_QUEUE_REQS, v.PREALLOC_QUEUE_REQS)
"""Queues in which requests wait for their turn, on either role."""
STEADY_S = 30.0
"""How long one look at overload is."""
CHANCE_MAX = 1e-6
"""Hand-offs held longer than this chance allows are not waiting their turn."""


def work_goes_on(facts: Facts, subject: str) -> TestResult:
    """Whether tokens are computed or requests complete beyond health checks."""
    test = "work-goes-on"
    members = [name for name in signs.ends(facts, subject) if name]
    if not members:
        members = [one.name for one in facts.deployment.members if one.role is not Role.ROUTER]
    known = False
    cited: list[int] = []
    for name in members:
        tokens = signs.beyond_health(facts, name, LOOK_S)
        done = signs.completed(facts, name, LOOK_S)
        for reading, what in ((done, "completions"), (tokens, "tokens beyond health checks")):
            if reading is None:
                continue
            known = True
            cited += reading.evidence
            if reading.value > 0:
                # Moderate: in a partial stall, too, the rest flows.
                why = f"{name} made {reading.value:.0f} {what} in the last 10 s"
                return supports(test, "moderate", why, reading.evidence)
    if not known:
        ask = "the progress counters of both engines"
        return unknown(test, "decisive", "no progress counter covers the last 10 s", ask)
    # Decisive: overload is slow, never still.
    why = f"nothing completed and nothing was computed on {' or '.join(members)} for 10 s"
    return contradicts(test, "decisive", why, tuple(cited))


def requests_wait_their_turn(facts: Facts, _subject: str) -> TestResult:
    """Whether requests wait in a queue that did not empty for half a minute."""
    test = "requests-wait-their-turn"
    engines = [one for one in facts.deployment.members if one.role is not Role.ROUTER]
    known: list[int] = []
    for engine in engines:
        for name in WAITING:
            low = signs.floor(facts, engine.name, name, STEADY_S)
            if low is None:
                continue
            known += low.evidence
            if low.value >= 1:
                # Strong: with work going on, this is what overload is.
                label = name.removesuffix("_reqs").replace("_", " ")
                why = f"{engine.name}'s {label} was never below {low.value:.0f} in the last 30 s"
                return supports(test, "strong", why, low.evidence)
    if not known:
        return unknown(
            test, "strong", "no queue was seen for 30 s", "the live queues over half a minute"
        )
    # Strong: nobody waits, so nobody waits too long.
    why = "no request waited its turn throughout the last 30 s"
    return contradicts(test, "strong", why, tuple(known))


def handoffs_explained(facts: Facts, subject: str) -> TestResult:
    """Whether the hand-offs in flight are as many as their rate and duration explain."""
    test = "handoffs-explained"
    prefill, _ = signs.ends(facts, subject)
    low = signs.floor(facts, prefill, v.INFLIGHT_QUEUE_REQS, LOOK_S) if prefill else None
    if prefill is None or low is None:
        return unknown(test, "strong", "the prefill's live inflight queue was not seen")
    mean = signs.explained(facts, prefill, LOOK_S)
    looks = LOOK_S / max(1.0, signs.transfer_s(facts, prefill))
    if mean is None:
        return unknown(test, "strong", "completed hand-offs were not counted")
    if low.value >= 1 and signs.chance(low.value, 2 * mean, looks) < CHANCE_MAX:
        # Strong: Little's law leaves no room for hand-offs that merely queue.
        why = (
            f"{low.value:.0f} hand-offs stay in flight where traffic explains {mean:.1f}: "
            "they are held, not queued"
        )
        return contradicts(test, "strong", why, low.evidence)
    return unknown(test, "strong", "hand-offs in flight are as many as traffic explains")


MODE = Mode(
    slug="overload-not-stall",
    incident_class="overload-not-stall",
    scope="nothing",
    safety="Do not restart: it throws work away and the queue comes back.",
    tests=(work_goes_on, requests_wait_their_turn, handoffs_explained),
    needs=("work-goes-on", "requests-wait-their-turn"),
    aliases=("overload", "long-prefill", "burst", "too-much-load", "saturation"),
    components=("admission", "compute", "memory", "scheduler"),
)

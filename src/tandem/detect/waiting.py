"""The client side: who waits for an answer that does not come.

For: the witnesses of a stall that are not the engine's own: late probes, and requests the router
holds open. Not for: what the engines say of themselves.
"""

from tandem import signs
from tandem.detect.candidate import client
from tandem.facts import Facts
from tandem.records import Observation, Path, Role, Thresholds, Witness
from tandem.records import vocabulary as v

HELD_UP_S = 120.0
"""How long one cell may stand behind another's requests: longer than the longest prompt takes."""
PROBE_FRESH_S = 20.0
"""A probe's answer older than this (four intervals of the default) speaks of the past."""
OLD_S = 30.0
"""A request this old is an outlier; routers tell ages no finer."""
OVERDUE = ("late", "stuck")


def overdue_probe(facts: Facts, subject: str) -> Observation | None:
    """The newest word of a path's or router's probe, when it is that no answer came."""
    seen = facts.latest(subject, v.PROBE)
    if seen is None or seen.value not in OVERDUE or facts.now - seen.at > PROBE_FRESH_S:
        return None
    return seen


def completed_probe(facts: Facts, subject: str, since: float) -> Observation | None:
    """The newest probe of a path that completed at or after `since`."""
    return next(
        (
            seen
            for seen in reversed(facts.rows(subject, v.PROBE))
            if seen.value == "completed" and seen.at >= since
        ),
        None,
    )


def open_requests(facts: Facts, router: str, thresholds: Thresholds) -> Witness | None:
    """The router's testimony that requests are open and no response leaves it."""
    since = facts.now - thresholds.floor_s
    left = signs.grown(facts, router, v.ROUTER_RESPONSES_TOTAL, thresholds.flat_s)
    if left is None or left.value > 0:
        return None
    margin = since - thresholds.floor_s
    asked = facts.numbers(router, v.ROUTER_REQUESTS_TOTAL, since=margin)
    answers = {s.at: s for s in facts.numbers(router, v.ROUTER_RESPONSES_TOTAL, since=margin)}
    both = [
        sample._replace(value=sample.value - answers[sample.at].value)
        for sample in asked
        if sample.at in answers
    ]
    unanswered = signs.covering(both, since, facts.now)
    active = signs.covering(
        facts.numbers(router, v.ROUTER_ACTIVE_REQS, since=margin), since, facts.now
    )
    for samples, what in ((unanswered, "unanswered"), (active, "active")):
        least = min((sample.value for sample in samples or ()), default=0.0)
        if samples and least > 0:
            return client(
                f"{router} has had {least:.0f} or more requests {what} for "
                f"{thresholds.floor_s:.0f} s and sent no response in the last "
                f"{thresholds.flat_s:.0f} s",
                (samples[0].id, samples[-1].id, *left.evidence),
            )
    return None


def backlog(facts: Facts, window_s: float) -> Witness | None:
    """A router's testimony that requests minus responses never returned to zero.

    Or of the age of its oldest open request, which only long generations reach otherwise.
    """
    since = facts.now - window_s
    for router in facts.deployment.of(Role.ROUTER):
        asked = facts.numbers(router.name, v.ROUTER_REQUESTS_TOTAL, since=since - window_s)
        sent = facts.numbers(router.name, v.ROUTER_RESPONSES_TOTAL, since=since - window_s)
        answers = {sample.at: sample.value for sample in sent}
        both = [
            sample._replace(value=sample.value - answers[sample.at])
            for sample in asked
            if sample.at in answers
        ]
        over = signs.covering(both, since, facts.now)
        least = min((sample.value for sample in over or ()), default=0.0)
        if over and least > 0:
            return client(
                f"{router.name}'s requests minus its responses were never below {least:.0f} "
                f"in the last {window_s:.0f} s",
                (over[0].id, over[-1].id),
            )
        age = facts.latest(router.name, v.ROUTER_REQUEST_AGE_S)
        if age is None or facts.now - age.at > PROBE_FRESH_S:
            continue
        if isinstance(age.value, int | float) and age.value >= max(window_s, OLD_S):
            return client(
                f"{router.name}'s oldest open request is older than {age.value:.0f} s", (age.id,)
            )
    return None


def held_by_router(facts: Facts, member: str, thresholds: Thresholds) -> Witness | None:
    """The router's testimony that it never stopped waiting for one worker."""
    since = facts.now - thresholds.floor_s
    for router in facts.deployment.of(Role.ROUTER):
        samples = signs.covering(
            facts.numbers(
                router.name, v.WORKER_ACTIVE_REQS, member, since=since - thresholds.floor_s
            ),
            since,
            facts.now,
        )
        if samples is None:
            continue
        least = min(sample.value for sample in samples)
        if least > 0:
            return client(
                f"{router.name} has had {least:.0f} or more requests open on {member} for "
                f"{thresholds.floor_s:.0f} s",
                (samples[0].id, samples[-1].id),
            )
    return None


def client_of(facts: Facts, cell: Path, thresholds: Thresholds) -> Witness | None:
    """Whoever waits for this cell: its own probe, else the router, else a routed probe.

    In a matrix of several cells the router's totals speak of no cell, so there only its count for
    the cell's own workers is heard.
    """
    probe = overdue_probe(facts, cell.subject)
    if probe is not None:
        return client(f"the probe of {cell.subject} got no answer ({probe.value})", (probe.id,))
    routers = facts.deployment.of(Role.ROUTER)
    if len(facts.deployment.cells()) > 1:
        return held_by_router(facts, cell.decode, thresholds) or held_by_router(
            facts, cell.prefill, thresholds
        )
    for router in routers:
        witness = open_requests(facts, router.name, thresholds)
        if witness is not None:
            return witness
    for router in routers:
        routed = overdue_probe(facts, router.name)
        if routed is not None:
            said = f"the probe through {router.name} got no answer ({routed.value})"
            return client(said, (routed.id,))
    return None


def held_up(facts: Facts, cell: Path, thresholds: Thresholds) -> bool:
    """Whether requests of this cell only stand behind those of a prefill that moves.

    A decode's places may all be taken by requests that another prefill is computing. This cell's
    own prefill then has nothing computed and nothing to compute: all wait for places.
    """
    for name in (v.INFLIGHT_QUEUE_REQS, v.WAITING_REQS):
        own = signs.floor(facts, cell.prefill, name, thresholds.floor_s)
        if own is None or own.value > 0:
            return False
    others = [one.name for one in facts.deployment.of(Role.PREFILL) if one.name != cell.prefill]
    tokens = [signs.beyond_health(facts, name, thresholds.floor_s) for name in others]
    return any(one is not None and one.value > 0 for one in tokens)

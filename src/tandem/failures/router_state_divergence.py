"""A router whose picture of its workers is wrong: it holds or refuses what they would serve.

What you see
    Requests through the router hang or get 503 while the engines idle. A request sent to the
    engines directly completes at once.

Why it is silent
    The router's own health is always 200, and the engines have nothing to complain of.

What rules it in
    Direct probes that complete while routed ones do not; engines with empty queues while the
    router counts open requests; a breaker that stays open; a worker the router calls unhealthy
    although it answers.

What rules it out
    A direct probe of the same path that hangs too; engines that hold requests themselves.

Repair and its safety
    Restart the router only; the engines keep their work. Safe: the requests it holds are lost
    already, and clients retry against a fresh one.

References
    sgl-project/sglang#31206 (a half-open breaker never sent a request to the prefill; hours were
    spent on the transfer layer).
"""

from tandem import signs
from tandem.facts import Facts
from tandem.failures.answers import LOOK_S, contradicts, held, supports, unknown
from tandem.ports import Mode
from tandem.records import Change, Observation, Role, TestResult
from tandem.records import vocabulary as v

FRESH_S = 30.0
"""Probes older than this do not speak of now."""
MISSED = ("late", "stuck", "failed")


def direct_completes_routed_does_not(facts: Facts, _subject: str) -> TestResult:
    """Whether the same request completes directly and hangs through the router."""
    test = "direct-completes-routed-does-not"
    routed = [
        (router.name, seen)
        for router in facts.deployment.of(Role.ROUTER)
        if (seen := _probe(facts, router.name)) is not None
    ]
    direct = [
        seen
        for cell in facts.deployment.cells()
        if (seen := _probe(facts, cell.subject)) is not None
    ]
    ask = "a probe of every path directly, and one through the router"
    hung = [seen for seen in direct if seen.value in ("late", "stuck")]
    if hung:
        # Decisive: what hangs without the router does not hang because of it.
        why = f"a probe sent around the router hangs as well ({hung[0].subject}: {hung[0].value})"
        return contradicts(test, "decisive", why, tuple(seen.id for seen in hung))
    if not routed or len(direct) < len(facts.deployment.cells()):
        return unknown(test, "strong", "not every path was probed directly and routed", ask)
    missed = [(name, seen) for name, seen in routed if seen.value in MISSED]
    cited = tuple(seen.id for seen in (*direct, *(seen for _, seen in routed)))
    if missed and all(seen.value == "completed" for seen in direct):
        # Strong: in a partial stall a direct probe may have had luck.
        name, seen = missed[0]
        why = f"every path completes a direct probe while the one through {name} is {seen.value}"
        return supports(test, "strong", why, cited)
    if not missed:
        # Strong: the router serves what it is given now.
        return contradicts(test, "strong", "probes through the router complete", cited)
    return unknown(test, "strong", "direct and routed probes both fail", ask)


def engines_idle_router_waits(facts: Facts, _subject: str) -> TestResult:
    """Whether the router counts open requests that no engine holds."""
    test = "engines-idle-router-waits"
    engines = [one for one in facts.deployment.members if one.role is not Role.ROUTER]
    cited: list[int] = []
    for engine in engines:
        for name, label in signs.QUEUES[engine.role]:
            low = held(facts, engine.name, name)
            if low is not None and low.value >= 1:
                # Strong: what an engine holds it was given; the router did its part.
                why = (
                    f"{engine.name}'s {label} was never below {low.value:.0f} in the last 10 s: "
                    "the engines hold the requests, not the router"
                )
                return contradicts(test, "strong", why, low.evidence)
            cited += low.evidence if low else ()
    waits = [
        (router.name, least, ids)
        for router in facts.deployment.of(Role.ROUTER)
        for least, ids in [_open(facts, router.name)]
        if least >= 1
    ]
    if not waits or not cited:
        ask = "the router's open requests and the live queues of every engine"
        return unknown(test, "strong", "open requests and idle engines were not both seen", ask)
    name, least, ids = waits[0]
    # Strong: the two books disagree; a lost response leaves the same picture.
    why = f"{name} has had {least:.0f} or more requests open for 10 s while every engine is empty"
    return supports(test, "strong", why, (*ids, *cited))


def breaker_open(facts: Facts, _subject: str) -> TestResult:
    """Whether a breaker stands open, or a worker counts as unhealthy, against one that answers."""
    test = "breaker-open"
    looked = False
    for router in facts.deployment.of(Role.ROUTER):
        for name, bad in ((v.WORKER_BREAKER_OPEN, True), (v.WORKER_HEALTHY, False)):
            for label in facts.labels(router.name, name):
                seen = facts.latest(router.name, name, label)
                if seen is None or facts.now - seen.at > FRESH_S:
                    continue
                looked = True
                well = _well(facts, label)
                if seen.value is bad and well:
                    # Moderate: it may be the echo of failures that were real a moment ago.
                    what = "breaker is open" if bad else "worker is unhealthy"
                    why = f"{router.name}'s {what} for {label}, whose /health answers 200"
                    return supports(test, "moderate", why, (seen.id, *well))
    if not looked:
        ask = "the router's workers and breakers"
        return unknown(test, "moderate", "workers and breakers were not seen", ask)
    return unknown(test, "moderate", "no breaker is open against a worker that answers")


def implicates(facts: Facts, change: Change) -> TestResult | None:
    """Restarts and settings of engines are cleared: they serve what reaches them."""
    member = facts.deployment.member(change.subject)
    if member is None or member.role is Role.ROUTER:
        return None
    return contradicts("change", "strong", "the engines complete what is sent to them directly")


def _probe(facts: Facts, subject: str) -> Observation | None:
    seen = facts.latest(subject, v.PROBE)
    fresh = seen is not None and facts.now - seen.at <= FRESH_S
    return seen if fresh and seen is not None and seen.value != "off" else None


def _open(facts: Facts, router: str) -> tuple[float, tuple[int, ...]]:
    """The floor of the router's open requests over the last look."""
    since = facts.now - LOOK_S
    over = signs.covering(
        facts.numbers(router, v.ROUTER_ACTIVE_REQS, since=since - LOOK_S), since, facts.now
    )
    if over is None:
        return 0.0, ()
    return min(sample.value for sample in over), (over[0].id, over[-1].id)


def _well(facts: Facts, member: str) -> tuple[int, ...]:
    seen = facts.latest(member, v.HEALTH_STATUS)
    fresh = seen is not None and facts.now - seen.at <= FRESH_S
    return (seen.id,) if fresh and seen is not None and seen.value == 200 else ()


MODE = Mode(
    slug="router-state-divergence",
    incident_class="router-state-divergence",
    scope="router",
    safety="Safe: engines keep their work; what the router holds is lost to its clients already.",
    tests=(direct_completes_routed_does_not, engines_idle_router_waits, breaker_open),
    needs=("direct-completes-routed-does-not",),
    aliases=("router", "circuit-breaker", "breaker-open", "gateway"),
    components=("routing",),
    implicates=implicates,
)

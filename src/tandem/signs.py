"""What facts say of engines, in the terms detect and the failure modes both reason in.

For: floors of live queues, progress beyond what health checks make, the lives of a member, and
what Little's law explains. Not for: deciding that anything is wrong, or why.

Pure: everything is read from a `Facts` window, at its `now`.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tandem.facts import Facts, Reading, Sample, once
from tandem.records import Observation, Role, Value
from tandem.records import vocabulary as v

HEALTH_TOKENS_PER_S = 2.5
"""Tokens a second that health checks alone may compute on one engine: about one per check, ours
every 2 s and a router's every 1-2 s (`/health` runs a one-token forward)."""
HEALTH_TOKENS_SLACK = 2.0
BUSY_CPU = 0.1
"""Share of one core above which a process is computing, whatever its counters say: a starved one
on a crowded host gets 0.15, a silent one that only answers health checks uses 0.03."""
LOOK_FRESH_S = 15.0
"""What was last seen longer ago than this is not known to be so now."""
UNWATCHED_S = 30.0
"""Nobody knows what happened in a gap this long between two looks."""
HOLE_S = 3.5
"""Looks further apart than this, and than half a window, say nothing of what was between them."""
STARTED_LATELY_S = 15.0
"""A member that started within this long is still finding its peers."""
LIVE = "loads"
"""The source whose queue gauges are refreshed even while nothing moves."""

QUEUES = {
    Role.PREFILL: (
        (v.INFLIGHT_QUEUE_REQS, "inflight queue"),
        (v.BOOTSTRAP_QUEUE_REQS, "bootstrap queue"),
        (v.WAITING_REQS, "waiting queue"),
    ),
    Role.DECODE: (
        (v.TRANSFER_QUEUE_REQS, "transfer queue"),
        (v.PREALLOC_QUEUE_REQS, "prealloc queue"),
        (v.WAITING_REQS, "waiting queue"),
        (v.RETRACTED_QUEUE_REQS, "retracted queue"),
        (v.RUNNING_REQS, "running batch"),
    ),
    Role.ROUTER: (),
}
"""Where a request can be held on an engine of each role, nearest to the hand-off first. A prefill's
running requests are those of its last batch, health checks included, and hold nothing."""


class Life(NamedTuple):
    """One incarnation of a member as the facts know it; times in unix seconds."""

    id: str
    started_at: float
    last_seen_at: float
    evidence: tuple[int, ...]


def covering(samples: Sequence[Sample], since: float, now: float) -> list[Sample] | None:
    """The samples that speak of all of [since, now]: the last one before, and those inside.

    None when the stretch is not covered: nothing before it, fewer than two samples inside, the
    newest one older than half of it, or a hole that long in it (a collector that was paused). A gap
    is never read as silence.
    """
    inside = [sample for sample in samples if since < sample.at <= now]
    before = next((sample for sample in reversed(samples) if sample.at <= since), None)
    if before is None or len(inside) < 2 or now - inside[-1].at > (now - since) / 2:
        return None
    over = [before, *inside]
    hole_s = max(HOLE_S, (now - since) / 2)
    if any(later.at - earlier.at > hole_s for earlier, later in itertools.pairwise(over)):
        return None
    return over


@once
def floor(facts: Facts, member: str, name: str, window_s: float) -> Reading | None:
    """The lowest value of a live queue over the last seconds; None when not covered."""
    since = facts.now - window_s
    # A sample before the window may be a little old: one missed look is not a gap in knowledge.
    samples = facts.numbers(member, name, since=since - window_s, source=LIVE)
    over = covering(samples, since, facts.now)
    if over is None:
        return None
    lowest = min(over, key=lambda sample: sample.value)
    return Reading(lowest.value, _cited(over[0], lowest, over[-1]))


@once
def grown(facts: Facts, member: str, name: str, window_s: float) -> Reading | None:
    """How much a counter grew over the last seconds, resets respected; None when not covered."""
    since = facts.now - window_s
    samples = facts.numbers(member, name, since=since - window_s)
    over = covering(samples, since, facts.now)
    return None if over is None else growth(over)


def growth(samples: Sequence[Sample]) -> Reading:
    """How much a counter grew over these samples; a lower value is a restart from zero."""
    total = sum(
        later.value - earlier.value if later.value >= earlier.value else later.value
        for earlier, later in itertools.pairwise(samples)
    )
    return Reading(total, _cited(samples[0], samples[-1]))


@once
def completed(facts: Facts, member: str, window_s: float) -> Reading | None:
    """Requests and hand-offs an engine completed over the last seconds, aborted ones not counted.

    None when no counter of completion covers the window.
    """
    moved = grown(facts, member, v.TRANSFERS_TOTAL, window_s)
    ended = grown(facts, member, v.REQUESTS_TOTAL, window_s)
    if ended is not None:
        aborted = grown(facts, member, v.ABORTED_TOTAL, window_s)
        done = max(0.0, ended.value - (aborted.value if aborted else 0.0))
        ended = Reading(done, ended.evidence)
    known = [reading for reading in (moved, ended) if reading is not None]
    if not known:
        return _never_counted(facts, member, window_s)
    # A prefill's request and its hand-off are one piece of work.
    cited = tuple(cite for reading in known for cite in reading.evidence)
    return Reading(max(reading.value for reading in known), cited)


def _never_counted(facts: Facts, member: str, window_s: float) -> Reading | None:
    """Nothing completed, when the page was read all along and holds no such counter yet.

    A labelled counter appears with its first count: a decode that never completed has none.
    """
    tokens = grown(facts, member, v.PROGRESS_TOKENS_TOTAL, window_s)
    newest = [facts.last(member, name) for name in (v.TRANSFERS_TOTAL, v.REQUESTS_TOTAL)]
    absent = tuple(seen.id for seen in newest if seen is not None and seen.missing is not None)
    if tokens is None or not absent:
        return None
    return Reading(0.0, (*tokens.evidence, *absent))


@once
def beyond_health(facts: Facts, member: str, window_s: float) -> Reading | None:
    """Tokens computed over the last seconds beyond what health checks explain (0 when none).

    While a request runs on an engine its health check is answered by that request's own forward
    steps (sglang-pd-protocol, health of a busy server), so nothing is allowed for it then.
    """
    tokens = grown(facts, member, v.PROGRESS_TOKENS_TOTAL, window_s)
    if tokens is None:
        return None
    known = facts.deployment.member(member)
    running = floor(facts, member, v.RUNNING_REQS, window_s)
    decoding = known is not None and known.role is Role.DECODE
    if decoding and running is not None and running.value > 0:
        return tokens
    allowed = HEALTH_TOKENS_PER_S * window_s + HEALTH_TOKENS_SLACK
    return Reading(max(0.0, tokens.value - allowed), tokens.evidence)


def computing(
    facts: Facts, member: str, since: float, step_s: float
) -> Callable[[float], bool | None]:
    """Says of a moment at or after `since` whether the engine was in a step of its own work then.

    Seen from what its counter of tokens grew by, beyond health checks, within `step_s` of that
    moment; None when that is not known yet, or not at all.
    """
    samples = facts.numbers(member, v.PROGRESS_TOKENS_TOTAL, since=since)
    times = [sample.at for sample in samples]
    allowed = HEALTH_TOKENS_PER_S * step_s + HEALTH_TOKENS_SLACK

    def at(moment: float) -> bool | None:
        first = bisect_left(times, moment)
        later = bisect_left(times, moment + step_s)
        if first >= len(times) or later >= len(times):
            return None
        return samples[later].value - samples[first].value > allowed

    return at


def busy(facts: Facts, member: str, window_s: float) -> Reading | None:
    """CPU cores a process used over the last seconds; None when not covered."""
    spent = grown(facts, member, v.CPU_SECONDS_TOTAL, window_s)
    return None if spent is None else Reading(spent.value / window_s, spent.evidence)


def explained(facts: Facts, prefill: str, window_s: float) -> float | None:
    """Hand-offs in flight at a time, on average, that the completed ones account for.

    Little's law: the seconds spent by those that completed over the seconds that passed. Where an
    engine gives no durations, one second each is assumed, which is generous. A counter that never
    moved may be unwired: then the next best one is read. None where nothing tells how many
    completed.
    """
    counters = (v.TRANSFER_SECONDS_TOTAL, v.TRANSFERS_TOTAL, v.REQUESTS_TOTAL)
    readings = [
        reading
        for name in counters
        if (reading := grown(facts, prefill, name, window_s)) is not None
        and not never_moved(facts, prefill, name)
    ]
    if readings:
        return readings[0].value / window_s
    # All of them at zero: nothing ever completed, unless it computes and none of them is wired.
    known = any(grown(facts, prefill, name, window_s) is not None for name in counters)
    works = beyond_health(facts, prefill, window_s)
    return None if not known or (works is not None and works.value > 0) else 0.0


@once
def never_moved(facts: Facts, member: str, name: str) -> bool:
    """Whether a counter is still at zero: nothing happened in this life, or it is unwired."""
    newest = facts.latest(member, name)
    return newest is not None and newest.value == 0


def holds(facts: Facts, member: str, names: Iterable[str]) -> bool:
    """Whether one of these live queues held anything when it was last seen: a quick first look."""
    return any((level := queued(facts, member, name)) is not None and level >= 1 for name in names)


@once
def queued(facts: Facts, member: str, name: str) -> float | None:
    """The level of a live queue when it was last seen; None when no recent look showed it."""
    for seen in reversed(facts.rows(member, name)):
        if facts.now - seen.at > LOOK_FRESH_S:
            return None
        if seen.source == LIVE and isinstance(seen.value, int | float):
            return float(seen.value)
    return None


def chance(held: float, mean: float, looks: float) -> float:
    """The chance that a queue of Poisson length `mean` is seen at `held` or more on every look."""
    below = sum(
        math.exp(-mean + count * math.log(mean) - math.lgamma(count + 1)) if mean > 0 else 0.0
        for count in range(1, math.ceil(held))
    ) + math.exp(-mean)
    return math.pow(max(0.0, 1.0 - below), looks)


@once
def lives(facts: Facts, member: str) -> tuple[Life, ...]:
    """The incarnations of a member that the facts know, oldest first.

    From the process collector's start times, and from ledger rows for those it did not see. One
    start seen both ways is one life: a ledger row within 5 s of a start time says nothing new.
    """
    found: dict[str, Life] = {}
    for name, rows in itertools.groupby(facts.rows(member, v.STARTED_AT), key=_life_named):
        seen = list(rows)
        started_at = seen[0].value
        if name is None or isinstance(started_at, bool) or not isinstance(started_at, int | float):
            continue
        first = found.get(name)
        cited = (seen[0].id if first is None else first.evidence[0], seen[-1].id)
        found[name] = Life(name, float(started_at), seen[-1].at, tuple(dict.fromkeys(cited)))
    for change in facts.changes_of(member):
        if change.kind not in ("restart", "start"):
            continue
        name = change.incarnation or f"ledger:{change.at:.1f}"
        near = any(abs(life.started_at - change.at) < 5.0 for life in found.values())
        if name not in found and not near:
            found[name] = Life(name, change.at, change.at, ())
    return tuple(sorted(found.values(), key=lambda life: (life.started_at, life.id)))


@once
def begun_at(facts: Facts, member: str) -> float | None:
    """When the present life of a member began, by the clock of whoever looks; None when unknown.

    A clock that is set leaves start times where they were. So where the life before was seen as
    well, the first look at this one counts, and else what the process says.
    """
    life = facts.incarnation(member)
    if life is None:
        return None
    first_at = None
    for row in reversed(facts.rows(member, v.STARTED_AT)):
        if row.missing is not None:
            continue
        if row.incarnation != life.id:
            if first_at is not None and first_at - row.at < UNWATCHED_S:
                return first_at
            break
        first_at = row.at
    return life.started_at


def _life_named(seen: Observation) -> str | None:
    """Which life a start time speaks of; None when it was not seen."""
    return None if seen.missing is not None else seen.incarnation or f"start:{seen.value}"


def ends(facts: Facts, subject: str) -> tuple[str | None, str | None]:
    """The prefill and the decode a subject speaks of; None where it leaves one open.

    A path names both. A member names itself, and the other side when there is only one.
    """
    deployment = facts.deployment
    for cell in deployment.cells():
        if subject == cell.subject or subject.endswith(f">{cell.subject}"):
            return cell.prefill, cell.decode
    prefills = [member.name for member in deployment.of(Role.PREFILL)]
    decodes = [member.name for member in deployment.of(Role.DECODE)]
    prefill = subject if subject in prefills else (prefills[0] if len(prefills) == 1 else None)
    decode = subject if subject in decodes else (decodes[0] if len(decodes) == 1 else None)
    return prefill, decode


@once
def risen(facts: Facts, member: str, name: str, least: float = 1.0) -> Sample | None:
    """Where the present unbroken stretch of a live queue at `least` or more began; None when below.

    When it was that long as far back as is known, the first sample; no stretch reaches across
    `UNWATCHED_S`.
    """
    first = None
    for sample in reversed(facts.numbers(member, name, source=LIVE)):
        if sample.value < least or (first is not None and first.at - sample.at > UNWATCHED_S):
            break
        first = sample
    return first


def held_since(rows: Sequence[Observation], value: Value) -> Observation | None:
    """Where the present stretch of looks that show `value` began; None when the last shows another.

    Looks that saw nothing are passed over; a stretch does not reach across `UNWATCHED_S`.
    """
    first = None
    for row in reversed(rows):
        if row.missing is not None:
            continue
        if row.value != value or (first is not None and first.at - row.at > UNWATCHED_S):
            break
        first = row
    return first


@once
def last_moved(facts: Facts, member: str) -> Sample | None:
    """The last look at which a hand-off or a request (not an aborted one) had newly completed."""
    aborted = {sample.at: sample.value for sample in facts.numbers(member, v.ABORTED_TOTAL)}
    found: Sample | None = None
    for name in (v.TRANSFERS_TOTAL, v.REQUESTS_TOTAL):
        samples = facts.numbers(member, name)
        for earlier, later in reversed(list(itertools.pairwise(samples))):
            dropped = 0.0
            if name == v.REQUESTS_TOTAL:
                dropped = aborted.get(later.at, 0.0) - aborted.get(earlier.at, 0.0)
            if later.value - earlier.value > max(0.0, dropped):
                if found is None or later.at > found.at:
                    found = later
                break
    return found


@once
def transfer_s(facts: Facts, prefill: str) -> float:
    """Mean seconds a completed hand-off of this prefill took, over its life; 0.0 when unknown."""
    spent = facts.numbers(prefill, v.TRANSFER_SECONDS_TOTAL)
    moved = facts.numbers(prefill, v.TRANSFERS_TOTAL)
    if not spent or not moved or moved[-1].value <= 0:
        return 0.0
    return spent[-1].value / moved[-1].value


def _cited(*samples: Sample) -> tuple[int, ...]:
    return tuple(dict.fromkeys(sample.id for sample in samples))

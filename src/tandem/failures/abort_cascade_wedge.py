"""A burst of aborts that killed or blocked the prefill's bootstrap thread: hand-offs stop.

What you see
    Clients or a gateway time out and abort; soon after no request gets past bootstrapping. The
    prefill's bootstrap queue stays filled, its inflight queue drains, failures come at the age of
    the bootstrap timeout.

Why it is silent
    The thread that died serves nothing but hand-off metadata. Process, scheduler, `/health` and
    the bootstrap server's own health go on.

What rules it in
    Aborts in the minutes before the onset; a bootstrap queue that never empties while nothing is
    in flight; a log line of the thread's death, or stacks without the thread; an engine release
    known to have the fault.

What rules it out
    Requests that still pass bootstrapping (hand-offs complete, or enter the inflight queue and
    stick there); no abort before the onset; the bootstrap thread alive in the stacks; forward
    steps that do not run (then it is another fault).

Repair and its safety
    Stop the source of the aborts first, then restart the pair, prefill first. Unsafe while the
    aborts go on: the new prefill is killed the same way.

References
    sgl-project/sglang#27372 brought the message, #30352 (0.5.16) the fix; sgl-project/sglang#28651
    is the amplifier: an aborted request holds its decode slot for the whole waiting timeout.
"""

import itertools
import re

from tandem import signs
from tandem.facts import Facts
from tandem.failures.answers import clock, contradicts, forwards, held, supports, unknown
from tandem.ports import Mode
from tandem.records import TestResult
from tandem.records import vocabulary as v

BEFORE_S = 120.0
"""How long before the onset a burst of aborts may have struck."""
BURST_MIN = 5
"""Fewer aborts than this are everyday life."""
DEATHS = ("bootstrap-thread-died", "foreign-traffic")
"""Log signatures of the thread's death."""
THREAD = re.compile("(?<!_)bootstrap")
"""The thread or its frames in a stack; every Python thread begins in `_bootstrap`."""


def aborts_before_the_onset(facts: Facts, subject: str) -> TestResult:
    """Whether requests were aborted in numbers shortly before hand-offs stopped."""
    test = "aborts-before-the-onset"
    members = [name for name in signs.ends(facts, subject) if name]
    onset_at = _onset(facts, members)
    # A peer's restart aborts what it held; that is its own story.
    starts = [life.started_at for name in members for life in signs.lives(facts, name)]
    aborted, known = 0.0, False
    cited: list[int] = []
    for name in members:
        samples = [
            sample
            for sample in facts.numbers(name, v.ABORTED_TOTAL, since=onset_at - BEFORE_S)
            if sample.at <= onset_at
        ]
        if len(samples) < 2:
            continue
        known = True
        rises = [
            later
            for earlier, later in itertools.pairwise(samples)
            if later.value > earlier.value and not any(abs(later.at - at) < 10.0 for at in starts)
        ]
        aborted += sum(
            later.value - earlier.value
            for earlier, later in itertools.pairwise(samples)
            if later in rises
        )
        cited += [samples[0].id, *(rise.id for rise in rises[-3:]), samples[-1].id]
    if not known:
        return unknown(
            test,
            "moderate",
            f"aborts before {clock(onset_at)} were not counted",
            "the count of aborted requests from before the onset",
        )
    if aborted >= BURST_MIN:
        # Moderate: clients also abort because something else is stuck.
        why = f"{aborted:.0f} requests were aborted in the two minutes before {clock(onset_at)}"
        return supports(test, "moderate", why, tuple(cited))
    # Strong, not decisive: a counter that never moved may be unwired.
    why = (
        f"no burst of aborts before {clock(onset_at)}: {aborted:.0f} were counted apart from those "
        "at starts and restarts"
    )
    return contradicts(test, "strong", why, tuple(cited))


def stuck_in_bootstrapping(facts: Facts, subject: str) -> TestResult:
    """Whether requests stick before the hand-off (bootstrap queue), not in it (inflight)."""
    test = "stuck-in-bootstrapping"
    prefill, _ = signs.ends(facts, subject)
    waiting = held(facts, prefill, v.BOOTSTRAP_QUEUE_REQS) if prefill else None
    flying = held(facts, prefill, v.INFLIGHT_QUEUE_REQS) if prefill else None
    if waiting is None or flying is None:
        ask = f"{prefill or 'the prefill'}'s live bootstrap and inflight queues (/v1/loads)"
        return unknown(test, "strong", "the prefill's live queues were not seen", ask)
    cited = (*waiting.evidence, *flying.evidence)
    if flying.value >= 1:
        # Strong: a dead bootstrap thread lets nothing new in flight and what flew has landed.
        why = (
            f"{prefill}'s inflight queue was never below {flying.value:.0f} in the last 10 s: "
            "requests passed bootstrapping and stick after it"
        )
        return contradicts(test, "strong", why, cited)
    if waiting.value < 1:
        why = f"{prefill}'s bootstrap queue was empty within the last 10 s"
        return contradicts(test, "strong", why, cited)
    # Strong: the place is right; a decode that takes nothing fills it as well.
    why = (
        f"{prefill}'s bootstrap queue was never below {waiting.value:.0f} in the last 10 s while "
        "nothing stays in flight"
    )
    return supports(test, "strong", why, cited)


def handoffs_stopped(facts: Facts, subject: str) -> TestResult:
    """Whether hand-offs stopped altogether: one that completes needs the bootstrap thread."""
    test = "handoffs-stopped"
    prefill, _ = signs.ends(facts, subject)
    moved = signs.grown(facts, prefill, v.TRANSFERS_TOTAL, 10.0) if prefill else None
    if moved is None:
        return unknown(test, "weak", "completed hand-offs were not counted")
    if moved.value > 0:
        # Decisive: the thread that the failure kills just served these.
        why = f"{moved.value:.0f} hand-offs passed bootstrapping and completed in the last 10 s"
        return contradicts(test, "decisive", why, moved.evidence)
    # Weak: so they do in every stall.
    return supports(test, "weak", "no hand-off completed in the last 10 s", moved.evidence)


def bootstrap_thread(facts: Facts, subject: str) -> TestResult:
    """Whether the prefill's bootstrap thread is seen dead (log, stacks) or alive (stacks)."""
    test = "bootstrap-thread"
    prefill, _ = signs.ends(facts, subject)
    ask = f"stacks of every thread of {prefill or 'the prefill'}"
    if prefill is None:
        return unknown(test, "decisive", "the prefill is not known", ask)
    for slug in DEATHS:
        seen = facts.latest(prefill, v.LOG_SIGNATURE, slug)
        if seen is not None and isinstance(seen.value, int) and seen.value > 0:
            # Decisive: the engine itself says that the thread died.
            why = f"{prefill}'s log says so ({slug}, {seen.value} times)"
            return supports(test, "decisive", why, (seen.id,))
    stacks = [
        (label, seen)
        for label in facts.labels(prefill, v.STACK)
        if (seen := facts.latest(prefill, v.STACK, label)) is not None
    ]
    alive = [seen.id for label, seen in stacks if THREAD.search(f"{label} {seen.value}")]
    if alive:
        # Strong: alive is not yet well, but the known fault kills it.
        why = f"{prefill}'s bootstrap thread is alive in the stacks"
        return contradicts(test, "strong", why, tuple(alive))
    if stacks:
        # Moderate: a thread may have another name in a fork.
        why = f"no thread of {prefill} looks like its bootstrap thread"
        return supports(test, "moderate", why, tuple(seen.id for _, seen in stacks))
    return unknown(test, "decisive", "no stacks of the prefill were taken", ask)


def forwards_run(facts: Facts, subject: str) -> TestResult:
    """Whether both engines still compute: the wedge touches hand-off metadata alone."""
    test = "forwards-run"
    seen = [
        (name, tokens)
        for name in signs.ends(facts, subject)
        if name and (tokens := forwards(facts, name)) is not None
    ]
    stopped = [name for name, tokens in seen if tokens.value <= 0]
    cited = tuple(cite for _, tokens in seen for cite in tokens.evidence)
    if stopped:
        # Strong: the thread it kills runs no forward step.
        why = f"{' and '.join(stopped)} completed no forward step in the last 10 s"
        return contradicts(test, "strong", why, cited)
    return unknown(test, "strong", "that forward steps run fits it, as it fits others")


def release_known_bad(facts: Facts, subject: str) -> TestResult:
    """Whether the release in use is known to survive an abort, or known not to."""
    test = "release-known-bad"
    prefill, _ = signs.ends(facts, subject)
    trait = facts.trait(prefill, v.T_ACTIVE_PROBE_SAFE) if prefill else None
    if trait is None or not isinstance(trait.value, bool):
        return unknown(
            test,
            "moderate",
            "it is not known whether this release survives an abort",
            f"the version, and the abort handling, of the code that {prefill} really imports",
        )
    known = f" ({trait.because})" if trait.because else ""
    if trait.value:
        # Moderate: known fixed, but forks differ and so do causes of a dead thread.
        return contradicts(test, "moderate", f"aborts are known to be survived here{known}")
    # Moderate: able to fail is not failed.
    return supports(test, "moderate", f"this release is known to break on an abort{known}")


def _onset(facts: Facts, members: list[str]) -> float:
    """When work last completed, or now while it still does."""
    moved = [seen.at for name in members if (seen := signs.last_moved(facts, name))]
    return max(moved, default=facts.now)


MODE = Mode(
    slug="abort-cascade-wedge",
    incident_class="unpropagated-failure-or-abort-cascade",
    scope="pair",
    safety="Unsafe while aborts go on: stop their source first, then restart prefill and decode.",
    tests=(
        stuck_in_bootstrapping,
        aborts_before_the_onset,
        handoffs_stopped,
        bootstrap_thread,
        forwards_run,
        release_known_bad,
    ),
    needs=("stuck-in-bootstrapping",),
    aliases=("abort-cascade", "abort-handling", "bootstrap-thread-died"),
    components=("admission", "kv-transfer"),
)

"""A pair that degrades because its decode was restarted alone against a long-lived prefill.

What you see
    Some requests never finish, later none does. The prefill's inflight queue holds hand-offs that
    are never acknowledged; the decode waits and computes nothing. It began after a restart of the
    decode that the prefill lived through.

Why it is silent
    A hand-off that is never acknowledged has no deadline on the prefill once it left
    bootstrapping. `/health` runs a forward step with a fake transfer, so it never touches the path
    that is broken. Nobody logs the absence of an event.

What rules it in
    Restarts of the decode within one life of the prefill; an inflight floor that rose at or after
    such a restart and never returned to zero; both engines still running forward steps. Two
    mechanisms leave this signature. *stale-peer*: the prefill remembers agents of dead decodes and
    binds rooms to them, so rooms born after the last restart hang too, and the floor rises between
    restarts. *orphaned-transfer*: only hand-offs in flight when a decode died hang, so the floor
    steps up at restarts alone. The family is named; a mechanism only where the floor splits them.

What rules it out
    No restart of the decode in the prefill's present life; an inflight queue that is empty, or
    that was pinned before the first such restart, or that was empty again for many hand-offs after
    the last one before it rose.

Repair and its safety
    Restart the pair in order: stop decode, stop prefill, start prefill, wait for its bootstrap,
    start decode, then the router. Safe: every held request is lost already. Restarting the decode
    alone again is what caused it. No configuration change is reverted.

References
    sgl-project/sglang#33789 (one role replaced, both Ready, nothing works; both restarted heals),
    smg-project/smg#2382 (guilt sits in the surviving prefills). In SGLang's source only the decode
    beats toward its prefills; a prefill never asks whether a decode still lives.
"""

from tandem import signs
from tandem.facts import Facts
from tandem.failures.answers import (
    DYING_S,
    clock,
    contradicts,
    decode_alone,
    forwards,
    healthy,
    held,
    supports,
    unknown,
)
from tandem.failures.floor_steps import held_since_a_restart, mechanism
from tandem.ports import Mode
from tandem.records import Change, Role, TestResult
from tandem.records import vocabulary as v


def decode_restarted_alone(facts: Facts, subject: str) -> TestResult:
    """Whether the decode was restarted while the prefill lived on; else it is another failure."""
    test = "decode-restarted-alone"
    prefill, decode = signs.ends(facts, subject)
    alone = decode_alone(facts, prefill, decode) if prefill and decode else None
    if alone is None:
        return unknown(
            test,
            "decisive",
            "the start times of prefill and decode are not known",
            f"when {prefill or 'the prefill'} and {decode or 'the decode'} started",
        )
    cited = (*alone.prefill.evidence, *(c for life in alone.restarts for c in life.evidence))
    since = f"{prefill} has lived since {clock(alone.prefill.started_at)}"
    if not alone.restarts and not alone.certain:
        return unknown(
            test,
            "decisive",
            f"{since}, and whether an earlier {decode} died since is not known",
            f"the restarts of {decode} since {clock(alone.prefill.started_at)} (its supervisor)",
        )
    if not alone.restarts:
        # Decisive: the mode is defined by this.
        why = f"{decode} was never restarted alone: {since} and no decode restart followed"
        return contradicts(test, "decisive", why, cited)
    times = ", ".join(clock(life.started_at) for life in alone.restarts[-4:])
    count = len(alone.restarts)
    # Moderate: decodes are restarted alone every day without harm where leases work.
    why = f"{since} while {decode} was restarted alone {_times(count)} ({times})"
    return supports(test, "moderate", why, cited)


def handoffs_held(facts: Facts, subject: str) -> TestResult:
    """Whether the prefill holds hand-offs that are never acknowledged."""
    test = "handoffs-held"
    prefill, _ = signs.ends(facts, subject)
    low = held(facts, prefill, v.INFLIGHT_QUEUE_REQS) if prefill else None
    if prefill is None or low is None:
        return unknown(
            test,
            "decisive",
            "the prefill's live inflight queue was not seen",
            f"{prefill or 'the prefill'}'s live inflight queue (/v1/loads)",
        )
    if low.value < 1:
        # Decisive: in both mechanisms a lost hand-off stays in this queue for ever.
        why = f"{prefill}'s inflight queue was empty within the last 10 s: no hand-off is held"
        return contradicts(test, "decisive", why, low.evidence)
    since = signs.risen(facts, prefill, v.INFLIGHT_QUEUE_REQS, low.value)
    lasted_s = facts.now - since.at if since else 10.0
    # Strong: nothing but a hand-off nobody acknowledges fills it, but transfer faults do as well.
    why = f"{prefill}'s inflight queue was never below {low.value:.0f} in the last {lasted_s:.0f} s"
    return supports(test, "strong", why, low.evidence)


def forwards_still_run(facts: Facts, subject: str) -> TestResult:
    """Whether both engines still compute, so that only the hand-off between them is sick."""
    test = "forwards-still-run"
    members = [name for name in signs.ends(facts, subject) if name]
    seen = [(name, forwards(facts, name)) for name in members]
    if len(members) < 2 or any(tokens is None for _, tokens in seen):
        return unknown(
            test, "moderate", "not every engine's progress was seen", "progress of both engines"
        )
    cited = tuple(cite for _, tokens in seen if tokens for cite in tokens.evidence)
    stopped = [name for name, tokens in seen if tokens and tokens.value <= 0]
    if stopped:
        # Moderate: a saturated stall can starve the health check's step too.
        why = f"{' and '.join(stopped)} ran no forward step in the last 10 s"
        return contradicts(test, "moderate", why, cited)
    # Moderate: it leaves the hand-off, but every fault of the hand-off.
    why = f"{' and '.join(members)} still run forward steps: compute and scheduler are well"
    return supports(
        test, "moderate", why, (*cited, *(c for n in members for c in healthy(facts, n)))
    )


def decode_waits(facts: Facts, subject: str) -> TestResult:
    """Whether the decode waits for KV that does not come."""
    test = "decode-waits"
    _, decode = signs.ends(facts, subject)
    waiting = held(facts, decode, v.TRANSFER_QUEUE_REQS) if decode else None
    if decode is None or waiting is None:
        return unknown(
            test,
            "moderate",
            "the decode's live transfer queue was not seen",
            f"{decode or 'the decode'}'s live transfer queue (/v1/loads)",
        )
    if waiting.value < 1:
        return unknown(
            test, "moderate", f"{decode}'s transfer queue was empty within the last 10 s"
        )
    # Moderate: the other process agrees; a long prefill makes it wait as well.
    why = f"{decode}'s transfer queue was never below {waiting.value:.0f} in the last 10 s"
    return supports(test, "moderate", why, waiting.evidence)


def direct_probe_hangs(facts: Facts, subject: str) -> TestResult:
    """Whether a request that goes around the router hangs as well."""
    test = "direct-probe-hangs"
    prefill, decode = signs.ends(facts, subject)
    seen = facts.latest(f"{prefill}>{decode}", v.PROBE)
    if seen is None or seen.value == "off":
        return unknown(
            test,
            "moderate",
            "the path was not probed directly",
            f"a direct probe of {prefill}>{decode}",
        )
    if seen.value in ("late", "stuck"):
        # Moderate: the path itself is sick, whatever made it so.
        why = f"a probe sent to both engines directly got no answer ({seen.value})"
        return supports(test, "moderate", why, (seen.id,))
    return unknown(test, "moderate", f"the newest direct probe was {seen.value}: some rooms pass")


def no_failure_counted(facts: Facts, subject: str) -> TestResult:
    """Whether the held hand-offs are silent: more of them than failures anybody counted."""
    test = "no-failure-counted"
    prefill, decode = signs.ends(facts, subject)
    low = held(facts, prefill, v.INFLIGHT_QUEUE_REQS) if prefill else None
    level = (
        signs.risen(facts, prefill, v.INFLIGHT_QUEUE_REQS, low.value) if prefill and low else None
    )
    counted = [
        failed
        for name in (prefill, decode)
        if name
        and level
        and (failed := facts.growth(name, v.TRANSFER_FAILED_TOTAL, since=level.at))
    ]
    if low is None or not counted or low.value < 1:
        return unknown(test, "weak", "failures and held hand-offs cannot be compared")
    failures = sum(one.value for one in counted)
    cited = (*low.evidence, *(cite for one in counted for cite in one.evidence))
    if failures > low.value:
        # Weak: failures may be the same fault in an engine that does notice.
        why = f"{failures:.0f} failed hand-offs were counted since: it is not silent"
        return contradicts(test, "weak", why, cited)
    why = f"{low.value:.0f} hand-offs are held and {failures:.0f} failures were counted since"
    return supports(test, "weak", why, cited)


def peer_of_held_rooms(facts: Facts, subject: str) -> TestResult:
    """To which decode life each held room is bound: no engine tells yet, so it stays unknown."""
    prefill, _ = signs.ends(facts, subject)
    return unknown(
        "peer-of-held-rooms",
        "decisive",
        "no engine shows which decode incarnation a held hand-off is bound to",
        f"which decode incarnation each hand-off held by {prefill or 'the prefill'} is bound to "
        "(a thread dump of its transfer worker, or its table of rooms)",
    )


def implicates(facts: Facts, change: Change) -> TestResult | None:
    """Decode-only restarts are implicated; restarts of prefill and router are not."""
    test = "change"
    member = facts.deployment.member(change.subject)
    if member is None or change.kind not in ("restart", "start", "stop"):
        return None
    if member.role is Role.ROUTER:
        return contradicts(test, "strong", "the hand-off goes around the router", ())
    prefills = facts.deployment.of(Role.PREFILL)
    if member.role is Role.PREFILL:
        why = "a prefill that starts remembers no decode and holds no hand-off"
        return contradicts(test, "strong", why, ())
    known = [(one, decode_alone(facts, one.name, member.name)) for one in prefills]
    if any(alone is None for _, alone in known):
        return None
    for prefill, alone in known:
        if alone is None:
            continue
        same = [
            life
            for life, died_at in zip(alone.restarts, alone.deaths, strict=True)
            if (
                change.incarnation == life.id
                if change.kind == "start" and change.incarnation
                else died_at - DYING_S <= change.at <= life.started_at + DYING_S
            )
        ]
        if same:
            life = min(same, key=lambda one: abs(one.started_at - change.at))
            why = (
                f"{member.name} was restarted alone at {clock(life.started_at)} while "
                f"{prefill.name} lived on (since {clock(alone.prefill.started_at)})"
            )
            return supports(test, "strong", why, (*alone.prefill.evidence, *life.evidence))
    why = f"this {change.kind} of {member.name} was no restart against a running prefill"
    return contradicts(test, "strong", why, ())


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


MODE = Mode(
    slug="degraded-pair-after-decode-restarts",
    incident_class="stale-peer-after-one-sided-restart",
    scope="pair",
    safety=(
        "Safe: what is held is lost already, and an ordered restart of both sides leaves neither "
        "with memory of the other. Never restart the decode alone."
    ),
    tests=(
        decode_restarted_alone,
        handoffs_held,
        held_since_a_restart,
        forwards_still_run,
        decode_waits,
        direct_probe_hangs,
        no_failure_counted,
        peer_of_held_rooms,
    ),
    needs=("decode-restarted-alone", "handoffs-held"),
    aliases=("stale-peer", "orphaned-transfer", "decode-restart", "silent-transfer-stall"),
    components=("kv-transfer",),
    split=mechanism,
    implicates=implicates,
)

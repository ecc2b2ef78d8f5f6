"""A member whose process is gone, is a zombie, is stopped, or answers nothing any more.

What you see
    Connections to one member are refused or time out; requests that need it fail or hang.

Why it is silent
    Often it is not. But a supervisor that does not notice, or a router whose health checks are a
    minute apart, lets clients find it first; and a zombie still has a pid.

What rules it in
    The process collector sees no process, a zombie, or one in state T, which SIGSTOP or a debugger
    holds; HTTP is refused; the router counts the worker as unhealthy.

What rules it out
    Every member's process lives and its HTTP answered in the last seconds.

Repair and its safety
    A stopped member: find out who holds it, and let it go on with `kill -CONT PID`; nothing is
    lost by that. Start a dead one again, and only it, unless it is a decode against a long-running
    prefill whose engine is known to be hurt by that: then the pair. Save its log and core first.

References
    The class process-crash of public incidents: one role exits regularly with the same native
    stack; a restart without a fresh handshake of its peers is the next incident.
"""

from tandem import signs
from tandem.facts import Facts
from tandem.failures.answers import clock, contradicts, supports, unknown
from tandem.ports import Mode
from tandem.records import Member, Observation, Role, TestResult
from tandem.records import vocabulary as v

ANSWERS = (v.HEALTH_STATUS, v.RUNNING_REQS, v.REQUESTS_TOTAL, v.ROUTER_REQUESTS_TOTAL)
"""Observations that only an answering member brings."""
QUIET_S = 10.0
"""Without an answer for this long a member does not answer."""
CRASHES = ("subprocess-crashed", "out-of-memory", "cuda-error", "watchdog-timeout")
"""Log signatures of a death."""


def process_gone(facts: Facts, subject: str) -> TestResult:
    """Whether a member's process is gone, a zombie or stopped, or all of them live."""
    test = "process-gone"
    members = _members(facts, subject)
    for member in members:
        gone = signs.held_since(facts.rows(member.name, v.ALIVE), value=False)
        zombie = signs.held_since(facts.rows(member.name, v.PROCESS_STATE), value="Z")
        first = zombie if gone is None else gone
        row = facts.latest(member.name, v.ALIVE if gone is not None else v.PROCESS_STATE)
        stopped = signs.held_since(facts.rows(member.name, v.PROCESS_STATE), value="T")
        # Decisive: the state is looked at. A tracer stops a process for a moment, so only one that
        # stays so is held by somebody.
        if stopped is not None and row is not None and facts.now - stopped.at >= QUIET_S:
            return supports(test, "decisive", _held(facts, member, stopped.at), (row.id,))
        if first is None or row is None:
            continue
        lasted_s = facts.now - first.at
        kind = "a zombie" if gone is None else "gone"
        why = f"the process of {member.name} is {kind} since {clock(first.at)} ({lasted_s:.0f} s)"
        # Decisive: the process is what the failure is about, and it was looked at. For the first
        # seconds it may be on its way back: moderate.
        return supports(test, "decisive" if lasted_s >= QUIET_S else "moderate", why, (row.id,))
    seen = [(one, facts.latest(one.name, v.ALIVE)) for one in members]
    known = [row for _, row in seen if row is not None and row.value is True]
    if not members or len(known) < len(members):
        return unknown(
            test, "decisive", "not every process was seen", "the process of every member"
        )
    # Strong alone: a process can live and be as good as dead; its answers decide. Weak of one that
    # gives none: that it lives is then all that is known of it.
    mute = answers_http(facts, subject).answer == "supports"
    names = ", ".join(one.name for one in members)
    why = f"every process lives: {names}"
    return contradicts(test, "weak" if mute else "strong", why, tuple(row.id for row in known))


def _held(facts: Facts, member: Member, since: float) -> str:
    life = facts.incarnation(member.name)
    pid = life.pid if life is not None and life.pid else "its pid"
    lasted_s = facts.now - since
    return (
        f"the process of {member.name} is stopped (state T) since {clock(since)} ({lasted_s:.0f} "
        f"s): SIGSTOP or a debugger holds it, and `kill -CONT {pid}` lets it go on"
    )


def answers_http(facts: Facts, subject: str) -> TestResult:
    """Whether every member still answers over HTTP."""
    test = "answers-http"
    members = _members(facts, subject)
    cited: list[int] = []
    for member in members:
        rows = [row for name in ANSWERS for row in facts.rows(member.name, name)]
        good = max((row for row in rows if row.missing is None), key=_when, default=None)
        bad = max((row for row in rows if row.missing is not None), key=_when, default=None)
        if good is not None and facts.now - good.at < QUIET_S:
            cited.append(good.id)
        elif bad is not None and facts.now - bad.at < QUIET_S:
            last = "was never seen to" if good is None else f"last did at {clock(good.at)}"
            # Strong: a paused host or a full backlog refuses too.
            why = f"{member.name} does not answer ({bad.missing}) and {last}"
            return supports(test, "strong", why, (bad.id,))
        else:
            ask = f"whether {member.name} answers HTTP"
            return unknown(test, "strong", f"{member.name} was not asked lately", ask)
    if not members:
        return unknown(test, "strong", "no member is known")
    # Decisive: the dead do not answer.
    why = f"every member answered within the last 10 s: {', '.join(m.name for m in members)}"
    return contradicts(test, "decisive", why, tuple(cited))


def router_unhealthy(facts: Facts, subject: str) -> TestResult:
    """Whether the router too counts a member as unhealthy."""
    test = "router-unhealthy"
    for router in facts.deployment.of(Role.ROUTER):
        for member in _members(facts, subject):
            seen = facts.latest(router.name, v.WORKER_HEALTHY, member.name)
            if seen is not None and seen.value is False and facts.now - seen.at < 30.0:
                # Weak: the router asks the same question, less often.
                why = f"{router.name} counts {member.name} as unhealthy"
                return supports(test, "weak", why, (seen.id,))
    return unknown(test, "weak", "no router counts a member of this path as unhealthy")


def died_in_its_log(facts: Facts, subject: str) -> TestResult:
    """Whether a member's log ends in words of its death."""
    test = "died-in-its-log"
    for member in _members(facts, subject):
        for slug in CRASHES:
            seen = facts.latest(member.name, v.LOG_SIGNATURE, slug)
            if seen is not None and isinstance(seen.value, int) and seen.value > 0:
                # Moderate: a line may be old; the process collector says whether it died of it.
                why = f"{member.name}'s log holds {slug} ({seen.value} times)"
                return supports(test, "moderate", why, (seen.id,))
    return unknown(test, "moderate", "no log of this path speaks of a death")


def _members(facts: Facts, subject: str) -> tuple[Member, ...]:
    """The members a subject speaks of: itself, or both ends of the path and the routers."""
    itself = facts.deployment.member(subject)
    if itself is not None:
        return (itself,)
    named = {name for name in signs.ends(facts, subject) if name}
    return tuple(
        one
        for one in facts.deployment.members
        if one.name in named or one.role is Role.ROUTER or not named
    )


def _when(row: Observation) -> float:
    return row.at


MODE = Mode(
    slug="dead-worker",
    incident_class="process-crash",
    scope="engine",
    safety="Safe: it serves nothing; one that is stopped goes on after `kill -CONT`. "
    "A decode alone against a running prefill: restart the pair.",
    tests=(process_gone, answers_http, router_unhealthy, died_in_its_log),
    aliases=("crash", "process-crash", "zombie", "oom", "member-down", "stopped", "sigstop"),
)

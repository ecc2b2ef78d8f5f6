"""Slow but moving: what looks like a stall from outside and is none.

For: `slow-but-moving`, told with its reason (a cold start, a long prefill, overload) and never
repaired. Not for: anything that stands still (`silent`, `partial`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.detect.settled import completed_nothing
from tandem.detect.waiting import overdue_probe
from tandem.facts import Facts, Reading
from tandem.records import Member, Role, Witness
from tandem.records import vocabulary as v

SLOW_S = 30.0
"""A queue must stay filled this long before slowness is worth a word."""
COLD_S = 600.0
"""A life this young that has completed nothing yet may still be compiling."""
WAITING = {
    Role.PREFILL: ((v.WAITING_REQS, "waiting"), (v.BOOTSTRAP_QUEUE_REQS, "bootstrap")),
    Role.DECODE: ((v.WAITING_REQS, "waiting"), (v.PREALLOC_QUEUE_REQS, "prealloc")),
    Role.ROUTER: (),
}


def slow(facts: Facts) -> list[Candidate]:
    """Every engine that keeps requests waiting although it works."""
    engines = (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE))
    return [found for one in engines if (found := _queueing(facts, one) or _cold(facts, one))]


def _queueing(facts: Facts, engine: Member) -> Candidate | None:
    """A line of waiting requests that did not empty while work was done."""
    if not signs.holds(facts, engine.name, (name for name, _ in WAITING[engine.role])):
        return None
    tokens = signs.beyond_health(facts, engine.name, SLOW_S)
    done = signs.completed(facts, engine.name, SLOW_S)
    working = [one for one in (tokens, done) if one is not None and one.value > 0]
    if not working:
        return None
    for name, label in WAITING[engine.role]:
        low = signs.floor(facts, engine.name, name, SLOW_S)
        rose = signs.risen(facts, engine.name, name)
        if low is None or low.value < 1 or rose is None:
            continue
        waits = server(
            f"{engine.name}'s {label} queue was never below {low.value:.0f} "
            f"in the last {facts.now - rose.at:.0f} s",
            low.evidence,
        )
        return _told(facts, engine, _reason(engine, tokens, done), rose.at, waits, working[0])
    return None


def _reason(engine: Member, tokens: Reading | None, done: Reading | None) -> str:
    """Overload completes; one long prompt computes and completes nothing meanwhile."""
    computes = tokens is not None and tokens.value > 0
    completes = done is not None and done.value > 0
    if computes and not completes:
        return "long prefill" if engine.role is Role.PREFILL else "long generations"
    return "overload"


def _cold(facts: Facts, engine: Member) -> Candidate | None:
    """A young life that computes, has completed nothing yet, and is waited for."""
    life = facts.incarnation(engine.name)
    if life is None or not SLOW_S <= facts.now - life.started_at <= COLD_S:
        return None
    if not completed_nothing(facts, engine.name):
        return None
    used = signs.busy(facts, engine.name, SLOW_S / 2)
    if used is None or used.value < signs.BUSY_CPU:
        return None
    waits = _waits_for(facts, engine)
    if waits is None:
        return None
    return _told(facts, engine, "cold start", life.started_at, waits, used)


def _waits_for(facts: Facts, engine: Member) -> Witness | None:
    for cell in facts.deployment.cells():
        if engine.name in (cell.prefill, cell.decode):
            probe = overdue_probe(facts, cell.subject)
            if probe is not None:
                said = f"the probe of {cell.subject} got no answer yet ({probe.value})"
                return client(said, (probe.id,))
    return None


def _told(
    facts: Facts,
    engine: Member,
    reason: str,
    onset_at: float,
    waits: Witness,
    works: Reading,
) -> Candidate:
    did = (
        f"since it started {facts.now - onset_at:.0f} s ago it computes ({works.value:.1f} cores) "
        "and has completed nothing yet"
        if reason == "cold start"
        else f"it computed or completed work all along ({works.value:.0f} counted)"
    )
    working = server(did, works.evidence)
    return Candidate(
        kind="slow-but-moving",
        subject=engine.name,
        members=(engine.name,),
        onset_at=onset_at,
        summary=f"{engine.name} is slow but moving ({reason}; no stall): {waits.statement}, "
        f"and {did}",
        witnesses=(waits, working),
        actionable=False,
    )

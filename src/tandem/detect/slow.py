"""Slow but moving: queues that do not empty while everything progresses.

For: `slow-but-moving`, told and never repaired. Not for: anything that stands still (`stall`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, server
from tandem.facts import Facts
from tandem.records import Member, Role
from tandem.records import vocabulary as v

SLOW_S = 30.0
"""A queue must stay filled this long before slowness is worth a word."""
WAITING = {
    Role.PREFILL: ((v.WAITING_REQS, "waiting"), (v.BOOTSTRAP_QUEUE_REQS, "bootstrap")),
    Role.DECODE: ((v.WAITING_REQS, "waiting"), (v.PREALLOC_QUEUE_REQS, "prealloc")),
    Role.ROUTER: (),
}


def slow(facts: Facts) -> list[Candidate]:
    """Every engine whose line of waiting requests did not empty although it works."""
    engines = (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE))
    return [found for one in engines if (found := _slow(facts, one))]


def _slow(facts: Facts, engine: Member) -> Candidate | None:
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
        waits = (
            f"{engine.name}'s {label} queue was never below {low.value:.0f} "
            f"in the last {facts.now - rose.at:.0f} s"
        )
        works = f"it computed or completed work all along ({working[0].value:.0f} counted)"
        return Candidate(
            kind="slow-but-moving",
            subject=engine.name,
            members=(engine.name,),
            onset_at=rose.at,
            summary=f"{engine.name} is slow but moving: {waits}, and {works}",
            witnesses=(server(waits, low.evidence), server(works, working[0].evidence)),
            actionable=False,
        )
    return None

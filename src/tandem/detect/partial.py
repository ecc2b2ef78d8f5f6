"""A partial stall: some hand-offs of a prefill hang while others flow. It is how silence begins.

For: `partial-stall`, by an inflight floor that traffic does not explain, and a second process that
knows of it. Not for: a path on which nothing completes (`silent`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, server
from tandem.detect.settled import settled
from tandem.detect.waiting import overdue_probe
from tandem.facts import Facts, Reading
from tandem.records import Role, Thresholds, Witness
from tandem.records import vocabulary as v

SLOW_TRANSFERS = 5.0
"""A hand-off is overdue only past this many mean durations of those that completed."""
STRETCHES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Windows tried for a partial stall, in `partial_floor_s`: busier paths need longer looks."""
CHANCE_MAX = 1e-9
"""A floor likelier than this under Little's law is traffic: at 1 Hz one false look in 30 years."""
BURSTY = 2.0
"""Real arrivals are burstier than Poisson: the mean in flight is taken this much larger."""
ORPHANED = 5.0
"""How many `partial_floor_s` a hand-off may be held that no decode and no client knows of:
longer than the leases engines are known to use (30 s)."""


def partial(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """Every prefill whose hand-offs hang in part at this moment."""
    prefills = facts.deployment.of(Role.PREFILL)
    return [found for one in prefills if (found := _partial(facts, one.name, thresholds))]


def _partial(facts: Facts, prefill: str, thresholds: Thresholds) -> Candidate | None:
    """Some hand-offs of a prefill hang: more than traffic explains, and another process agrees."""
    typical_s = signs.transfer_s(facts, prefill)
    for times in STRETCHES:
        window_s = max(thresholds.partial_floor_s, SLOW_TRANSFERS * typical_s) * times
        held = _unexplained(facts, prefill, window_s)
        if held is None:
            continue
        decodes = [one.name for one in facts.deployment.of(Role.DECODE)]
        sure = [
            (name, other)
            for name in decodes
            if settled(facts, (prefill, name), window_s)
            and (other := _other_side(facts, prefill, name, window_s, thresholds))
        ]
        if sure:
            return _hanging(facts, prefill, sure, held)
    return None


def _unexplained(facts: Facts, prefill: str, window_s: float) -> Reading | None:
    """The inflight floor over the window, when Little's law does not account for it."""
    low = signs.floor(facts, prefill, v.INFLIGHT_QUEUE_REQS, window_s)
    if low is None or low.value < 1:
        return None
    mean = signs.explained(facts, prefill, window_s)
    if mean is None:
        return None
    # Looks closer together than one hand-off takes see the same hand-offs again.
    looks = window_s / max(1.0, signs.transfer_s(facts, prefill))
    likely = signs.chance(low.value, BURSTY * mean, looks)
    return low if likely <= CHANCE_MAX else None


def _other_side(
    facts: Facts, prefill: str, decode: str, window_s: float, thresholds: Thresholds
) -> Witness | None:
    """Who else knows that hand-offs to this decode hang."""
    probe = overdue_probe(facts, f"{prefill}>{decode}")
    if probe is not None:
        said = f"the probe of {prefill}>{decode} got no answer ({probe.value})"
        return Witness(side="client", statement=said, evidence=(probe.id,))
    waiting = signs.floor(facts, decode, v.TRANSFER_QUEUE_REQS, window_s)
    if waiting is None:
        return None
    if waiting.value > 0:
        return server(
            f"{decode} has waited for {waiting.value:.0f} or more hand-offs for {window_s:.0f} s",
            waiting.evidence,
        )
    if window_s >= ORPHANED * thresholds.partial_floor_s:
        return server(
            f"{decode} waits for none of them: its transfer queue was empty within the last "
            f"{window_s:.0f} s",
            waiting.evidence,
        )
    return None


def _hanging(
    facts: Facts, prefill: str, sure: list[tuple[str, Witness]], held: Reading
) -> Candidate:
    decodes = [name for name, _ in sure]
    subject = f"{prefill}>{decodes[0]}" if len(decodes) == 1 else prefill
    rose = signs.risen(facts, prefill, v.INFLIGHT_QUEUE_REQS)
    onset_at = facts.now if rose is None else rose.at
    moved = facts.growth(prefill, v.TRANSFERS_TOTAL, since=onset_at)
    others = "" if moved is None else f" while {moved.value:.0f} others completed"
    statement = (
        f"{prefill}'s inflight queue was never below {held.value:.0f} "
        f"in the last {facts.now - onset_at:.0f} s{others}"
    )
    return Candidate(
        kind="partial-stall",
        subject=subject,
        members=(prefill, *decodes),
        onset_at=onset_at,
        summary=f"some hand-offs on {subject} never end: {statement}, and {sure[0][1].statement}",
        witnesses=(sure[0][1], server(statement, held.evidence)),
    )

"""A partial stall: some hand-offs of a path hang while others flow. It is how silence begins.

For: `partial-stall`, by a floor that traffic does not explain (a queue that never returns to zero)
and a second witness: a request whose age is an outlier, requests minus responses at the router, or
the other engine. Not for: a path on which nothing completes (`silent`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, joined, server
from tandem.detect.settled import completed_nothing, settled
from tandem.detect.waiting import backlog, overdue_probe
from tandem.facts import Facts, Reading
from tandem.records import Path, Role, Thresholds, Witness
from tandem.records import vocabulary as v

SLOW_TRANSFERS = 5.0
"""A hand-off is overdue only past this many mean durations of those that completed."""
STRETCHES = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
"""Windows tried for a partial stall, in `partial_floor_s`: busier paths need longer looks."""
CHANCE_MAX = 1e-9
"""A floor likelier than this under Little's law is traffic: at 1 Hz one false look in 30 years."""
BURSTY = 2.0
"""Real arrivals are burstier than Poisson: the mean in flight is taken this much larger."""
LEASED = 4.0
"""How many `partial_floor_s` a hand-off may be held that no decode knows of while a client waits
for something: longer than the leases engines are known to use (30 s)."""
ORPHANED = 5.0
"""The same where no client waits either: then nobody is hurt yet, and it may still be let go."""
EMPTY_LOOKS_MIN = 3
"""How often, and over half the window, every prefill must have been seen with nothing in hand."""
STEP_S = 4.0
"""What a prefill computes is in none of its queues, and shows in its counter this much later at
most: one step of a long prompt."""


def partial(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """The paths whose hand-offs hang in part at this moment; of one cause one."""
    held = [
        found
        for one in facts.deployment.of(Role.PREFILL)
        if signs.holds(facts, one.name, (v.INFLIGHT_QUEUE_REQS,))
        and (found := _held_by_prefill(facts, one.name, thresholds))
    ]
    told = {name for one in held for name in one.members}
    waiting = {
        one.name
        for one in facts.deployment.of(Role.DECODE)
        if one.name not in told and signs.holds(facts, one.name, (v.TRANSFER_QUEUE_REQS,))
    }
    waited = [
        found
        for cell in facts.deployment.cells()
        if cell.decode in waiting and (found := _waited_by_decode(facts, cell, thresholds))
    ]
    return [joined(facts, group, "stall in part") for group in (held, _per_decode(waited)) if group]


def _held_by_prefill(facts: Facts, prefill: str, thresholds: Thresholds) -> Candidate | None:
    """Some hand-offs of a prefill hang: more than traffic explains, and another process agrees."""
    typical_s = signs.transfer_s(facts, prefill)
    decodes = [one.name for one in facts.deployment.of(Role.DECODE)]
    for times in STRETCHES:
        window_s = max(thresholds.partial_floor_s, SLOW_TRANSFERS * typical_s) * times
        held = _unexplained(facts, prefill, window_s)
        if held is None:
            continue
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
    probe = _old_request(facts, f"{prefill}>{decode}")
    if probe is not None:
        return probe
    waiting = signs.floor(facts, decode, v.TRANSFER_QUEUE_REQS, window_s)
    if waiting is None:
        return None
    if waiting.value > 0:
        return server(
            f"{decode} has waited for {waiting.value:.0f} or more hand-offs for {window_s:.0f} s",
            waiting.evidence,
        )
    times = window_s / thresholds.partial_floor_s
    if times >= LEASED and (waits := backlog(facts, window_s)) is not None:
        return waits
    if times >= ORPHANED:
        return server(
            f"{decode} waits for none of them: its transfer queue was empty within the last "
            f"{window_s:.0f} s",
            waiting.evidence,
        )
    return None


def _old_request(facts: Facts, subject: str) -> Witness | None:
    """The client of a request whose age is an outlier: our own probe, which others overtake."""
    probe = overdue_probe(facts, subject)
    if probe is None:
        return None
    return client(f"the probe of {subject} got no answer ({probe.value})", (probe.id,))


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


def _waited_by_decode(facts: Facts, cell: Path, thresholds: Thresholds) -> Candidate | None:
    """A decode waits for hand-offs that no prefill has: it was given up there, or never known."""
    for times in (1.0, ORPHANED):
        window_s = thresholds.partial_floor_s * times
        low = signs.floor(facts, cell.decode, v.TRANSFER_QUEUE_REQS, window_s)
        if low is None or low.value < 1 or not settled(facts, (cell.decode,), window_s):
            return None
        empty = _nothing_in_hand(facts, window_s)
        if not empty:
            continue
        waits = _old_request(facts, cell.subject) or backlog(facts, window_s)
        if waits is None and times < ORPHANED:
            continue
        said = (
            f"{cell.decode} has waited for {low.value:.0f} or more hand-offs for {window_s:.0f} s"
        )
        nobody = server("no prefill had any request in hand meanwhile", empty)
        rose = signs.risen(facts, cell.decode, v.TRANSFER_QUEUE_REQS)
        other = waits or nobody
        return Candidate(
            kind="partial-stall",
            subject=cell.decode,
            members=(cell.prefill, cell.decode),
            onset_at=facts.now - window_s if rose is None else rose.at,
            summary=f"some hand-offs to {cell.decode} never come: {said}, {nobody.statement}"
            + (f", and {waits.statement}" if waits else ""),
            witnesses=(other, server(said, (*low.evidence, *nobody.evidence))),
        )
    return None


def _nothing_in_hand(facts: Facts, window_s: float) -> tuple[int, ...]:
    """The looks at which every prefill had no request in hand; () when it may have.

    What it computes is in none of its queues, and few engines show it live: the others must have
    been seen not to compute.
    """
    cited: list[int] = []
    for prefill in facts.deployment.of(Role.PREFILL):
        if completed_nothing(facts, prefill.name):
            return ()  # its first step may take as long as compiling does
        names = [name for name, _ in signs.QUEUES[Role.PREFILL]] + [v.RUNNING_REQS]
        series = [
            facts.numbers(prefill.name, name, since=facts.now - window_s, source=signs.LIVE)
            for name in names
        ]
        levels: dict[float, float] = {}
        for samples in series:
            for sample in samples:
                levels[sample.at] = levels.get(sample.at, 0.0) + sample.value
        empty = sorted(at for at, level in levels.items() if level == 0)
        if not series[-1]:
            computes = signs.computing(facts, prefill.name, facts.now - window_s, STEP_S)
            empty = [at for at in empty if computes(at) is False]
        if len(empty) < EMPTY_LOOKS_MIN or empty[-1] - empty[0] < (window_s - STEP_S) / 2:
            return ()
        cited += [one.id for one in series[0] if one.at in (empty[0], empty[-1])]
    return tuple(cited)


def _per_decode(waited: list[Candidate]) -> list[Candidate]:
    """One for each decode: which of the prefills it waits for cannot be told."""
    found: dict[str, Candidate] = {}
    for one in waited:
        found.setdefault(one.subject, one)
    return list(found.values())

"""A silent stall: requests are held on a path, nothing completes on it, and a client waits.

For: `silent-stall`. Not for: naming the cause, nor for paths on which anything still completes
(`partial`). What is *not* a stall: idle (nothing held), a burst (completions move), a long prefill
(progress moves by whole chunks), a cold start, a member that is away.
"""

from itertools import pairwise
from typing import NamedTuple

from tandem import signs
from tandem.detect.candidate import Candidate, joined, server
from tandem.detect.gpus import gpus
from tandem.detect.settled import completed_nothing, settled, settled_at
from tandem.detect.waiting import (
    HELD_UP_S,
    client_of,
    completed_probe,
    held_up,
    overdue_probe,
)
from tandem.facts import Facts, Reading
from tandem.records import Path, Role, Thresholds
from tandem.records import vocabulary as v

BUSY_PATIENCE = 3.0
"""How much longer a process that computes may show no progress: one forward step can be long."""
SPINNING_PATIENCE = 2.0
"""The same for one that has most of a core to itself, and whose steps were short all along."""
SPINNING_CPU = 0.5
PACE = 3.0
"""Who paused before and went on may pause this many times as long; at most `PATIENCE_S_MAX`."""
PATIENCE_S_MAX = 60.0
PAUSES_MIN = 10
"""So many moves of progress must have been seen to know that steps are short."""
BLIND_S = 5.0
"""Looks further apart than this show no pause of the engine."""
COLD_S = 60.0
"""A process this young that never completed anything and computes is still compiling."""
SLOW_TRANSFERS = 5.0
"""A hand-off is overdue only past this many mean durations of those that completed."""
QUEUES_SEEN_S = 15.0
"""An engine that showed live queues this lately shows them in general."""


class _Pinned(NamedTuple):
    """A queue that never emptied: whose, what to say of it, since when, and the evidence."""

    member: str
    said: str
    rose_at: float
    evidence: tuple[int, ...]


def silent(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """The silence at this moment, as one candidate however many cells it spans; or none."""
    holding = {
        member.name: signs.holds(
            facts, member.name, (name for name, _ in signs.QUEUES[member.role])
        )
        for member in facts.deployment.members
    }
    found = [
        one
        for cell in facts.deployment.cells()
        if (holding[cell.prefill] or holding[cell.decode] or overdue_probe(facts, cell.subject))
        and (one := _silent(facts, cell, thresholds))
    ]
    # Where both ends of a cell hold requests, the silence of its row and column is the same one.
    both = [one for one, ends in found if ends == 2]
    silent_cells = both or [one for one, _ in found]
    return [joined(facts, silent_cells, "are silent")] if silent_cells else []


def _silent(facts: Facts, cell: Path, thresholds: Thresholds) -> tuple[Candidate, int] | None:
    """Requests are held, nothing completes on either engine, and a client waits.

    With the candidate, how many of the two ends hold requests.
    """
    members = (cell.prefill, cell.decode)
    typical_s = signs.transfer_s(facts, cell.prefill)
    floor_s = max(thresholds.floor_s, SLOW_TRANSFERS * typical_s)
    window_s = max(floor_s, thresholds.flat_s)
    if not settled(facts, members, window_s):
        return None
    if any(_completes(facts, name, thresholds) for name in members):
        return None
    pinned = _pinned(facts, cell, floor_s)
    probe = overdue_probe(facts, cell.subject)
    if not pinned and (probe is None or probe.value != "stuck" or _sees_queues(facts, cell)):
        # Engines that show empty queues hold nothing: a late probe alone is no stall.
        return None
    if completed_probe(facts, cell.subject, facts.now - thresholds.flat_s) is not None:
        return None
    rises = [one.rose_at for one in pinned]
    if probe is not None and not pinned:
        rises = [probe.at - thresholds.probe_deadline_s]
    moved = [one.at for member in members if (one := signs.last_moved(facts, member))]
    onset_at = max([min(rises), *moved])
    if facts.now - onset_at < HELD_UP_S and held_up(facts, cell, thresholds):
        return None
    still = [_still(facts, member, thresholds.flat_s, onset_at) for member in members]
    waits = client_of(facts, cell, thresholds)
    if waits is None or any(one is None for one in still):
        return None
    flat = tuple(cite for one in still if one is not None for cite in one.evidence)
    held = [one.said for one in pinned]
    if probe is not None and not pinned:
        held = [f"the probe of {cell.subject} is {probe.value}"]
    silence = server(
        f"{_and(held)}; no hand-off and no request completed on {cell.prefill} or {cell.decode} "
        f"for {facts.now - onset_at:.0f} s and no token was computed beyond health checks",
        (*(cite for one in pinned for cite in one.evidence), *flat),
    )
    summary = f"nothing completes on {cell.subject}: {_and(held)}, {waits.statement}"
    candidate = Candidate(
        kind="silent-stall",
        subject=cell.subject,
        members=members,
        onset_at=onset_at,
        summary=summary + _health(facts, members, onset_at),
        witnesses=(waits, silence, *((busy,) if (busy := gpus(facts, members)) else ())),
    )
    return candidate, len({one.member for one in pinned})


def _completes(facts: Facts, member: str, thresholds: Thresholds) -> bool:
    """Whether an engine completed anything lately: a quick first look at what is still."""
    done = signs.completed(facts, member, thresholds.flat_s)
    return done is not None and done.value > 0


def _pinned(facts: Facts, cell: Path, floor_s: float) -> list[_Pinned]:
    """Each queue of the two engines that never emptied."""
    found = []
    for member, role in ((cell.prefill, Role.PREFILL), (cell.decode, Role.DECODE)):
        for name, label in signs.QUEUES[role]:
            low = signs.floor(facts, member, name, floor_s)
            if low is None or low.value < 1:
                continue
            rose = signs.risen(facts, member, name)
            if rose is None:
                continue
            since = signs.risen(facts, member, name, low.value) or rose
            said = (
                f"{member}'s {label} was never below {low.value:.0f} "
                f"in the last {facts.now - since.at:.0f} s"
            )
            found.append(_Pinned(member, said, rose.at, low.evidence))
    return found


def _sees_queues(facts: Facts, cell: Path) -> bool:
    """Whether either engine shows its live queues, so that nothing held means nothing held."""
    return any(
        facts.numbers(member, name, since=facts.now - QUEUES_SEEN_S, source=signs.LIVE)
        for member, role in ((cell.prefill, Role.PREFILL), (cell.decode, Role.DECODE))
        for name, _ in signs.QUEUES[role]
    )


def _still(facts: Facts, member: str, flat_s: float, onset_at: float) -> Reading | None:
    """Proof that an engine made no progress; None when it did, or when that is not known.

    `onset_at` is since when anything is held without a completion.

    Tokens must be known; a counter of requests may be missing, since engines leave it out until
    the first request of a life is done.
    """
    proof = _flat(facts, member, flat_s)
    tokens = signs.grown(facts, member, v.PROGRESS_TOKENS_TOTAL, flat_s)
    used = signs.busy(facts, member, flat_s)
    if proof is None or tokens is None or tokens.value > 0:
        return proof
    unwired = signs.never_moved(facts, member, v.PROGRESS_TOKENS_TOTAL)
    if used is None:
        return None if unwired else proof
    if used.value < signs.BUSY_CPU:
        pace_s = min(PATIENCE_S_MAX, PACE * max(_pauses(facts, member), default=0.0))
        paused = pace_s > flat_s and _flat(facts, member, pace_s) is None
        if facts.now - onset_at < pace_s or paused:
            # It went on after pauses like this one: a starved process seems idle as well.
            return None
        return Reading(flat_s, (*proof.evidence, *used.evidence))
    if unwired:
        # It computes, and the counter that would show what has never moved: that proves nothing.
        return None
    # It computes and not even a health check gets through: one long step looks like this.
    life = facts.incarnation(member)
    # From its first answer on: what it took to load is not what it takes to compile.
    begun_at = settled_at(facts, member)
    young = life is not None and begun_at is not None and facts.now - begun_at < COLD_S
    if young and completed_nothing(facts, member):
        return None
    patience_s = _patience_s(facts, member, flat_s, used.value)
    if facts.now - onset_at < patience_s:
        # What was idle before did not pause: its step began when there was something to do.
        return None
    return _flat(facts, member, patience_s)


def _patience_s(facts: Facts, member: str, flat_s: float, cores: float) -> float:
    """How long an engine that computes may show no progress, by how it went on in this life.

    One that is starved of CPU, or used to long steps, paused before and went on.
    """
    pauses = _pauses(facts, member)
    longest_s = max(pauses, default=0.0)
    short = len(pauses) >= PAUSES_MIN and longest_s < flat_s
    patience = SPINNING_PATIENCE if short and cores >= SPINNING_CPU else BUSY_PATIENCE
    return max(patience * flat_s, min(PATIENCE_S_MAX, PACE * longest_s))


def _pauses(facts: Facts, member: str) -> list[float]:
    """How long each pause of progress lasted in this life, the present one left out.

    While nothing was held there was nothing to do: that counts as no time.
    """
    life = facts.incarnation(member)
    since = float("-inf") if life is None else life.started_at
    known = facts.deployment.member(member)
    held: dict[float, float] = {}
    for name, _ in signs.QUEUES[known.role] if known else ():
        for look in facts.numbers(member, name, since=since, source=signs.LIVE):
            held[round(look.at, 1)] = max(look.value, held.get(round(look.at, 1), 0.0))
    pauses: list[float] = []
    pause_s, moved = 0.0, False
    for before, later in pairwise(facts.numbers(member, v.PROGRESS_TOKENS_TOTAL, since=since)):
        if later.at - before.at > BLIND_S:
            pause_s, moved = 0.0, False
            continue
        pause_s += later.at - before.at
        if later.value != before.value:
            pauses += [pause_s] if moved else []
            pause_s, moved = 0.0, True
        elif not held.get(round(later.at, 1), 1.0):
            pause_s = 0.0
    return pauses


def _flat(facts: Facts, member: str, flat_s: float) -> Reading | None:
    done = signs.completed(facts, member, flat_s)
    extra = signs.beyond_health(facts, member, flat_s)
    if extra is None or extra.value > 0 or (done is not None and done.value > 0):
        return None
    return Reading(flat_s, (*(done.evidence if done else ()), *extra.evidence))


def _health(facts: Facts, members: tuple[str, ...], since: float) -> str:
    """How `/health` answered meanwhile, as the end of a sentence."""
    rows = [s for name in members for s in facts.rows(name, v.HEALTH_STATUS) if s.at >= since]
    good = sum(seen.value == 200 for seen in rows)
    if not good:
        return ""
    return f", while /health answered 200 in {good} of {len(rows)} looks"


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

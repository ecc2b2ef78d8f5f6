"""How a failure mode's test says what it found, and the few readings several modes share.

For: short test functions that read as sentences. Not for: weighing (the harness) or any one mode.
"""

from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from tandem import signs
from tandem.facts import Facts, Reading
from tandem.records import TestResult
from tandem.records import vocabulary as v
from tandem.records.diagnosis import Strength

LOOK_S = 10.0
"""How far back "now" reaches for a failure mode: five health checks, ten looks at the queues."""
SETTLE_S = 4.0
"""A decode needs this long after its start to announce itself to the prefill."""
DYING_S = 5.0
"""A hand-off in flight when its decode dies may have begun this long before the death was seen."""
BRING_UP_S = 120.0
"""A decode that first starts this soon after its prefill may be part of bringing the pair up."""
TOGETHER_S = 30.0
"""One that starts this soon surely is: nobody restarts it in between."""


def supports(
    test: str, strength: Strength, because: str, evidence: tuple[int, ...] = ()
) -> TestResult:
    """The test speaks for the mode."""
    return _result(test, "supports", strength, because, evidence)


def contradicts(
    test: str, strength: Strength, because: str, evidence: tuple[int, ...] = ()
) -> TestResult:
    """The test speaks against the mode."""
    return _result(test, "contradicts", strength, because, evidence)


def unknown(test: str, strength: Strength, because: str, collect: str | None = None) -> TestResult:
    """The test cannot say; `collect` is what would let it, `strength` what that would be worth."""
    return TestResult(
        test=test, answer="unknown", strength=strength, because=because, collect=collect
    )


def _result(
    test: str, answer: str, strength: Strength, because: str, evidence: tuple[int, ...]
) -> TestResult:
    return TestResult(
        test=test,
        answer="supports" if answer == "supports" else "contradicts",
        strength=strength,
        because=because,
        evidence=tuple(dict.fromkeys(evidence)),
    )


def clock(at: float) -> str:
    """A moment as people say it: `10:02:11` UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


class Alone(NamedTuple):
    """One long-lived prefill, and the decode's restarts against it, oldest first."""

    prefill: signs.Life
    restarts: tuple[signs.Life, ...]
    deaths: tuple[float, ...]
    """When the life before each restart was last seen; the restart itself when it never was."""
    certain: bool
    """Whether no restart could have gone unseen; False when nobody watched the bring-up."""


def decode_alone(facts: Facts, prefill: str, decode: str) -> Alone | None:
    """The decode's restarts during the prefill's present life; None when a life is not known.

    The first decode life after the prefill's start is the bring-up when it follows within
    `BRING_UP_S`; otherwise its predecessor is only out of sight.
    """
    before = signs.lives(facts, prefill)
    lives = signs.lives(facts, decode)
    if not before or not lives:
        return None
    present = before[-1]
    after = [life for life in lives if life.started_at > present.started_at]
    certain = True
    if after and after[0].started_at - present.started_at <= BRING_UP_S:
        together = after[0].started_at - present.started_at <= TOGETHER_S
        certain = together or _watched_before(facts, decode, after[0])
        after = after[1:]
    ended = {
        later.id: earlier.last_seen_at for earlier, later in pairwise(lives) if earlier.evidence
    }
    deaths = tuple(min(ended.get(life.id, life.started_at), life.started_at) for life in after)
    return Alone(present, tuple(after), deaths, certain)


def _watched_before(facts: Facts, member: str, life: signs.Life) -> bool:
    """Whether the member was looked at before this life of it began."""
    looks = facts.rows(member, v.ALIVE)
    return bool(looks) and looks[0].at < life.started_at


def forwards(facts: Facts, member: str) -> Reading | None:
    """Tokens an engine computed in the last `LOOK_S`, health checks' included; None if unseen.

    More than none means that its scheduler still runs forward steps and its ranks still agree.
    """
    return signs.grown(facts, member, v.PROGRESS_TOKENS_TOTAL, LOOK_S)


def healthy(facts: Facts, member: str) -> tuple[int, ...]:
    """The observations of `/health` answering 200 in the last `LOOK_S`."""
    rows = facts.rows(member, v.HEALTH_STATUS)
    return tuple(seen.id for seen in rows if seen.value == 200 and seen.at > facts.now - LOOK_S)


def held(facts: Facts, member: str, name: str) -> Reading | None:
    """The floor of a live queue over the last `LOOK_S`."""
    return signs.floor(facts, member, name, LOOK_S)

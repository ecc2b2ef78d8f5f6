"""Weighing: from the answers of a failure mode's tests to a score, a standing and a verdict.

For: the strengths, the scores, and the rules by which one mode may be named the cause.
Not for: asking the world anything (the tests are the modes'), nor for changes and hunches.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from tandem.facts import Facts
from tandem.ports import Mode
from tandem.records import Finding, ModeVerdict, TestResult
from tandem.records.diagnosis import ModeStanding, Overall

WEIGHTS = {
    # Log-odds. Decisive is a likelihood ratio of about 3000: no pile of lesser answers that one
    # incident yields outweighs it. Strong is 20 to 1, what one good discriminating observation is
    # worth. Moderate is 4.5 to 1: true of the mode and of some rivals. Weak is 2 to 1: worth
    # telling, never worth deciding by.
    "decisive": 8.0,
    "strong": 3.0,
    "moderate": 1.5,
    "weak": 0.7,
}
RULED_OUT_AT = -4.0
"""A mode this unlikely is ruled out without a decisive answer: a strong contradiction and another,
with nothing to set against them."""
SCORE_MIN = 4.0
"""Less than a strong and a moderate support, net, names no cause."""
MARGIN = 3.0
"""The cause must lead every rival still standing by one strong answer."""
SUPPORTS_MIN = 2
"""One observation, however good, may be an accident of collecting."""


class Weighed(NamedTuple):
    """Every mode's verdict, best first, and what stands over all of them."""

    verdict: Overall
    modes: tuple[ModeVerdict, ...]
    """Those not ruled out first, by score; the first is the cause when `verdict` names one."""


def weigh(modes: Sequence[Mode], facts: Facts, subject: str, finding: Finding | None) -> Weighed:
    """Ask every mode, compare them, and say what may be claimed.

    Without an actionable finding nothing is wrong that could have a cause: then only a decisive
    answer is heard, or, where a finding tells of slowness, a mode that calls for no repair.
    """
    asked = sorted((ask(mode, facts, subject) for mode in modes), key=_order)
    standing = [one for one in asked if one.standing == "possible"]
    leader = standing[0] if standing else None
    needs = {mode.slug: mode.needs for mode in modes}
    claim: ModeStanding = "possible"
    if leader is not None:
        claim = _claim(leader, standing[1:], needs.get(leader.mode, ()))
    verdict: Overall = "undetermined"
    if finding is None or not finding.actionable:
        slow = finding is not None and leader is not None and leader.scope == "nothing"
        if claim != "confirmed" and not (slow and claim == "best_supported"):
            claim, verdict = "possible", "none"
    if claim in ("confirmed", "best_supported"):
        verdict = claim
    if leader is not None:
        asked[asked.index(leader)] = msgspec.structs.replace(leader, standing=claim)
    return Weighed(verdict, tuple(asked))


def ask(mode: Mode, facts: Facts, subject: str) -> ModeVerdict:
    """Run every test of one mode and weigh the answers, before rivals are compared."""
    tests = tuple(_answer(test, facts, subject) for test in mode.tests)
    score = round(sum(signed(test) for test in tests), 2)
    against = [one for one in tests if one.answer == "contradicts"]
    supports = [one for one in tests if one.answer == "supports"]
    standing: ModeStanding = "possible"
    because = strongest(supports or against)
    if any(one.strength == "decisive" for one in against) or score <= RULED_OUT_AT:
        standing, because = "ruled_out", strongest(against)
    elif not supports and not against:
        standing = "untestable"
    return ModeVerdict(
        mode=mode.slug,
        incident_class=mode.incident_class,
        standing=standing,
        score=score,
        tests=tests,
        scope=_scope(mode, facts, subject),
        because=because.because if because else "nothing that was collected speaks of it",
    )


def signed(test: TestResult) -> float:
    """A test's answer as log-odds."""
    return {"supports": 1.0, "contradicts": -1.0, "unknown": 0.0}[test.answer] * WEIGHTS[
        test.strength
    ]


def strongest(tests: Sequence[TestResult]) -> TestResult | None:
    """The weightiest of some answers; the first of several equal ones."""
    return max(tests, key=lambda one: WEIGHTS[one.strength], default=None)


def _answer(test: Callable[[Facts, str], TestResult], facts: Facts, subject: str) -> TestResult:
    try:
        return test(facts, subject)
    # A test that crashes must not take the verdict of all others with it: it becomes an unknown.
    except Exception as error:  # noqa: BLE001
        name = getattr(test, "__name__", "test").replace("_", "-")
        return TestResult(
            test=name,
            answer="unknown",
            strength="weak",
            because=f"the test crashed ({type(error).__name__}: {error}); please report it",
        )


def _claim(
    leader: ModeVerdict, rivals: Sequence[ModeVerdict], needs: Sequence[str]
) -> ModeStanding:
    """What may be said of the leading mode over its rivals."""
    supported = {one.test for one in leader.tests if one.answer == "supports"}
    if not supported.issuperset(needs):
        return "possible"
    if _decisive(leader) and not _contradicted(leader) and not any(map(_decisive, rivals)):
        return "confirmed"
    independent = {one.evidence or (one.test,) for one in leader.tests if one.answer == "supports"}
    ahead = all(leader.score - rival.score >= MARGIN for rival in rivals)
    if leader.score >= SCORE_MIN and len(independent) >= SUPPORTS_MIN and ahead:
        return "best_supported"
    return "possible"


def _decisive(verdict: ModeVerdict) -> bool:
    return any(one.answer == "supports" and one.strength == "decisive" for one in verdict.tests)


def _contradicted(verdict: ModeVerdict) -> bool:
    return any(
        one.answer == "contradicts" and one.strength in ("strong", "decisive")
        for one in verdict.tests
    )


def _order(verdict: ModeVerdict) -> tuple[int, float, str]:
    rank = {"untestable": 1, "ruled_out": 2}.get(verdict.standing, 0)
    return rank, -verdict.score, verdict.mode


def _scope(mode: Mode, facts: Facts, subject: str) -> str:
    """The repair a mode calls for; an engine's is named with the role of a sick member."""
    member = facts.deployment.member(subject)
    if mode.scope == "engine" and member is not None:
        return f"engine:{member.role.value}"
    return mode.scope

"""The answers of one failure mode's tests, by name, over a scene or some facts."""

from scenes import CELL, Scene
from tandem.facts import Facts
from tandem.ports import Mode
from tandem.records import TestResult


def answers(mode: Mode, of: Scene | Facts, subject: str = CELL) -> dict[str, str]:
    """Each test's answer as `supports strong`, `contradicts decisive`, `unknown`."""
    return {name: _short(one) for name, one in results(mode, of, subject).items()}


def results(mode: Mode, of: Scene | Facts, subject: str = CELL) -> dict[str, TestResult]:
    """Each test's result, by name."""
    facts = of.facts() if isinstance(of, Scene) else of
    return {one.test: one for one in (test(facts, subject) for test in mode.tests)}


def _short(result: TestResult) -> str:
    return "unknown" if result.answer == "unknown" else f"{result.answer} {result.strength}"

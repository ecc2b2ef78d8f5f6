"""Answers that are not what they were: the cheapest sign of corrupted output.

For: `corruption-suspected`, told and never claimed for more than a suspicion: `tandem verify`
proves it or dismisses it. Not for: proof; a different greedy answer may be a near tie.

A path is asked one known prompt now and then. Its newest answers are compared with the first it
gave in the present lives of its ends, and with the other paths of the same engine versions.
"""

from collections import Counter

from tandem.detect.candidate import Candidate, client
from tandem.facts import Facts
from tandem.records import Observation, Path
from tandem.records import vocabulary as v

DIFFERENT_MIN = 2
"""One answer that differs is a near tie; a second, the next time, is worth a word."""
OTHERS_MIN = 2
"""So many other paths must agree before they are held against one."""
FRESH_S = 150.0
"""An answer older than two of its intervals speaks of the past."""


def corrupted(facts: Facts) -> list[Candidate]:
    """Every path whose answers to the known prompt are not what they were, or not the others'."""
    cells = facts.deployment.cells()
    answers = {cell.subject: _answers(facts, cell) for cell in cells}
    return [found for cell in cells if (found := _differs(facts, cell, answers))]


def _answers(facts: Facts, cell: Path) -> list[Observation]:
    """The newest answers of a path, when they are recent and there are enough, oldest first."""
    rows = facts.rows(cell.subject, v.PROBE_ANSWER)
    seen = [row for row in rows[-DIFFERENT_MIN:] if row.missing is None]
    fresh = len(seen) == DIFFERENT_MIN and facts.now - seen[-1].at <= FRESH_S
    return seen if fresh else []


def _differs(facts: Facts, cell: Path, answers: dict[str, list[Observation]]) -> Candidate | None:
    newest = answers[cell.subject]
    if not newest:
        return None
    expected = _before(facts, cell, newest) or _others(facts, cell, newest, answers)
    if expected is None:
        return None
    known, whose, cited = expected
    said = client(
        f"{cell.subject} answered a known prompt {len(newest)} times with token ids "
        f"{_words(newest[-1])}",
        tuple(row.id for row in newest),
    )
    before = client(f"{whose} answered it with {known}", cited)
    return Candidate(
        kind="corruption-suspected",
        subject=cell.subject,
        members=(cell.prefill, cell.decode),
        onset_at=newest[0].at,
        summary=f"corruption is suspected on {cell.subject}: {said.statement}, and "
        f"{before.statement}; `tandem verify` proves it or dismisses it",
        witnesses=(said, before),
        actionable=False,
    )


def _before(
    facts: Facts, cell: Path, newest: list[Observation]
) -> tuple[str, str, tuple[int, ...]] | None:
    """What the path said first in the present lives, when each of its newest answers differs."""
    first = facts.latest(cell.subject, v.PROBE_ANSWER_FIRST)
    if first is None or any(row.value == first.value for row in newest):
        return None
    return _words(first), "before, in the same lives, it", (first.id,)


def _others(
    facts: Facts, cell: Path, newest: list[Observation], answers: dict[str, list[Observation]]
) -> tuple[str, str, tuple[int, ...]] | None:
    """What the other paths of the same engine versions agree on, when this one differs."""
    versions = _versions(facts, cell)
    rows = [
        answers[other.subject][-1]
        for other in facts.deployment.cells()
        if other != cell and answers[other.subject] and _versions(facts, other) == versions
    ]
    if not rows or versions is None:
        return None
    (value, count) = Counter(row.value for row in rows).most_common(1)[0]
    if count < max(OTHERS_MIN, len(rows) / 2 + 1) or any(row.value == value for row in newest):
        return None
    agreeing = [row for row in rows if row.value == value]
    whose = f"{count} other paths of the same engine versions"
    return _words(agreeing[0]), whose, tuple(row.id for row in agreeing)


def _versions(facts: Facts, cell: Path) -> tuple[str, str] | None:
    known = [facts.trait(name, v.T_ENGINE_VERSION) for name in (cell.prefill, cell.decode)]
    if any(trait is None for trait in known):
        return None
    prefill, decode = (str(trait.value) for trait in known if trait is not None)
    return prefill, decode


def _words(row: Observation) -> str:
    value = row.value
    return " ".join(value) if isinstance(value, tuple) else str(value)

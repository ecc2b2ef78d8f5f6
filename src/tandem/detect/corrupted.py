"""Answers that are not what they were: the cheapest sign of corrupted output.

For: `corruption-suspected`, told and never claimed for more than a suspicion: `tandem verify`
proves it or dismisses it. Not for: proof; a different greedy answer may be a near tie.

A path is asked one known prompt now and then, and tells its first answer in the present lives of
its ends and the last two. These are compared, and with the other paths of the same engine versions.
"""

from collections import Counter

from tandem.detect.candidate import Candidate, client
from tandem.facts import Facts
from tandem.records import Observation, Path
from tandem.records import vocabulary as v

OTHERS_MIN = 2
"""So many other paths must agree before they are held against one."""


def corrupted(facts: Facts) -> list[Candidate]:
    """Every path whose answers to the known prompt are not what they were, or not the others'.

    One answer that differs may be a near tie; the next must differ as well.
    """
    told = {
        path: row
        for path in facts.deployment.paths()
        if (row := facts.latest(path.subject, v.PROBE_ANSWERS)) is not None
        and isinstance(row.value, tuple)
    }
    return [found for path in told if (found := _differs(facts, path, told))]


def _differs(facts: Facts, path: Path, told: dict[Path, Observation]) -> Candidate | None:
    row = told[path]
    first, *newest = _answers(row)
    expected: tuple[str, str, tuple[int, ...]] | None
    if first not in newest:
        expected = first, "its first answer in the same lives was", (row.id,)
    else:
        expected = _others(facts, path, told)
        if expected is None or expected[0] in newest:
            return None
    known, whose, cited = expected
    said = client(
        f"{path.subject} answered a known prompt twice in a row with token ids "
        f"{' and '.join(dict.fromkeys(newest))}",
        (row.id,),
    )
    before = client(f"{whose} {known}", cited)
    return Candidate(
        kind="corruption-suspected",
        subject=path.subject,
        members=(path.prefill, path.decode),
        onset_at=row.at,
        summary=f"corruption is suspected on {path.subject}: {said.statement}, and "
        f"{before.statement}; `tandem verify` proves it or dismisses it",
        witnesses=(said, before),
        actionable=False,
    )


def _others(
    facts: Facts, path: Path, told: dict[Path, Observation]
) -> tuple[str, str, tuple[int, ...]] | None:
    """What most of the other paths of the same engine versions answer, and keep answering."""
    versions = _versions(facts, path)
    agreed = [
        (answers[-1], row.id)
        for other, row in told.items()
        if other != path
        and (answers := _answers(row))[-1] == answers[-2]
        and _versions(facts, other) == versions
    ]
    if versions is None or not agreed:
        return None
    (value, count) = Counter(answer for answer, _ in agreed).most_common(1)[0]
    if count < OTHERS_MIN or count <= len(agreed) / 2:
        return None
    cited = tuple(cite for answer, cite in agreed if answer == value)
    return value, f"{count} other paths of the same engine versions answer", cited


def _versions(facts: Facts, path: Path) -> tuple[str, str] | None:
    prefill = facts.trait(path.prefill, v.T_ENGINE_VERSION)
    decode = facts.trait(path.decode, v.T_ENGINE_VERSION)
    if prefill is None or decode is None:
        return None
    return str(prefill.value), str(decode.value)


def _answers(row: Observation) -> tuple[str, ...]:
    return row.value if isinstance(row.value, tuple) else ()

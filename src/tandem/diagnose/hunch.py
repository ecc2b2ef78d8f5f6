"""The operator's hunch, understood and answered by name.

For: matching what a tired person typed against modes, their aliases and the ledger, and saying
where that stands. Not for: moving any score: the hunch is read after everything is judged.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tandem.ports import Mode
from tandem.records import ChangeVerdict, HunchAnswer, ModeVerdict, TestResult

MATCH_MIN = 0.5
"""Share of words in common (Dice) below which a hunch is not understood."""
EMPTY_WORDS = frozenset(
    {"a", "an", "and", "be", "because", "by", "change", "changed", "for", "from", "i", "in", "is"}
    | {"it", "its", "maybe", "of", "on", "our", "perhaps", "problem", "suspect", "the", "think"}
    | {"this", "to", "was", "we", "with"}
)


class _Match(NamedTuple):
    likeness: float
    rank: int
    """Modes before changes, when they fit equally well."""
    name: str
    mode: ModeVerdict | None
    change: ChangeVerdict | None
    mechanism: str | None


def answer_hunch(
    asked: str,
    modes: Sequence[Mode],
    verdicts: Sequence[ModeVerdict],
    changes: Sequence[ChangeVerdict],
) -> HunchAnswer:
    """What the hunch was understood as, and where that stands."""
    best = _match(asked, modes, verdicts, changes)
    if best is None:
        known = ", ".join(sorted(mode.slug for mode in modes))
        return HunchAnswer(
            asked=asked,
            matched=None,
            answer="not_understood",
            because=f"it names no failure mode and no change in the ledger; known modes: {known}",
        )
    if best.mode is not None:
        return _of_mode(asked, best.name, best.mechanism, best.mode)
    return _of_change(asked, best.name, [one for one in changes if one.what == best.name])


def words(text: str) -> frozenset[str]:
    """The telling words of a name or a sentence, lower case, plural s dropped."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    bare = (word[:-1] if len(word) > 3 and word.endswith("s") else word for word in found)
    return frozenset(word for word in bare if word not in EMPTY_WORDS)


def _match(
    asked: str,
    modes: Sequence[Mode],
    verdicts: Sequence[ModeVerdict],
    changes: Sequence[ChangeVerdict],
) -> _Match | None:
    said = words(asked)
    standing = {one.mode: one for one in verdicts}
    found = [
        _Match(_likeness(said, name), 0, name, standing[mode.slug], None, mode.mechanisms.get(name))
        for mode in modes
        for name in (mode.slug, *mode.aliases)
    ]
    found += [_Match(_likeness(said, one.what), 1, one.what, None, one, None) for one in changes]
    best = min(found, key=lambda one: (-one.likeness, one.rank, one.name), default=None)
    return best if best is not None and best.likeness >= MATCH_MIN else None


def _likeness(said: frozenset[str], name: str) -> float:
    meant = words(name)
    return 2 * len(said & meant) / (len(said) + len(meant)) if said and meant else 0.0


def _of_mode(asked: str, name: str, mechanism: str | None, verdict: ModeVerdict) -> HunchAnswer:
    """A mode's standing as an answer; a mechanism that is off is ruled out even in a live mode."""
    alone = next((one for one in verdict.tests if one.test == mechanism), None)
    off = alone is not None and alone.answer == "contradicts"
    because, evidence = _reasons(verdict, alone if off else None)
    if off or verdict.standing == "ruled_out":
        return HunchAnswer(
            asked=asked, matched=name, answer="ruled_out", because=because, evidence=evidence
        )
    if verdict.standing == "confirmed":
        return HunchAnswer(
            asked=asked, matched=name, answer="confirmed", because=because, evidence=evidence
        )
    supported = verdict.standing == "best_supported"
    return HunchAnswer(
        asked=asked,
        matched=name,
        answer="supported" if supported else "open",
        because=because,
        evidence=evidence,
    )


def _reasons(verdict: ModeVerdict, alone: TestResult | None) -> tuple[str, tuple[int, ...]]:
    """Why, in one sentence: what speaks of the mechanism alone, and what rules the mode out."""
    chosen = [] if alone is None else [alone]
    if alone is None or verdict.standing == "ruled_out":
        chosen += [one for one in verdict.tests if one.because == verdict.because][:1]
    because = "; and ".join(dict.fromkeys(one.because for one in chosen)) or verdict.because
    return because, tuple(dict.fromkeys(cite for one in chosen for cite in one.evidence))


def _of_change(asked: str, name: str, rows: Sequence[ChangeVerdict]) -> HunchAnswer:
    """A change's verdict as an answer; of several rows the gravest counts."""
    gravity = {"implicated": 0, "open": 1, "exonerated": 2}
    row = min(rows, key=lambda one: (gravity[one.verdict], one.at))
    if row.verdict == "open":
        return HunchAnswer(
            asked=asked, matched=name, answer="open", because=row.because, evidence=row.evidence
        )
    return HunchAnswer(
        asked=asked,
        matched=name,
        answer="supported" if row.verdict == "implicated" else "ruled_out",
        because=row.because,
        evidence=row.evidence,
    )

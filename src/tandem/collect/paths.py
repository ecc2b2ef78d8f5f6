"""What a probe asks of its path before it sends anything, and what a cell of several paths says.

For: `probe.py`. Not for: sending, or judging what an answer means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.facts import Facts
from tandem.records import Trait
from tandem.records import vocabulary as v

Lives = tuple[str | None, ...]
"""The incarnations of the members of a path, None where one is not known."""
Safety = Callable[[str], Trait | None]
"""The newest trait `T_ACTIVE_PROBE_SAFE` of a member, None before its adapter told."""
Released = Callable[[Sequence[str], float], bool]
"""Whether every hand-off queue of these members was seen empty after a time."""
Tokens = Callable[[str], int | None]
"""A number of tokens that a member's server information tells; None when it does not."""


Left = Callable[[str, Sequence[str]], "Held | None"]
"""What a Tandem before this one left open on a path, by its subject and its members."""


@dataclass(slots=True)
class Held:
    """A late probe that ended without an answer: its room may still be held."""

    at: float
    lives: Lives
    said: str


def left_open(known: Facts, subject: str, ends: Sequence[str]) -> Held | None:
    """The probe that was overdue when the store was last written, as a path's next prober holds it.

    Closing hung up on it; whether its room was let go nobody has seen.
    """
    seen = known.latest(subject, v.PROBE)
    if seen is None or seen.value not in ("late", "stuck"):
        return None
    lives = [known.incarnation(name) for name in ends]
    said = "an earlier watch left it open, and its room was not seen released"
    return Held(seen.at, tuple(one.id if one else None for one in lives), said)


@dataclass(slots=True)
class CellWord:
    """What is said of a cell whose data-parallel ranks are probed one pair at a time."""

    subject: str
    words: dict[str, str] = field(default_factory=dict)

    def told(self, path: str, word: str) -> str:
        """The cell's word once one of its paths said one: an overdue path outweighs the rest."""
        self.words[path] = word
        return next((one for one in ("stuck", "late") if one in self.words.values()), word)


@dataclass(frozen=True, slots=True)
class Knows:
    """What a probe asks about the members of its path before it sends anything."""

    safety: Safety
    recently_completed: Callable[[str], bool] = lambda _: False
    released: Released = lambda _members, _since: False
    page_tokens: Tokens = lambda _: None
    context_tokens: Tokens = lambda _: None
    left: Left = lambda _subject, _ends: None
    tokens_per_s: Callable[[str], float] = lambda _: 0.0

"""What a probe asks of its path before it sends anything, and what a cell of several paths says.

For: `probe.py`. Not for: sending, or judging what an answer means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.records import Trait

Safety = Callable[[str], Trait | None]
"""The newest trait `T_ACTIVE_PROBE_SAFE` of a member, None before its adapter told."""
Released = Callable[[Sequence[str], float], bool]
"""Whether every hand-off queue of these members was seen empty after a time."""
Tokens = Callable[[str], int | None]
"""A number of tokens that a member's server information tells; None when it does not."""


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
    tokens_per_s: Callable[[str], float] = lambda _: 0.0

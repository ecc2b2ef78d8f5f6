"""Which sequence of the model is held by whom, and whose KV can be used again.

For: sequence numbers and cells over one model: holders, the prefixes kept after a prompt was handed
off (least recently used goes first), and the promise that what was admitted will fit. Not for: when
something is admitted (`prefill.py`, `decode.py`).
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_engine.model import Model

PREFIX_TOKENS_MIN = 16
"""A shorter common prefix is not worth a sequence of its own."""


@dataclass(frozen=True, slots=True)
class Held:
    """One sequence in use."""

    sequence: int
    reused: int
    """Tokens that were there already."""


class Sequences:
    """The sequences of one model. For the model's thread, while the model is idle."""

    def __init__(
        self, model: Model, *, keep: int, poisoned: Callable[[], bool] = lambda: False
    ) -> None:
        """`keep` bounds the finished prefixes kept for reuse; 0 keeps none.

        `poisoned` is a fault: what is found is read from another place.
        """
        self._poisoned = poisoned
        self._model = model
        self._keep = min(keep, model.sequences_max - 1)
        # The lowest first: what runs together stays side by side, which `step` is fastest over.
        self._free = list(range(model.sequences_max))
        self._kept: OrderedDict[int, list[int]] = OrderedDict()
        self._promised: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Sequences in use, kept prefixes not counted."""
        return len(self._promised)

    @property
    def kept(self) -> int:
        """Prefixes kept for reuse."""
        return len(self._kept)

    @property
    def cells_in_use(self) -> int:
        """Cells that hold tokens of sequences in use, kept prefixes not counted; any thread."""
        held = sum(self._model.length(sequence) for sequence in list(self._promised))
        return min(self._model.cells_used(), held)  # a shared cell is one cell

    @property
    def cells_held(self) -> int:
        """Cells in use or promised, kept prefixes included."""
        return self._model.cells_used() + self._outstanding()

    def free_for(self, tokens: int) -> bool:
        """Whether this many tokens would fit if every kept prefix were dropped."""
        promised = sum(self._promised.values())
        return (bool(self._free) or bool(self._kept)) and promised + tokens <= self._model.cells

    def acquire(self, prompt: Sequence[int], tokens: int, reuse_max: int = 0) -> Held | None:
        """A sequence promised `tokens` cells in all, beginning with what is known of `prompt`.

        At most `reuse_max` tokens are reused. None when it does not fit now.
        """
        if not self.free_for(tokens):
            return None
        source, common = self._longest(prompt, reuse_max)
        if source >= 0 and self._poisoned():
            source, common = self._another(source, common)
        if source >= 0 and common == len(self._kept[source]):
            # The next turn of the same conversation: nothing of the old one is lost by taking it.
            del self._kept[source]
            held = Held(source, common)
        else:
            if source >= 0:
                self._kept.move_to_end(source)
            if not self._free:
                self._evict(sparing=source if len(self._kept) > 1 else -1)
            if source not in self._kept:
                source, common = -1, 0
            held = Held(heapq.heappop(self._free), common)
            if common:
                self._model.copy_prefix(source, held.sequence, common)
        self._promised[held.sequence] = tokens
        while self.cells_held > self._model.cells and self._kept:
            self._evict()
        return held

    def promise(self, sequence: int, tokens: int) -> bool:
        """Promise a held sequence at least `tokens` cells in all; False when they are not there."""
        if self._promised[sequence] >= tokens:
            return True
        others = sum(self._promised.values()) - self._promised[sequence]
        if others + tokens > self._model.cells:
            return False
        self._promised[sequence] = tokens
        while self.cells_held > self._model.cells and self._kept:
            self._evict()
        return True

    def release(self, sequence: int, keep: Sequence[int] = ()) -> None:
        """Give a sequence back; `keep` are its tokens, when its KV may be used again."""
        del self._promised[sequence]
        if self._keep and len(keep) >= PREFIX_TOKENS_MIN:
            tokens = list(keep)
            for other, known in list(self._kept.items()):
                if known == tokens[: len(known)]:
                    self._drop(other)
            self._kept[sequence] = tokens
            while len(self._kept) > self._keep:
                self._evict()
            return
        self._model.drop(sequence)
        heapq.heappush(self._free, sequence)

    def flush(self) -> int:
        """Drop every kept prefix; how many there were."""
        count = len(self._kept)
        while self._kept:
            self._evict()
        return count

    def _outstanding(self) -> int:
        return sum(
            max(0, tokens - self._model.length(sequence))
            for sequence, tokens in self._promised.items()
        )

    def _longest(self, prompt: Sequence[int], reuse_max: int) -> tuple[int, int]:
        best, longest = -1, PREFIX_TOKENS_MIN - 1
        for sequence, tokens in self._kept.items():
            limit = min(len(tokens), len(prompt), reuse_max)
            if limit <= longest:
                continue
            common = _common(tokens, prompt, limit)
            if common > longest:
                best, longest = sequence, common
        return (best, longest) if best >= 0 else (-1, 0)

    def _another(self, source: int, common: int) -> tuple[int, int]:
        """A kept prefix that is not the one that was found, if there is one."""
        known = self._kept[source]
        for other, tokens in reversed(self._kept.items()):
            length = min(common, len(tokens))
            if tokens[:length] != known[:length]:
                return other, length
        return source, common

    def _evict(self, sparing: int = -1) -> None:
        self._drop(next(s for s in self._kept if s != sparing))

    def _drop(self, sequence: int) -> None:
        del self._kept[sequence]
        self._model.drop(sequence)
        heapq.heappush(self._free, sequence)


def _common(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    for at in range(limit):
        if left[at] != right[at]:
            return at
    return limit

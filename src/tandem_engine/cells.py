"""Who holds which KV cell: sequences that may share a prefix, over one bounded pool.

For: the toy's storage (the cells are rows of real bytes) and llama.cpp's accounting (it has no
call that counts used cells, so the same rules are kept beside it).
Not for: policy; what to keep or evict is decided by the phases.
"""

from tandem_engine.model import KvExhaustedError, ModelError


class Cells:
    """A pool of `total` cells; each sequence holds an ordered list of them, one per token."""

    def __init__(self, total: int, sequences_max: int) -> None:
        """All cells free, all sequences empty."""
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._held: list[list[int]] = [[] for _ in range(sequences_max)]

    @property
    def used(self) -> int:
        """Cells held by at least one sequence."""
        return self.total - len(self._free)

    def of(self, sequence: int) -> list[int]:
        """The cells of a sequence, in token order; raises `ModelError` for an unknown one."""
        if not 0 <= sequence < len(self._held):
            raise ModelError(f"sequence {sequence} is outside 0..{len(self._held) - 1}")
        return self._held[sequence]

    def check(self, count: int) -> None:
        """Raise `KvExhaustedError` unless `count` cells are free."""
        if count > len(self._free):
            raise KvExhaustedError(
                f"{count} KV cells are needed and {len(self._free)} of {self.total} are free; "
                "drop a sequence first"
            )

    def take(self, sequence: int, count: int) -> list[int]:
        """Append `count` free cells to a sequence; the cells taken."""
        held = self.of(sequence)
        self.check(count)
        taken = [self._free.pop() for _ in range(count)]
        for cell in taken:
            self._holders[cell] = 1
        held.extend(taken)
        return taken

    def share(self, source: int, target: int, length: int) -> None:
        """Make an empty `target` hold the first `length` cells of `source` too."""
        cells = self.of(source)
        if self.of(target):
            raise ModelError(f"sequence {target} is not empty; drop it before copying into it")
        if not 0 <= length <= len(cells):
            raise ModelError(
                f"sequence {source} holds {len(cells)} tokens, not the {length} to be shared"
            )
        for cell in cells[:length]:
            self._holders[cell] += 1
        self._held[target] = cells[:length]

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first `length` cells of a sequence and free what nobody else holds."""
        held = self.of(sequence)
        if not 0 <= length <= len(held):
            raise ModelError(
                f"sequence {sequence} holds {len(held)} tokens and cannot be cut to {length}"
            )
        for cell in held[length:]:
            self._holders[cell] -= 1
            if self._holders[cell] == 0:
                self._free.append(cell)
        del held[length:]

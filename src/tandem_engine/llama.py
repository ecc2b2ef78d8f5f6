"""A real GGUF model behind the `Model` protocol, on llama.cpp with one thread.

For: drills, the demo and every measured number; `toy.py` is the other model.
Not for: the C calls themselves (`weights.py`, `context.py`).

Facts of the library that the code leans on, all measured at the pinned build on AVX2: with one
stream per sequence, logits are equal to the bit whatever the neighbours do, and change only with
the chunk boundaries of a prefill (by up to 2.4, a greedy token's gap by up to 0.22); two threads
that share cores collapse on barriers, so a worker uses one; no call counts used cells, so they are
counted here, and a shared prefix is a copy that counts once (1 ms per 1000 tokens of SmolLM2).
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tandem_engine.cells import Cells
from tandem_engine.context import STREAMS_MAX, Context, ContextSizes
from tandem_engine.library import open_library
from tandem_engine.model import (
    Feed,
    Identity,
    KvMismatchError,
    Logits,
    ModelError,
    SetupError,
    check_feeds,
)
from tandem_engine.structs import KV_DTYPE, PACKAGE, VERSION
from tandem_engine.weights import Weights

STEP_TOKENS_MAX = 256
"""A longer step would run for seconds without a counter moving (256 tokens: about 1.7 s)."""


class LlamaModel:
    """A GGUF model with KV for several sequences; see `Model` for every call's contract."""

    def __init__(
        self,
        path: Path | str,
        *,
        context_length: int = 1024,
        sequences_max: int = 8,
        cells: int = 8192,
        threads: int = 1,
    ) -> None:
        """Load the file and allocate KV; sizes in tokens; raises `SetupError`.

        Memory is `context_length * sequences_max` tokens of KV (22.5 KiB each for SmolLM2);
        `cells` bounds what all sequences together may use of it.
        """
        path = Path(path)
        library = open_library()
        self._weights = Weights(library, path)
        if context_length > self._weights.context_length:
            length = self._weights.context_length
            self._weights.close()
            raise SetupError(
                f"{path.name} was trained for {length} tokens, not {context_length}; "
                "ask for a shorter context length"
            )
        self._context = Context(
            library,
            self._weights,
            ContextSizes(
                context_length=context_length,
                sequences_max=sequences_max,
                batch_tokens=STEP_TOKENS_MAX,
                threads=threads,
            ),
        )
        self._cells = Cells(cells, sequences_max)
        self._scratch = np.zeros(0, dtype=np.uint8)
        stat = path.stat()
        self.identity = Identity(
            name=path.stem,
            model_hash=_file_hash(path, stat.st_size, stat.st_mtime_ns),
            library_build=f"{PACKAGE}-{VERSION}",
            kv_dtype=KV_DTYPE,
            page_size=1,
        )
        self.vocabulary = self._weights.vocabulary
        self.context_length = context_length
        self.sequences_max = sequences_max
        self.cells = cells
        self.step_tokens_max = STEP_TOKENS_MAX
        self.end_ids = self._weights.end_ids
        self.chat_template = self._weights.chat_template
        self.kv_bytes_max = self._measure_kv()

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; safe beside a running step."""
        return self._weights.tokenize(text, special=special)

    def piece(self, token: int) -> bytes:
        """The bytes of one token; safe beside a running step."""
        return self._weights.piece(token)

    def step(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Run one batch; see `Model.step`. Logits are copied out only where asked for."""
        check_feeds(self, feeds)
        if not feeds:
            return []
        # With a stream per sequence llama.cpp computes together only what comes in rising order of
        # neighbouring sequences, and the rest one after the other (`split_equal`, sequential).
        order = sorted(range(len(feeds)), key=lambda at: feeds[at].sequence)
        rising = [feeds[at] for at in order]
        counts = [len(feed.tokens) for feed in rising]
        self._cells.check(sum(counts))
        wanted = np.zeros(sum(counts), dtype=np.int8)
        ends = np.cumsum(counts)
        for feed, count, end in zip(rising, counts, ends, strict=True):
            if feed.logits != "none":
                wanted[end - (count if feed.logits == "all" else 1) : end] = 1
        self._context.decode(
            tokens=np.concatenate([np.asarray(feed.tokens, dtype=np.int32) for feed in rising]),
            positions=np.concatenate(
                [
                    np.arange(feed.position, feed.position + count, dtype=np.int32)
                    for feed, count in zip(rising, counts, strict=True)
                ]
            ),
            sequences=np.repeat(
                np.array([feed.sequence for feed in rising], dtype=np.int32), counts
            ),
            wanted=wanted,
        )
        found: dict[int, Logits] = {}
        for at, feed, count, end in zip(order, rising, counts, ends.tolist(), strict=True):
            self._cells.take(feed.sequence, count)
            found[at] = self._rows(range(end - count, end), wanted)
        return [found[at] for at in range(len(feeds))]

    def length(self, sequence: int) -> int:
        """Tokens held by a sequence."""
        return len(self._cells.of(sequence))

    def cells_used(self) -> int:
        """Cells in use; a shared prefix counts once."""
        return self._cells.used

    def kv_size(self, sequence: int) -> int:
        """Bytes of a sequence's KV: linear in tokens for full attention."""
        return self._context.state_size(sequence) if self.length(sequence) else 0

    def export_kv(self, sequence: int, into: memoryview) -> int:
        """Write a sequence's KV straight into `into` (2 to 4 ms per 1000 tokens of SmolLM2)."""
        size_bytes = self.kv_size(sequence)
        if into.nbytes < size_bytes:
            raise ModelError(
                f"the buffer holds {into.nbytes} bytes; sequence {sequence} needs {size_bytes}"
            )
        return self._context.get_state(sequence, into) if size_bytes else 0

    def import_kv(self, sequence: int, blob: memoryview) -> None:
        """Replace a sequence's KV; see `Model.import_kv`."""
        self.drop(sequence)
        if blob.nbytes == 0:
            return
        try:
            self._context.set_state(sequence, blob)
            count = self._context.last_position(sequence) + 1
            if count > self.context_length:
                raise KvMismatchError(
                    f"a KV blob of {count} tokens exceeds the context length {self.context_length}"
                )
            self._cells.take(sequence, count)
        except ModelError:
            self._context.remove(sequence, 0)
            raise

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make an empty `target` share the first `length` tokens of `source`."""
        self._cells.share(source, target, length)
        if length == 0:
            return
        size_bytes = self.kv_size(source)
        if self._scratch.size < size_bytes:
            self._scratch = np.zeros(size_bytes, dtype=np.uint8)
        blob = self._scratch[:size_bytes].data
        self._context.get_state(source, blob)
        self._context.set_state(target, blob)
        self._context.remove(target, length)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""
        if length < self.length(sequence):
            self._context.remove(sequence, length)
        self._cells.cut(sequence, length)

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        if self.length(sequence):
            self._context.remove(sequence, 0)
        self._cells.cut(sequence, 0)

    def close(self) -> None:
        """Free the context, then the weights."""
        self._context.close()
        self._weights.close()

    def _measure_kv(self) -> int:
        """Bytes of the longest sequence, by the slope of two real steps; warms the buffers up."""
        sizes = []
        for position in range(2):
            self.step([Feed(0, [0], position)])
            sizes.append(self.kv_size(0))
        self.drop(0)
        first, second = sizes
        # The other side may have more sequences, and its blobs a word more for each.
        slack_bytes = 4 * (STREAMS_MAX - self.sequences_max)
        return first + (second - first) * (self.context_length - 1) + slack_bytes

    def _rows(self, entries: range, wanted: np.ndarray[tuple[int], np.dtype[np.int8]]) -> Logits:
        picked = [entry for entry in entries if wanted[entry]]
        rows = np.empty((len(picked), self.vocabulary), dtype=np.float32)
        for row, entry in enumerate(picked):
            rows[row] = self._context.logits(entry)
        return rows


@functools.lru_cache(maxsize=8)
def _file_hash(path: Path, size_bytes: int, modified_ns: int) -> str:
    """16 hex digits of SHA-256 over the file; size and time are there as the cache's key."""
    del size_bytes, modified_ns
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]

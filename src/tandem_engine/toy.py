"""A deterministic hash model with real KV bytes: no download, thousands of steps a second.

Each token appends a 64-byte row that is a hash of all rows before it; logits are a function of all
rows, read back from the cells at every step. So KV that is wrong, cross-wired or overwritten
changes what comes next, and re-scoring by a clean prefill sees it, as with a real model.

For: property, leak and life-cycle tests, and machines without the llama.cpp wheel.
Not for: drills, the demo and measured numbers; these run a real model (`llama.py`).
"""

import re
import struct
import time
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tandem_engine.cells import Cells
from tandem_engine.model import (
    Feed,
    Identity,
    KvMismatchError,
    Logits,
    ModelError,
    check_feeds,
)

ROW_BYTES = 64
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(name) for name in SPECIALS) + ")")
_DIGEST_BYTES_USED = 8
_BIAS_PRINTABLE = 6.0
_BIAS_OTHER = -20.0


class ToyModel:
    """The hash model behind the `Model` protocol; a byte is a token, plus three control tokens."""

    def __init__(
        self,
        seed: int = 0,
        *,
        context_length: int = 1024,
        sequences_max: int = 8,
        cells: int = 8192,
        step_cost_s: float = 0.0,
    ) -> None:
        """Two toys agree on every token when their seeds are equal; sizes are in tokens."""
        self.identity = Identity(
            name="toy",
            model_hash=blake2b(f"toy:{seed}".encode(), digest_size=8).hexdigest(),
            library_build="toy-1",
            kv_dtype="u8",
            page_size=1,
        )
        self.vocabulary = VOCABULARY
        self.context_length = context_length
        self.sequences_max = sequences_max
        self.cells = cells
        self.step_tokens_max = 256
        self.kv_bytes_max = context_length * ROW_BYTES
        self.end_ids = frozenset({256, 258})
        self.chat_template = CHAT_TEMPLATE
        self._step_cost_s = step_cost_s
        self._key = self.identity.model_hash.encode()
        self._cells = Cells(cells, sequences_max)
        self._rows = np.zeros((cells, ROW_BYTES), dtype=np.uint8)
        table = np.random.default_rng(seed).standard_normal(
            (_DIGEST_BYTES_USED, 256, VOCABULARY), dtype=np.float32
        )
        # Mostly printable text that ends by itself now and then, so that a client sees real life.
        bias = np.full(VOCABULARY, _BIAS_OTHER, dtype=np.float32)
        bias[[10, *range(32, 127), 258]] = _BIAS_PRINTABLE
        table[0] += bias
        self._table = table
        self._table_rows = np.arange(_DIGEST_BYTES_USED)

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """One token per UTF-8 byte; `special` also parses the three control tokens."""
        parts = _SPECIAL_PATTERN.split(text) if special else [text]
        tokens: list[int] = []
        for part in parts:
            if special and part in SPECIALS:
                tokens.append(256 + SPECIALS.index(part))
            else:
                tokens.extend(part.encode())
        return tokens

    def piece(self, token: int) -> bytes:
        """The byte of a token; nothing for a control token."""
        if not 0 <= token < VOCABULARY:
            raise ModelError(f"token {token} is outside 0..{VOCABULARY - 1}")
        return bytes([token]) if token < 256 else b""

    def step(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Run one batch; see `Model.step`."""
        check_feeds(self, feeds)
        self._cells.check(sum(len(feed.tokens) for feed in feeds))
        if self._step_cost_s > 0:
            time.sleep(self._step_cost_s)
        return [self._append(feed) for feed in feeds]

    def length(self, sequence: int) -> int:
        """Tokens held by a sequence."""
        return len(self._cells.of(sequence))

    def cells_used(self) -> int:
        """Cells in use; a shared prefix counts once."""
        return self._cells.used

    def kv_size(self, sequence: int) -> int:
        """64 bytes per token."""
        return self.length(sequence) * ROW_BYTES

    def export_kv(self, sequence: int, into: memoryview) -> int:
        """Write the rows of a sequence into `into`; the bytes written."""
        size_bytes = self.kv_size(sequence)
        if into.nbytes < size_bytes:
            raise ModelError(
                f"the buffer holds {into.nbytes} bytes; sequence {sequence} needs {size_bytes}"
            )
        target = np.frombuffer(into, dtype=np.uint8, count=size_bytes)
        target[:] = self._rows[self._cells.of(sequence)].reshape(-1)
        return size_bytes

    def import_kv(self, sequence: int, blob: memoryview) -> None:
        """Replace the rows of a sequence; see `Model.import_kv`."""
        self.drop(sequence)
        count, rest = divmod(blob.nbytes, ROW_BYTES)
        if rest or count > self.context_length:
            raise KvMismatchError(
                f"a KV blob of {blob.nbytes} bytes is not whole rows of {ROW_BYTES} bytes "
                f"for at most {self.context_length} tokens"
            )
        taken = self._cells.take(sequence, count)
        self._rows[taken] = np.frombuffer(blob, dtype=np.uint8).reshape(count, ROW_BYTES)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make an empty `target` share the first `length` tokens of `source`."""
        self._cells.share(source, target, length)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""
        self._cells.cut(sequence, length)

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        self._cells.cut(sequence, 0)

    def close(self) -> None:
        """Free the rows."""
        self._rows = np.zeros((0, ROW_BYTES), dtype=np.uint8)

    def _append(self, feed: Feed) -> Logits:
        # The state is read back from the cells, never remembered: corrupted rows must count.
        rows = self._rows[self._cells.of(feed.sequence)].tobytes()
        context = blake2b(rows, key=self._key)
        cells = self._cells.take(feed.sequence, len(feed.tokens))
        appended = bytearray()
        digests: list[bytes] = []
        for position, token in enumerate(feed.tokens, start=feed.position):
            row = blake2b(context.digest() + struct.pack("<II", token, position)).digest()
            appended += row
            context.update(row)
            if feed.logits == "all":
                digests.append(context.digest())
        self._rows[cells] = np.frombuffer(appended, dtype=np.uint8).reshape(-1, ROW_BYTES)
        if feed.logits == "last":
            digests.append(context.digest())
        if not digests:
            return np.empty((0, VOCABULARY), dtype=np.float32)
        return np.stack([self._logits(digest) for digest in digests])

    def _logits(self, digest: bytes) -> Logits:
        picked = self._table[self._table_rows, list(digest[:_DIGEST_BYTES_USED])]
        logits: Logits = picked.sum(axis=0, dtype=np.float32)
        return logits

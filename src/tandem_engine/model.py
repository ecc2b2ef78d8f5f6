"""One protocol, two models: `llama` (a real GGUF model) and `toy` (a deterministic hash model).

For: what the phases (`prefill.py`, `decode.py`) may ask of a model.
Not for: scheduling, sampling policy or HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal on both sides of a hand-off: carried in every KV header."""

    name: str
    model_hash: str
    """16 hex digits over the model file (or the toy's seed)."""
    library_build: str
    kv_dtype: str
    page_size: int
    """Tokens per KV page (1 here: llama.cpp cells)."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to one sequence in one step.

    `logits` says for which of them logits are wanted: none, the last one, or all.
    """

    sequence: int
    tokens: Sequence[int]
    position: int
    """Position of the first token; must equal `length(sequence)`."""
    logits: Literal["none", "last", "all"] = "last"


class ModelError(Exception):
    """The model refused: full KV, a bad blob, a return code that is not success."""


class SetupError(ModelError):
    """The library or the model file is missing or unfit; the message says what to do next."""


class KvExhaustedError(ModelError):
    """No free KV cells for this step; nothing of the step was applied."""


class KvMismatchError(ModelError):
    """A KV blob does not fit this model; the message names the field that differs."""


class Model(Protocol):
    """A model with KV for several sequences.

    One thread at a time may call `step`, `export_kv`, `import_kv`, `copy_prefix`, `truncate`,
    `drop`; the text calls (`tokenize`, `piece`) may run on another thread beside them.
    """

    identity: Identity
    vocabulary: int
    context_length: int
    """Longest one sequence may get, tokens."""
    sequences_max: int
    cells: int
    """KV cells shared by all sequences, tokens."""
    step_tokens_max: int
    """Most tokens one `step` takes over all feeds."""
    kv_bytes_max: int
    """Most bytes `export_kv` writes: the KV of `context_length` tokens."""
    end_ids: frozenset[int]
    chat_template: str
    """A Jinja template (`messages`, `add_generation_prompt`, `tools`)."""

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; `special` parses control tokens such as `<|im_start|>`."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of one token (may be half a UTF-8 character; none for a control token)."""
        ...

    def step(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Run one batch; one array per feed: shape (0 | 1 | len(tokens), vocabulary).

        The arrays belong to the caller. Raises `KvExhaustedError` (nothing was applied) or
        `ModelError` (a feed that breaks a rule, nothing was applied; or the library failed).
        """
        ...

    def length(self, sequence: int) -> int:
        """Tokens held by a sequence."""
        ...

    def cells_used(self) -> int:
        """KV cells in use over all sequences (a shared prefix counts once)."""
        ...

    def kv_size(self, sequence: int) -> int:
        """Bytes `export_kv` will write for a sequence, without the hand-off header."""
        ...

    def export_kv(self, sequence: int, into: memoryview) -> int:
        """Write the KV of a sequence into a writable buffer; the bytes written."""
        ...

    def import_kv(self, sequence: int, blob: memoryview) -> None:
        """Replace the KV of a sequence; `blob` is exactly what `export_kv` wrote.

        Raises `KvMismatchError` or `KvExhaustedError`; the sequence is empty after either.
        """
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make an empty `target` share the first `length` tokens of `source`, at no cell's cost."""
        ...

    def truncate(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""
        ...

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        ...

    def close(self) -> None:
        """Free everything; the model is unusable afterwards."""
        ...


def check_feeds(model: Model, feeds: Sequence[Feed]) -> None:
    """Refuse a step that breaks a rule of the protocol, before anything of it is applied.

    Raises `ModelError` naming the sequence and the numbers that disagree.
    """
    total = sum(len(feed.tokens) for feed in feeds)
    if total > model.step_tokens_max:
        raise ModelError(
            f"a step of {total} tokens exceeds {model.step_tokens_max}; feed smaller chunks"
        )
    if len({feed.sequence for feed in feeds}) != len(feeds):
        raise ModelError("a sequence is fed twice in one step; merge its feeds")
    for feed in feeds:
        length = model.length(feed.sequence)
        if not feed.tokens:
            raise ModelError(f"sequence {feed.sequence} is fed no tokens; leave it out")
        if feed.position != length:
            raise ModelError(
                f"sequence {feed.sequence} is fed at position {feed.position} "
                f"but holds {length} tokens"
            )
        if length + len(feed.tokens) > model.context_length:
            raise ModelError(
                f"sequence {feed.sequence} would reach {length + len(feed.tokens)} tokens, "
                f"more than the context length {model.context_length}"
            )
        if not 0 <= min(feed.tokens) <= max(feed.tokens) < model.vocabulary:
            raise ModelError(
                f"sequence {feed.sequence} is fed a token outside 0..{model.vocabulary - 1}"
            )

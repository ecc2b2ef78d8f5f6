"""One llama.cpp context: a batch buffer, one decode call, and KV per sequence.

For: turning numpy arrays into the C calls, with every return code checked.
Not for: who holds how many tokens (`cells.py`), or the rules of the `Model` protocol (`llama.py`).
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tandem_engine.library import Library
from tandem_engine.model import KvExhaustedError, KvMismatchError, Logits, ModelError, SetupError
from tandem_engine.structs import Batch
from tandem_engine.weights import Weights

_NO_SLOT: Final = 1
"""`llama_decode`: could not find a KV slot for the batch; nothing of it was applied."""

STREAMS_MAX: Final = 256
"""llama.cpp's `LLAMA_MAX_SEQ`: the most sequences of one context."""


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """What a context is made for; tokens, except for the threads."""

    context_length: int
    """Most tokens of one sequence."""
    sequences_max: int
    batch_tokens: int
    """Most tokens, and most rows of logits, of one decode call."""
    threads: int


class Context:
    """A context over loaded weights. One thread at a time may call it."""

    def __init__(self, library: Library, weights: Weights, sizes: ContextSizes) -> None:
        """Allocate KV and batch buffers; raises `SetupError`."""
        self._library = library
        self._call = library.call
        self._vocabulary = weights.vocabulary
        params = self._call.llama_context_default_params()
        params.n_ctx = sizes.context_length * sizes.sequences_max
        params.n_batch = params.n_ubatch = sizes.batch_tokens
        params.n_outputs_max = params.n_outputs_max_per_seq = sizes.batch_tokens
        params.n_seq_max = sizes.sequences_max
        params.n_threads = params.n_threads_batch = sizes.threads
        # Each sequence in a stream of its own, where a token's cell is its position. In a unified
        # pool the attention tiles of a prefill shift with the neighbours, and so do the logits.
        params.kv_unified = False
        self._handle: int | None = self._call.llama_init_from_model(weights.handle, params)
        if not self._handle:
            raise SetupError(
                f"llama.cpp gave no context for {sizes.sequences_max} sequences of "
                f"{sizes.context_length} tokens{library.last_words()}; ask for less"
            )
        self._check_sizes(sizes)
        self._memory: int = self._call.llama_get_memory(self._handle)
        self._streams = sizes.sequences_max
        self._scratch = np.zeros(0, dtype=np.uint8)
        count = sizes.batch_tokens
        self._tokens = np.zeros(count, dtype=np.int32)
        self._positions = np.zeros(count, dtype=np.int32)
        self._sequences = np.zeros(count, dtype=np.int32)
        self._wanted = np.zeros(count, dtype=np.int8)
        self._ones = np.ones(count, dtype=np.int32)
        self._sequence_pointers = (
            self._sequences.ctypes.data + np.arange(count) * self._sequences.itemsize
        ).astype(np.uintp)

    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
        wanted: NDArray[np.int8],
    ) -> None:
        """Run one batch; raises `KvExhaustedError` (nothing applied) or `ModelError`."""
        count = tokens.size
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = sequences
        self._wanted[:count] = wanted
        batch = Batch(
            n_tokens=count,
            token=self._tokens.ctypes.data,
            embd=None,
            pos=self._positions.ctypes.data,
            n_seq_id=self._ones.ctypes.data,
            seq_id=self._sequence_pointers.ctypes.data,
            logits=self._wanted.ctypes.data,
        )
        code: int = self._call.llama_decode(self._handle, batch)
        if code == _NO_SLOT:
            raise KvExhaustedError(
                f"llama.cpp has no KV cells for a step of {count} tokens; drop a sequence first"
            )
        if code != 0:
            raise ModelError(
                f"llama_decode returned {code} for a step of {count} tokens"
                f"{self._library.last_words()}; restart this worker"
            )

    def logits(self, index: int) -> Logits:
        """A view of the logits of batch entry `index`, overwritten by the next decode."""
        address: int | None = self._call.llama_get_logits_ith(self._handle, index)
        if not address:
            raise ModelError(f"llama.cpp has no logits for entry {index} of the last batch")
        return np.ctypeslib.as_array(
            (ctypes.c_float * self._vocabulary).from_address(address),
        )

    def state_size(self, sequence: int) -> int:
        """Bytes of one sequence's KV."""
        size: int = self._call.llama_state_seq_get_size(self._handle, sequence)
        return size

    def get_state(self, sequence: int, into: memoryview) -> int:
        """Write one sequence's KV into a buffer; the bytes written; raises `ModelError`."""
        target = np.frombuffer(into, dtype=np.uint8)
        written: int = self._call.llama_state_seq_get_data(
            self._handle, target.ctypes.data, target.size, sequence
        )
        if written == 0:
            raise ModelError(
                f"llama.cpp did not export sequence {sequence} into {target.size} bytes"
                f"{self._library.last_words()}"
            )
        return written

    def set_state(self, sequence: int, blob: memoryview) -> None:
        """Replace one sequence's KV; raises `KvMismatchError` when the library refuses it."""
        source = self._restreamed(np.frombuffer(blob, dtype=np.uint8))
        read: int = self._call.llama_state_seq_set_data(
            self._handle, source.ctypes.data, source.size, sequence
        )
        if read != source.size:
            raise KvMismatchError(
                f"llama.cpp took {read} of a KV blob of {source.size} bytes"
                f"{self._library.last_words()}: it was made by another model or build"
            )

    def last_position(self, sequence: int) -> int:
        """The position of a sequence's last token; -1 when it is empty."""
        position: int = self._call.llama_memory_seq_pos_max(self._memory, sequence)
        return position

    def remove(self, sequence: int, start: int) -> None:
        """Forget a sequence's tokens from position `start` on; raises `ModelError`."""
        if not self._call.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise ModelError(
                f"llama.cpp cannot cut sequence {sequence} at {start}: this model's KV can only "
                "be dropped whole"
            )

    def close(self) -> None:
        """Free KV and buffers."""
        if self._handle:
            self._call.llama_free(self._handle)
            self._handle = None

    def _restreamed(self, blob: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The state of one sequence as a context with this number of streams writes it.

        Layout, as seen at the pinned build: magic, sequence, number of streams, then per stream a
        count of cells and the cells, all but one of them empty. The two sides of a hand-off need
        not have equal `sequences_max`. What does not look like this is left for the library to
        refuse. Costs one copy, into memory that is kept because fresh pages cost more than it.
        """
        if blob.size < 12:
            return blob
        there = int(blob[8:12].view(np.uint32)[0])
        if there == self._streams or not 0 < there <= STREAMS_MAX or blob.size < 4 * (3 + there):
            return blob
        filled = np.flatnonzero(blob[12 : 12 + 4 * there].view(np.uint32))
        if not filled.size:
            return blob
        before = int(filled[0])
        cells = blob[12 + 4 * before : blob.size - 4 * (there - 1 - before)]
        size_bytes = 12 + cells.size + 4 * (self._streams - 1)
        if self._scratch.size < size_bytes:
            self._scratch = np.zeros(size_bytes, dtype=np.uint8)
        restreamed = self._scratch[:size_bytes]
        restreamed[:8] = blob[:8]
        restreamed[8:12].view(np.uint32)[0] = self._streams
        restreamed[12 : 12 + cells.size] = cells
        restreamed[12 + cells.size :] = 0
        return restreamed

    def _check_sizes(self, sizes: ContextSizes) -> None:
        # The second half of the layout check: a field that moved comes back with another value.
        for name, at_least in (
            ("n_ctx_seq", sizes.context_length),
            ("n_batch", sizes.batch_tokens),
            ("n_seq_max", sizes.sequences_max),
        ):
            got: int = getattr(self._call, f"llama_{name}")(self._handle)
            if not at_least <= got < 2 * at_least + 256:
                self.close()
                raise SetupError(
                    f"llama.cpp made {name} {got} where {at_least} was asked; the struct layout "
                    "does not fit the pinned library"
                )

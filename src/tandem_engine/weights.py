"""A loaded model file: its weights, vocabulary and chat template.

For: loading a GGUF and the text calls, with every return code checked.
Not for: computing (`context.py`).
"""

import ctypes
from pathlib import Path

import numpy as np

from tandem_engine.library import Library
from tandem_engine.model import ModelError, SetupError


class Weights:
    """Weights and vocabulary; `tokenize` and `piece` may run beside a decode."""

    def __init__(self, library: Library, path: Path) -> None:
        """Load a GGUF file on the CPU; raises `SetupError`."""
        if not path.is_file():
            raise SetupError(
                f"there is no model file {path}; give the path of a GGUF file, or run: "
                "python -m tandem_engine fetch-model"
            )
        self._call = library.call
        params = self._call.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle: int | None = self._call.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise SetupError(
                f"{path} is not a model that llama.cpp can load{library.last_words()}; "
                "give another GGUF file"
            )
        self._vocab: int = self._call.llama_model_get_vocab(self.handle)
        self.vocabulary: int = self._call.llama_vocab_n_tokens(self._vocab)
        self.context_length: int = self._call.llama_model_n_ctx_train(self.handle)
        template: bytes | None = self._call.llama_model_chat_template(self.handle, None)
        self.chat_template = (template or b"").decode(errors="replace")
        self.end_ids = frozenset(
            token
            for token in range(self.vocabulary)
            if self._call.llama_vocab_is_eog(self._vocab, token)
        )
        adds_begin: bool = self._call.llama_vocab_get_add_bos(self._vocab)
        self._begin: int | None = self._call.llama_vocab_bos(self._vocab) if adds_begin else None

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids, after the begin token where the model wants one and `text` has none."""
        raw = text.encode()
        # A token is at least one byte, apart from a prefix space that some vocabularies add.
        tokens = np.empty(len(raw) + 8, dtype=np.int32)
        count: int = self._call.llama_tokenize(
            self._vocab, raw, len(raw), tokens.ctypes.data, tokens.size, 0, special
        )
        if count < 0:
            raise ModelError(f"llama_tokenize refused {len(raw)} bytes of text with {count}")
        ids: list[int] = tokens[:count].tolist()
        if self._begin is not None and ids[:1] != [self._begin]:
            ids.insert(0, self._begin)
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes of one token; none for a control token."""
        if not 0 <= token < self.vocabulary:
            raise ModelError(f"token {token} is outside 0..{self.vocabulary - 1}")
        buffer = ctypes.create_string_buffer(256)
        size: int = self._call.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, 0)
        if size < 0:
            raise ModelError(f"token {token} has a piece of {-size} bytes, more than {len(buffer)}")
        return buffer.raw[:size]

    def close(self) -> None:
        """Free the weights; close every context of them first."""
        if self.handle:
            self._call.llama_model_free(self.handle)
            self.handle = None

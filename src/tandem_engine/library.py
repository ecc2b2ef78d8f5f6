"""llama.cpp's C API by ctypes, as exported by the `xllamacpp` wheel's extension module.

The wheel promises a Python API and not these symbols, so everything here is checked: the exact
version, every symbol, the layout of the structs (by the defaults the library fills in and by what a
context says of itself), and every return code. The module is loaded without importing `xllamacpp`.
Struct layouts and calls follow llama.cpp's `include/llama.h` at build b11549.

For: the few calls that `llama.py` needs, typed; whatever ctypes cannot type stays in this file.
Not for: the rules of the `Model` protocol; that is `llama.py`.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np

from tandem_engine.model import ModelError, SetupError

PACKAGE: Final = "xllamacpp"
VERSION: Final = "2026.10.11549"
"""The one version whose struct layouts are known here; a bump needs `ModelParams` and
`ContextParams` compared with its `llama.h`."""

KV_DTYPE: Final = "f16"
_TYPE_F16: Final = 1
_LOG_LINES_KEPT: Final = 20
_LEVEL_WARN: Final = 3

_int32 = ctypes.c_int32
_uint32 = ctypes.c_uint32
_pointer = ctypes.c_void_p
_flag = ctypes.c_bool


class ModelParams(ctypes.Structure):
    """`llama_model_params` of b11549."""

    _fields_ = (
        ("devices", _pointer),
        ("tensor_buft_overrides", _pointer),
        ("n_gpu_layers", _int32),
        ("split_mode", _int32),
        ("load_mode", _int32),
        ("lazy_mode", _int32),
        ("main_gpu", _int32),
        ("tensor_split", _pointer),
        ("progress_callback", _pointer),
        ("progress_callback_user_data", _pointer),
        ("kv_overrides", _pointer),
        ("vocab_only", _flag),
        ("check_tensors", _flag),
        ("use_extra_bufts", _flag),
        ("no_host", _flag),
        ("no_alloc", _flag),
        ("load_mtp", _flag),
    )


class ContextParams(ctypes.Structure):
    """`llama_context_params` of b11549."""

    _fields_ = (
        ("n_ctx", _uint32),
        ("n_batch", _uint32),
        ("n_ubatch", _uint32),
        ("n_seq_max", _uint32),
        ("n_rs_seq", _uint32),
        ("n_outputs_max", _uint32),
        ("n_outputs_max_per_seq", _uint32),
        ("n_threads", _int32),
        ("n_threads_batch", _int32),
        ("ctx_type", _int32),
        ("rope_scaling_type", _int32),
        ("pooling_type", _int32),
        ("attention_type", _int32),
        ("flash_attn_type", _int32),
        ("rope_freq_base", ctypes.c_float),
        ("rope_freq_scale", ctypes.c_float),
        ("yarn_ext_factor", ctypes.c_float),
        ("yarn_attn_factor", ctypes.c_float),
        ("yarn_beta_fast", ctypes.c_float),
        ("yarn_beta_slow", ctypes.c_float),
        ("yarn_orig_ctx", _uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", _pointer),
        ("cb_eval_user_data", _pointer),
        ("type_k", _int32),
        ("type_v", _int32),
        ("moe_cache_size", ctypes.c_size_t),
        ("abort_callback", _pointer),
        ("abort_callback_data", _pointer),
        ("embeddings", _flag),
        ("offload_kqv", _flag),
        ("no_perf", _flag),
        ("op_offload", _flag),
        ("swa_full", _flag),
        ("kv_unified", _flag),
        ("samplers", _pointer),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", _pointer),
    )


class Batch(ctypes.Structure):
    """`llama_batch`; the arrays it points to are numpy's, owned by `Context`."""

    _fields_ = (
        ("n_tokens", _int32),
        ("token", _pointer),
        ("embd", _pointer),
        ("pos", _pointer),
        ("n_seq_id", _pointer),
        ("seq_id", _pointer),
        ("logits", _pointer),
    )


# What the default structs must hold. A field that moved shows here before it does harm.
_MODEL_DEFAULTS: Final = {
    "devices": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "kv_overrides": None,
    "vocab_only": False,
    "use_extra_bufts": True,
}
_CONTEXT_DEFAULTS: Final = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "pooling_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "type_k": _TYPE_F16,
    "type_v": _TYPE_F16,
    "abort_callback": None,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
    "ctx_other": None,
}

_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _pointer)

# What each function returns and takes.
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "llama_log_set": (None, [_LogCallback, _pointer]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (_pointer, [ctypes.c_char_p, ModelParams]),
    "llama_model_free": (None, [_pointer]),
    "llama_init_from_model": (_pointer, [_pointer, ContextParams]),
    "llama_free": (None, [_pointer]),
    "llama_n_ctx_seq": (_uint32, [_pointer]),
    "llama_n_batch": (_uint32, [_pointer]),
    "llama_n_seq_max": (_uint32, [_pointer]),
    "llama_model_get_vocab": (_pointer, [_pointer]),
    "llama_model_n_ctx_train": (_int32, [_pointer]),
    "llama_model_chat_template": (ctypes.c_char_p, [_pointer, ctypes.c_char_p]),
    "llama_vocab_n_tokens": (_int32, [_pointer]),
    "llama_vocab_bos": (_int32, [_pointer]),
    "llama_vocab_get_add_bos": (_flag, [_pointer]),
    "llama_vocab_is_eog": (_flag, [_pointer, _int32]),
    "llama_tokenize": (_int32, [_pointer, ctypes.c_char_p, _int32, _pointer, _int32, _flag, _flag]),
    "llama_token_to_piece": (_int32, [_pointer, _int32, _pointer, _int32, _int32, _flag]),
    "llama_decode": (_int32, [_pointer, Batch]),
    "llama_get_logits_ith": (_pointer, [_pointer, _int32]),
    "llama_get_memory": (_pointer, [_pointer]),
    "llama_memory_seq_rm": (_flag, [_pointer, _int32, _int32, _int32]),
    "llama_memory_seq_pos_max": (_int32, [_pointer, _int32]),
    "llama_state_seq_get_size": (ctypes.c_size_t, [_pointer, _int32]),
    "llama_state_seq_get_data": (ctypes.c_size_t, [_pointer, _pointer, ctypes.c_size_t, _int32]),
    "llama_state_seq_set_data": (ctypes.c_size_t, [_pointer, _pointer, ctypes.c_size_t, _int32]),
}


class Library:
    """The loaded library: every function of `_SIGNATURES` as `call.NAME`, and its last words."""

    def __init__(self, call: ctypes.CDLL) -> None:
        """Take a loaded module; `open_library` is the way to get one."""
        self.call = call
        self._log: deque[str] = deque(maxlen=_LOG_LINES_KEPT)
        # ctypes frees a callback that nobody holds, and the library would then jump into nowhere.
        self._callback = _LogCallback(self._keep)

    def silence(self) -> None:
        """Keep the library's warnings for error messages instead of letting it print its log."""
        self.call.llama_log_set(self._callback, None)

    def last_words(self) -> str:
        """The library's newest warning or error as the tail of a sentence, or nothing."""
        return f" (llama.cpp: {self._log[-1]})" if self._log else ""

    def _keep(self, level: int, text: bytes | None, _data: int | None) -> None:
        line = (text or b"").decode(errors="replace").strip()
        if level >= _LEVEL_WARN and line:
            self._log.append(line)


def locate_library() -> Path:
    """The extension module of the installed wheel; raises `SetupError` when it is not there."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SetupError(
            f"the package {PACKAGE} is not installed; run: pip install {PACKAGE}=={VERSION}"
        )
    path = Path(spec.origin).with_name(f"{PACKAGE}.abi3.so")
    if not path.is_file():
        raise SetupError(
            f"{path} does not exist: this platform's {PACKAGE} wheel has no llama.cpp library to "
            "call; use --model toy here"
        )
    return path


def check_version(version: str) -> None:
    """Refuse any version of the wheel but the pinned one; raises `SetupError`."""
    if version != VERSION:
        raise SetupError(
            f"{PACKAGE} {version} is installed and only {VERSION} is known to fit; "
            f"run: pip install {PACKAGE}=={VERSION}"
        )


def check_layout(model_params: ModelParams, context_params: ContextParams) -> None:
    """Compare the defaults that the library filled in; raises `SetupError` naming the field."""
    for params, defaults in (
        (model_params, _MODEL_DEFAULTS),
        (context_params, _CONTEXT_DEFAULTS),
    ):
        for field, expected in defaults.items():
            actual = getattr(params, field)
            if actual != expected:
                raise SetupError(
                    f"the layout of {PACKAGE}'s llama.cpp is not the known one: "
                    f"{type(params).__name__}.{field} is {actual!r}, not {expected!r}; "
                    f"run: pip install --force-reinstall {PACKAGE}=={VERSION}"
                )


def bind(call: ctypes.CDLL) -> None:
    """Declare every function that is used; raises `SetupError` naming a missing one."""
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(call, name)
        except AttributeError:
            raise SetupError(
                f"{PACKAGE} exports no {name}; run: "
                f"pip install --force-reinstall {PACKAGE}=={VERSION}"
            ) from None
        function.restype = result
        function.argtypes = arguments


@functools.cache
def open_library() -> Library:
    """Load and check the library, once per process; raises `SetupError`."""
    path = locate_library()
    check_version(importlib.metadata.version(PACKAGE))
    try:
        call = ctypes.CDLL(str(path))
    except OSError as error:
        raise SetupError(
            f"{path} cannot be loaded ({error}); use --model toy on this machine"
        ) from error
    bind(call)
    check_layout(call.llama_model_default_params(), call.llama_context_default_params())
    library = Library(call)
    library.silence()
    call.llama_backend_init()
    return library


class Weights:
    """A loaded model file: weights, vocabulary and chat template. Reading calls are thread-safe."""

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

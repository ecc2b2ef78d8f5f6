"""The layouts of llama.cpp's structs and the signatures of its functions, at build b11549.

Taken from llama.cpp's `include/llama.h`. Everything here is checked before it is relied on
(`library.check_layout`); a new pin begins with comparing this file.

For: the pinned version, and what ctypes must know of it.
Not for: loading or calling anything.
"""

import ctypes
from typing import Any, Final

PACKAGE: Final = "xllamacpp"
VERSION: Final = "2026.10.11549"
"""The one version whose layouts are known here."""

KV_DTYPE: Final = "f16"
_TYPE_F16: Final = 1

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
    """`llama_batch`; the arrays it points to are numpy's, owned by `context.Context`."""

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
MODEL_DEFAULTS: Final = {
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
CONTEXT_DEFAULTS: Final = {
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

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _pointer)

# What each function returns and takes.
SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "llama_log_set": (None, [LogCallback, _pointer]),
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

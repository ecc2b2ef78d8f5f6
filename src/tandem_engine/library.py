"""llama.cpp's C API by ctypes, as exported by the `xllamacpp` wheel's extension module.

The wheel promises a Python API and not these symbols, so everything here is checked: the exact
version, every symbol, and the layout of the structs, by the defaults that the library fills in. The
module is loaded without importing `xllamacpp`.

For: a loaded library, or one sentence that says why not.
Not for: what is called on it (`weights.py`, `context.py`).
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
from collections import deque
from pathlib import Path
from typing import Final

from tandem_engine.model import SetupError
from tandem_engine.structs import (
    CONTEXT_DEFAULTS,
    MODEL_DEFAULTS,
    PACKAGE,
    SIGNATURES,
    VERSION,
    ContextParams,
    LogCallback,
    ModelParams,
)

_LOG_LINES_KEPT: Final = 20
_LEVEL_WARN: Final = 3
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Numbers of glibc's `mallopt` (malloc.h)."""
ROW_BYTES_MAX: Final = 4 << 20
"""Rows of logits up to this size are kept: a vocabulary of a million."""


class Library:
    """The loaded library: every function of `SIGNATURES` as `call.NAME`, and its last words."""

    def __init__(self, call: ctypes.CDLL) -> None:
        """Take a loaded module; `open_library` is the way to get one."""
        self.call = call
        self._log: deque[str] = deque(maxlen=_LOG_LINES_KEPT)
        # ctypes frees a callback that nobody holds, and the library would then jump into nowhere.
        self._callback = LogCallback(self._keep)

    def silence(self) -> None:
        """Keep the library's warnings for error messages instead of letting it print its log."""
        self.call.llama_log_set(self._callback, None)

    def last_words(self) -> str:
        """What the library warned of last, as the tail of a sentence; said once."""
        if not self._log:
            return ""
        newest = self._log[-1]
        self._log.clear()
        return f" (llama.cpp: {newest})"

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
        (model_params, MODEL_DEFAULTS),
        (context_params, CONTEXT_DEFAULTS),
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
    for name, (result, arguments) in SIGNATURES.items():
        try:
            function = getattr(call, name)
        except AttributeError:
            raise SetupError(
                f"{PACKAGE} exports no {name}; run: "
                f"pip install --force-reinstall {PACKAGE}=={VERSION}"
            ) from None
        function.restype = result
        function.argtypes = arguments


def keep_freed_rows() -> None:
    """Have glibc hand a step's rows of logits out again: fresh pages for 16 cost 1 % of a step.

    A row of a vocabulary of 49,152 is above the size from which glibc maps and unmaps each one.
    Where there is no `mallopt` (not glibc) nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, ROW_BYTES_MAX)
        mallopt(_M_TRIM_THRESHOLD, 2 * ROW_BYTES_MAX)


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
    keep_freed_rows()
    library = Library(call)
    library.silence()
    call.llama_backend_init()
    return library

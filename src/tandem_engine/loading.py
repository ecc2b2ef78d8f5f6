"""Which model a name means: `toy`, `toy:SEED`, `smollm2` or a path to a GGUF file.

For: `worker.py`, and tests and benches that want a model without a worker.
Not for: what a model is asked (`model.py`).
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from tandem_engine.collective import Sizes
from tandem_engine.model import Model, SetupError
from tandem_engine.toy import ToyModel

_NO_MEMORY = (
    "this machine has no memory for a model with {} KV cells; give less --max-total-tokens, a "
    "shorter --context-length or fewer --max-running-requests"
)


def load_model(
    spec: str,
    *,
    context_length: int = 1024,
    sequences_max: int = 8,
    cells: int = 8192,
    step_cost_s: float = 0.0,
) -> Model:
    """Load the model that `spec` names.

    Sizes are in tokens. `step_cost_s` makes each step of the toy that slow; llama.cpp ignores it.
    Raises `SetupError` when the library or the file is missing or unfit.
    """
    kind, _, seed = spec.partition(":")
    if kind == "toy":
        if seed and not seed.isdecimal():
            raise SetupError(f"the toy's seed {seed!r} is not a number; write toy:7, for example")
        return ToyModel(
            int(seed or 0),
            context_length=context_length,
            sequences_max=sequences_max,
            cells=cells,
            step_cost_s=step_cost_s,
        )
    # Imported late: the toy must run where the llama.cpp wheel is not installed.
    from tandem_engine.fetch import locate_model  # noqa: PLC0415
    from tandem_engine.llama import LlamaModel  # noqa: PLC0415

    path = locate_model() if spec == "smollm2" else Path(spec)
    return LlamaModel(path, context_length=context_length, sequences_max=sequences_max, cells=cells)


async def load_aside(spec: str, sizes: Sizes) -> Model:
    """Load on a thread that nobody has to wait for: a worker may end meanwhile.

    Raises as `load_model` does.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Model] = loop.create_future()

    def settle(how: Callable[..., None], what: object) -> None:
        if not loaded.done():
            how(what)

    def load() -> None:
        try:
            what: object = load_model(
                spec,
                context_length=sizes.context_length,
                sequences_max=sizes.sequences_max,
                cells=sizes.cells,
            )
            how: Callable[..., None] = loaded.set_result
        except (MemoryError, OverflowError):
            what, how = SetupError(_NO_MEMORY.format(sizes.cells)), loaded.set_exception
        except BaseException as problem:  # noqa: BLE001 - raised where it is awaited
            what, how = problem, loaded.set_exception
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, how, what)

    threading.Thread(target=load, name="loading", daemon=True).start()
    return await loaded

"""Running a word's work to its end, or ending it cleanly when somebody asks.

For: the event loop, signals, and the deployment's parts around one piece of work.
Not for: what the work is.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.cli.screen import Screen
from tandem.errors import InterruptedByUser

if TYPE_CHECKING:
    from tandem.parts import Parts

T = TypeVar("T")

STILL_PUTTING_AWAY = "still putting away what this command began; once more leaves it as it is\n"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; SIGINT and SIGTERM cancel the work, so that every `finally` puts away.

    Raises InterruptedByUser then, even when the work took the cancelling for its normal end. The
    second signal is answered, since people press Ctrl-C twice; the third ends the putting away.
    """
    asked: list[signal.Signals] = []

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def stop(number: signal.Signals) -> None:
            asked.append(number)
            if len(asked) == 1:
                task.cancel()
            elif len(asked) == 2:
                sys.stderr.write(STILL_PUTTING_AWAY)
                sys.stderr.flush()
            else:
                raise KeyboardInterrupt

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        result = asyncio.run(guarded())
    except asyncio.CancelledError:
        if not asked:
            raise
        raise interrupted(asked[0]) from None
    except KeyboardInterrupt:
        if not asked:
            raise
        raise InterruptedByUser(
            "Ended in the middle of putting away: what this command began may still run.",
            next_step="See `tandem status`, and end it with `tandem down`.",
        ) from None
    if asked:
        raise interrupted(asked[0])
    return result


def interrupted(number: signal.Signals = signal.SIGINT) -> InterruptedByUser:
    """Say that a signal ended the word; the status is 128 and the signal's number."""
    how = "Interrupted" if number == signal.SIGINT else f"Ended by {number.name}"
    error = InterruptedByUser(
        f"{how}; what this command had begun is put away.",
        next_step="`tandem status` says how the deployment stands.",
    )
    error.exit_status = 128 + number
    return error


def with_parts(
    screen: Screen,
    config: Path | None,
    work: Callable[["Parts"], Awaitable[T]],
    *,
    said: str | None = None,
) -> T:
    """Open the configured deployment's parts around `work`, and close them whatever happens.

    `said` is shown while it runs. Raises ConfigError when there is no configuration or it is wrong.
    """
    from tandem.wiring import find_settings, open_parts

    settings = find_settings(config)

    async def go() -> T:
        async with open_parts(settings) as parts:
            return await work(parts)

    with screen.working(said) if said else contextlib.nullcontext():
        return run(go())

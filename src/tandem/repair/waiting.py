"""Waiting for a thing and never for ever: bounded polling, acts that end even when interrupted.

For: every wait of the repair. Not for: knowing what is waited for (`gates.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from tandem.ports import Clock, Progress, say

T = TypeVar("T")

POLL_S = 0.25
TELL_EVERY_S = 5.0
LOOK_TIMEOUT_S = 5.0
"""Most that one look at the world may take."""
MARGIN_S = 5.0
"""What an adapter may overrun the time it was given before we stop waiting for it."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a gate: whether it is passed, what was seen, and whether waiting is useless."""

    passed: bool
    detail: str
    final: bool = False


async def until(
    look: Callable[[float], Awaitable[Look]],
    *,
    timeout_s: float,
    clock: Clock,
    tell: Progress,
    waiting_for: str,
) -> Look:
    """Look again and again until passed, final, or `timeout_s` is over; gives the last look.

    `look` is given the seconds that are left. A look that raises is a look that saw nothing.
    """
    began = clock.now()
    told_at = began
    while True:
        left_s = timeout_s - (clock.now() - began)
        try:
            # Not `wait_for`: before 3.12 it can swallow a cancellation.
            async with asyncio.timeout(max(left_s, 0.1) + MARGIN_S):
                seen = await look(max(left_s, 0.1))
        # An adapter that breaks is a look that saw nothing; the bound still ends the wait.
        except Exception as problem:  # noqa: BLE001
            said = str(problem) or type(problem).__name__
            seen = Look(passed=False, detail=f"looking failed: {said}")
        waited_s = clock.now() - began
        if seen.passed or seen.final:
            return seen
        if waited_s + POLL_S > timeout_s:
            return Look(passed=False, detail=f"{seen.detail} (waited {waited_s:.0f} s)")
        if clock.now() - told_at >= TELL_EVERY_S:
            told_at = clock.now()
            await say(
                tell, f"Still waiting for {waiting_for} after {waited_s:.0f} s: {seen.detail}"
            )
        await clock.sleep(POLL_S)


async def to_its_end(act: Coroutine[None, None, T], bound_s: float) -> T:
    """Run an act to its end even when we are cancelled meanwhile; then the cancellation goes on.

    Half a stop or half a start is worse than a late Ctrl-C. Raises `TimeoutError` past `bound_s`.
    """
    task = asyncio.ensure_future(asyncio.wait_for(act, bound_s))
    interrupted = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            interrupted = True
    if interrupted:
        task.exception()  # looked at, so that asyncio does not complain; the interruption wins
        raise asyncio.CancelledError
    return task.result()

"""The ways a verification request may take: through a router, or directly when there is none.

For: one call that sends a request, bounded, and always ends in a `Completion`.
Not for: judging answers (`oracle.py`).
"""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.errors import RefusedError
from tandem.ports import Completion, Hands
from tandem.records import Member, Role

MARGIN_S = 5.0
"""What an adapter may overrun a request's timeout before we stop waiting for it."""


@dataclass(slots=True)
class Ways:
    """Routers, or else the cells of the matrix, used in turn."""

    hands: Hands
    routers: Iterator[Member] | None = field(init=False)
    cells: Iterator[tuple[Member, Member]] = field(init=False)

    def __post_init__(self) -> None:
        deployment = self.hands.deployment
        routers = deployment.of(Role.ROUTER)
        cells = [
            (prefill, decode)
            for prefill in deployment.of(Role.PREFILL)
            for decode in deployment.of(Role.DECODE)
        ]
        if not cells:
            raise RefusedError(
                f"{deployment.name} has no prefill and decode to verify.",
                next_step="Name both in `tandem.toml`.",
            )
        self.routers = itertools.cycle(routers) if routers else None
        self.cells = itertools.cycle(cells)

    async def send(
        self, prompt: str, *, output_tokens: int, timeout_s: float, chat: bool
    ) -> Completion:
        """Send one request and wait for its end, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                if self.routers is None:
                    prefill, decode = next(self.cells)
                    return await self.hands.engine(prefill).complete_direct(
                        prefill,
                        decode,
                        prompt=prompt,
                        output_tokens=output_tokens,
                        timeout_s=timeout_s,
                    )
                router = next(self.routers)
                return await self.hands.router(router).complete(
                    router,
                    prompt=prompt,
                    output_tokens=output_tokens,
                    timeout_s=timeout_s,
                    chat=chat,
                )
        except TimeoutError:
            return Completion(status="timed_out", detail="no end within its time")
        except RefusedError:
            raise
        # Whatever broke, this request did not complete: that is a record of the proof.
        except Exception as problem:  # noqa: BLE001
            said = f"{type(problem).__name__}: {problem}"
            return Completion(status="failed", detail=said)

    async def score(
        self, prompt: str, output_ids: tuple[int, ...], timeout_s: float
    ) -> tuple[list[float] | None, str]:
        """Gaps of the output under a clean prefill, or None and why not."""
        prefill, decode = next(self.cells)
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                gaps = await self.hands.engine(prefill).score(
                    prefill, decode, prompt=prompt, output_ids=output_ids, timeout_s=timeout_s
                )
        except TimeoutError:
            return None, "the re-scoring did not end within its time"
        # Not being able to score proves nothing either way: it is said, not raised.
        except Exception as problem:  # noqa: BLE001
            return None, f"{type(problem).__name__}: {problem}"
        return gaps, "" if gaps is not None else f"{prefill.engine} gives no scores"

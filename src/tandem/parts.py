"""What the loop works with, and the two things every part of it does: look, and say.

For: `Parts`, built by `wiring.open_parts`. Not for: the order of the stages (`loop.py`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.collect import Collector
from tandem.facts import Facts
from tandem.ports import Clock, Hands, Harvest, Mode
from tandem.records import Member, Settings
from tandem.store import Store

Tell = Callable[[str], None]
TakeStacks = Callable[[Sequence[Member]], Awaitable[Harvest]]

DETECT_WINDOW_S = 180.0
"""How far back detect looks: longer than any threshold, short enough to index every second."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop works with, built by `wiring.open_parts`."""

    settings: Settings
    store: Store
    hands: Hands
    clock: Clock
    collector: Collector
    modes: tuple[Mode, ...]
    take_stacks: TakeStacks


def say(parts: Parts, tell: Tell, kind: str, text: str, **data: str | float | None) -> None:
    """Tell a person and the store the same thing at once."""
    parts.store.event(kind, text, at=parts.clock.now(), data=dict(data))
    tell(text)


async def look(parts: Parts) -> Facts:
    """One turn of collect and store; the facts of the detect window."""
    parts.store.append(await parts.collector.tick())
    return parts.store.facts(now=parts.clock.now(), window_s=DETECT_WINDOW_S)


def look_back(parts: Parts) -> Facts:
    """The facts of the detect window without looking again."""
    return parts.store.facts(now=parts.clock.now(), window_s=DETECT_WINDOW_S)

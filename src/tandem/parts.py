"""What the loop works with, and the two things every part of it does: look, and say.

For: `Parts`, built by `wiring.open_parts`. Not for: the order of the stages (`loop.py`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.collect import PATIENCE_S
from tandem.errors import WorldError
from tandem.facts import Facts
from tandem.ports import Clock, Hands, Harvest, Mode
from tandem.records import Change, Finding, Member, Observation, Settings, Trait
from tandem.store import Store

Tell = Callable[[str], None]
TakeStacks = Callable[[Sequence[Member]], Awaitable[Harvest]]

PROBED_AFTER_S = 1.0
"""A path of which nothing was known is probed this soon after its engines were seen."""
DETECT_WINDOW_S = 180.0
"""How far back detect looks: longer than any threshold, short enough to index every second."""
STANDING = "standing"
"""The journal of what was brought up and taken down by hand."""


class Looks(Protocol):
    """Whoever looks at everything that is due: the collector, or one that counts beside it."""

    async def tick(self, patience_s: float = PATIENCE_S) -> Harvest:
        """One look; see `Collector.tick`."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a watch that came to its end."""

    number: int
    ended_at: float
    seconds: float
    looked: bool
    """Whether it looked and judged; False when it broke, and saw nothing."""
    findings: tuple[Finding, ...]
    """Those that stand after it."""


class Attendant(Protocol):
    """Who is told how a watch goes: a service manager, a page of metrics."""

    def turned(self, turn: Turn) -> None:
        """A turn has ended."""
        ...

    def ending(self) -> None:
        """The watch was told to stop; what it began may still be brought to its end."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop works with, built by `wiring.open_parts`."""

    settings: Settings
    store: Store
    hands: Hands
    clock: Clock
    collector: Looks
    modes: tuple[Mode, ...]
    take_stacks: TakeStacks


def say(parts: Parts, tell: Tell, kind: str, text: str, **data: str | float | None) -> None:
    """Tell a person and the store the same thing at once.

    A store that cannot take it (a full disk) keeps nobody from being told, and no step from its
    end: what has to be on the disk before anyone acts is the journal.
    """
    tell(text)
    try:
        parts.store.event(kind, text, at=parts.clock.now(), data=dict(data))
    except WorldError as error:
        tell(f"that was not recorded: {error.message}")


async def look(parts: Parts) -> Facts:
    """One turn of collect and store; the facts of the detect window."""
    parts.store.append(await parts.collector.tick())
    return parts.store.facts(now=parts.clock.now(), window_s=DETECT_WINDOW_S)


async def look_closely(parts: Parts) -> Harvest:
    """Everything there is to see now, waited for: what a person who looks once wants to know.

    Two turns: the first learns what the engines bear, path probes follow in the second.
    """
    patience_s = parts.settings.probe.deadline_s + 1.0
    found: dict[tuple[str, str, str, str], Observation] = {}
    traits: list[Trait] = []
    changes: list[Change] = []
    for turn in range(2):
        if turn:
            await parts.clock.sleep(PROBED_AFTER_S)
        seen = parts.store.append(await parts.collector.tick(patience_s))
        for one in seen.observations:
            found[one.subject, one.source, one.name, one.label] = one
        traits += seen.traits
        changes += seen.changes
    return Harvest(tuple(found.values()), tuple(traits), tuple(changes))


def look_back(parts: Parts) -> Facts:
    """The facts of the detect window without looking again."""
    return parts.store.facts(now=parts.clock.now(), window_s=DETECT_WINDOW_S)

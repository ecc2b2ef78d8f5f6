"""The first stage: ask every source that is due, and give what they saw as one harvest.

For: bounded, concurrent looking; a source that fails, hangs or breaks becomes an observation.
Not for: what is looked at (one file per source) or judging any of it.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tandem.collect.changes import Ledger
from tandem.collect.recent import Recent
from tandem.ports import Clock, Harvest, Source
from tandem.records import Observation
from tandem.records import vocabulary as v

PATIENCE_S = 0.6
"""How long one tick waits for its sources; a slower one is harvested by a later tick."""

CLOCK_JITTER_S = 1.0

CLOSE_S = 5.0
"""How long closing waits for what it cancelled."""


@runtime_checkable
class Closable(Protocol):
    """A source that holds something open between looks."""

    async def close(self) -> None:
        """Let go of it, bounded."""
        ...


@dataclass(slots=True)
class _Runner:
    """One source, when it is due next, and its look under way."""

    source: Source
    due_at: float = float("-inf")
    task: "asyncio.Task[Harvest] | None" = field(default=None)


class Collector:
    """Runs the sources, and shows every harvest to those that learn from it."""

    def __init__(
        self,
        sources: Sequence[Source],
        clock: Clock,
        ledger: Ledger | None = None,
        recent: Recent | None = None,
    ) -> None:
        """Nothing is asked before the first tick, and then everything is due.

        `ledger` adds the changes that the harvests show; `recent` is the one the probes ask.
        """
        self._runners = [_Runner(source) for source in sources]
        self._clock = clock
        self._ledger = ledger
        self._recent = recent

    async def tick(self, patience_s: float = PATIENCE_S) -> Harvest:
        """Start every due source that is not busy; gather whatever has ended within `patience_s`.

        A source still busy is not started twice: its look is gathered by a later tick, and ends by
        its own `timeout_s` in any case. Never raises for a source's sake.
        """
        now = self._clock.now()
        for runner in self._runners:
            if runner.task is None and _is_due(runner, now):
                runner.due_at = now + runner.source.interval_s
                runner.task = asyncio.create_task(self._look(runner.source))
        busy = [runner.task for runner in self._runners if runner.task is not None]
        if busy:
            await asyncio.wait(busy, timeout=patience_s)
        return self._gather()

    def _gather(self) -> Harvest:
        harvests = []
        for runner in self._runners:
            if runner.task is not None and runner.task.done():
                if not runner.task.cancelled():
                    harvests.append(runner.task.result())
                runner.task = None
        gathered = merged(harvests)
        if self._recent is not None:
            self._recent.read(gathered)
        if self._ledger is None:
            return gathered
        changes = self._ledger.read(gathered)
        return Harvest(gathered.observations, gathered.traits, gathered.changes + changes)

    async def _look(self, source: Source) -> Harvest:
        try:
            return await asyncio.wait_for(source.collect(), source.timeout_s)
        except TimeoutError:
            return self._failed(source, f"it did not end within {source.timeout_s:g} s")
        except Exception as error:  # noqa: BLE001
            # A broken source must not blind the others; that it broke is evidence.
            return self._failed(source, f"it broke: {type(error).__name__}: {error}")

    def _failed(self, source: Source, why: str) -> Harvest:
        seen = Observation(
            source="collect",
            subject="host",
            name=v.SOURCE_FAILED,
            label=source.name,
            at=self._clock.now(),
            missing=why,
        )
        return Harvest((seen,))

    async def close(self) -> None:
        """Cancel every look under way and close what the sources hold open; bounded."""
        busy = [runner.task for runner in self._runners if runner.task is not None]
        for task in busy:
            task.cancel()
        if busy:
            await asyncio.wait(busy, timeout=CLOSE_S)
        holders = [one.source for one in self._runners if isinstance(one.source, Closable)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*(one.close() for one in holders), return_exceptions=True), CLOSE_S
            )


def _is_due(runner: _Runner, now: float) -> bool:
    """A tenth of an interval early is due: ticks jitter, intervals must not double.

    So is what is due later than one interval from now: the clock went back.
    """
    left_s = runner.due_at - now
    return not runner.source.interval_s / 10 < left_s <= runner.source.interval_s + CLOCK_JITTER_S


def merged(harvests: Iterable[Harvest]) -> Harvest:
    """Several harvests as one, in order."""
    every = list(harvests)
    return Harvest(
        tuple(seen for one in every for seen in one.observations),
        tuple(trait for one in every for trait in one.traits),
        tuple(change for one in every for change in one.changes),
    )


__all__ = ["PATIENCE_S", "Closable", "Collector", "Ledger", "Recent", "merged"]

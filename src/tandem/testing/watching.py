"""A watch over a simulated fleet: the real collector, probes and detect, turn by turn.

For: what would be found, and when. Not for: what is done about it (`loop.watch` over `faces`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.collect import Collector, Ledger, Recent
from tandem.collect.incarnations import Incarnations
from tandem.detect import RECURS_S, detect
from tandem.loop import CLOCK_BACK_S
from tandem.parts import DETECT_WINDOW_S
from tandem.records import Finding, ProbeSettings, Thresholds
from tandem.testing.faces import sources
from tandem.testing.fleet import Fleet
from tandem.testing.memory import Memory
from tandem.testing.showing import Sight


@dataclass(frozen=True, slots=True)
class Told:
    """A finding that opened or closed, and the world time at which it did."""

    at: float
    finding: Finding

    @property
    def opened(self) -> bool:
        """Whether it is new, rather than over."""
        return self.finding.closed_at is None


class Watch:
    """One watcher of one fleet, in the fleet's virtual time."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        thresholds: Thresholds | None = None,
        probe: ProbeSettings | None = None,
        interval_s: float = 1.0,
        together: bool = True,
    ) -> None:
        """`together` looks at all members by one source: cheaper, and the same rows."""
        self.fleet = fleet
        self.sight = Sight(fleet)
        self.told: list[Told] = []
        self.open: tuple[Finding, ...] = ()
        self._past: tuple[Finding, ...] = ()
        self._looked_at = self._blind_until = float("-inf")
        self.turns = 0
        self.slow_disk_until = 0.0
        """Until then the store takes seconds now and then."""
        self._interval_s = interval_s
        self._thresholds = thresholds or Thresholds()
        clock = fleet.clock
        incarnations = Incarnations()
        recent = Recent(fleet.deployment, clock.now)
        found = sources(
            self.sight,
            incarnations,
            recent,
            probe or ProbeSettings(),
            interval_s=interval_s,
            together=together,
        )
        self._collector = Collector(found, clock, Ledger(), recent)
        self.memory = Memory(fleet.deployment, clock.now())

    @property
    def known(self) -> tuple[Finding, ...]:
        """The findings that are open, and those that closed lately and may come back."""
        return (*self.open, *self._past)

    async def turn(self) -> tuple[Told, ...]:
        """One turn of the loop: look, remember, detect; what opened or closed by it."""
        self.turns += 1
        self.memory.append(await self._collector.tick())
        clock = self.fleet.clock
        if clock.world < self.slow_disk_until:
            clock.block(self.fleet.chance.choice((0.0, 0.3, 1.0, 4.0)))
        now = clock.now()
        if now < self._looked_at - CLOCK_BACK_S:
            self.memory.forget_later(now)
            self._blind_until = now
        self._looked_at = now
        window_s = min(DETECT_WINDOW_S, now - self._blind_until)
        facts = self.memory.facts(now=now, window_s=window_s)
        findings = detect(facts, self.known, self._thresholds)
        if not findings and not self.open:
            return ()
        known = {one.id for one in self.open}
        told = tuple(
            Told(clock.world, one)
            for one in findings
            if one.closed_at is not None or one.id not in known
        )
        self.open = tuple(one for one in findings if one.closed_at is None)
        self._past = tuple(
            one
            for one in (*self._past, *findings)
            if one.closed_at is not None
            and facts.now - one.closed_at <= RECURS_S
            and one.id not in {again.id for again in self.open}
        )
        self.told += told
        return told

    async def watch(self, seconds: float, until: "Callable[[Told], bool] | None" = None) -> bool:
        """Turn by turn for so long, or until something is told; whether it was."""
        clock = self.fleet.clock
        ends_at = clock.world + seconds
        while clock.world < ends_at:
            began = clock.world
            told = await self.turn()
            if until is not None and any(until(one) for one in told):
                return True
            spent = clock.world - began
            await clock.sleep(max(0.05, self._interval_s - spent))
        return False

    async def close(self) -> None:
        """Let go of the probes."""
        await self._collector.close()


__all__ = ["Told", "Watch"]

"""The collector asks what is due, waits for nobody too long, and turns trouble into records."""

import asyncio

import pytest

from tandem.collect import Collector
from tandem.ports import Harvest
from tandem.records import Observation
from tandem.records import vocabulary as v


class Clock:
    """Time that moves when told."""

    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at

    async def sleep(self, seconds):
        self.at += seconds


class Looks:
    """A source that counts its looks; `gate` holds them back, `error` breaks them."""

    def __init__(self, name="s", interval_s=1.0, timeout_s=5.0, gate=None, error=None):
        self.name, self.interval_s, self.timeout_s = name, interval_s, timeout_s
        self.gate, self.error = gate, error
        self.looks = 0
        self.closed = False

    async def collect(self):
        self.looks += 1
        if self.error:
            raise self.error
        if self.gate:
            await self.gate.wait()
        return Harvest((Observation(source=self.name, subject="x", name="n", at=0.0),))

    async def close(self):
        self.closed = True


@pytest.fixture
def clock():
    return Clock()


def sources(harvest):
    return [seen.source for seen in harvest.observations]


class TestTick:
    """One turn of collecting."""

    async def test_every_source_is_due_at_first_and_then_by_its_interval(self, clock):
        """A source of 2 s is asked every second tick of 1 s."""
        often, seldom = Looks("often"), Looks("seldom", interval_s=2.0)
        collector = Collector([often, seldom], clock)
        for _ in range(4):
            await collector.tick()
            clock.at += 1.0

        assert (often.looks, seldom.looks) == (4, 2)

    async def test_a_jittering_tick_does_not_double_an_interval(self, clock):
        """A tick a little early still finds the source due."""
        source = Looks()
        collector = Collector([source], clock)
        await collector.tick()
        clock.at += 0.95
        await collector.tick()

        assert source.looks == 2

    async def test_a_slow_source_delays_no_other_and_is_not_started_twice(self, clock):
        """The others are harvested at once; the slow one is gathered by a later tick."""
        slow, quick = Looks("slow", gate=asyncio.Event()), Looks("quick")
        collector = Collector([slow, quick], clock)
        first = await collector.tick(patience_s=0.05)
        clock.at += 10.0
        second = await collector.tick(patience_s=0.05)
        slow.gate.set()
        third = await collector.tick(patience_s=5.0)

        assert (
            sources(first),
            sources(second),
            sources(third),
        ) == (["quick"], ["quick"], ["slow"])
        assert slow.looks == 1

    async def test_a_broken_source_is_an_observation(self, clock):
        """What it raised is written down, and the other sources are harvested."""
        collector = Collector([Looks("bad", error=KeyError("oops")), Looks("good")], clock)
        harvest = await collector.tick()

        bad, good = harvest.observations
        assert (bad.name, bad.label) == (v.SOURCE_FAILED, "bad")
        assert "KeyError" in bad.missing
        assert good.source == "good"

    async def test_a_source_that_hangs_ends_by_its_own_timeout(self, clock):
        """Its look is cancelled and written down, and it may be asked again."""
        stuck = Looks("stuck", timeout_s=0.05, gate=asyncio.Event())
        collector = Collector([stuck], clock)
        harvest = await collector.tick(patience_s=5.0)

        assert "did not end within 0.05 s" in harvest.observations[0].missing

    async def test_closing_cancels_and_closes(self, clock):
        """Nothing runs on after close, and sources that hold something let go."""
        slow = Looks("slow", gate=asyncio.Event())
        collector = Collector([slow], clock)
        await collector.tick(patience_s=0.0)
        await collector.close()

        assert slow.closed


async def test_a_clock_that_went_back_leaves_nobody_waiting():
    """What was due under the later time is looked at in the next tick."""
    clock, looks = Clock(), Looks(interval_s=5.0)
    collector = Collector([looks], clock)
    await collector.tick()
    clock.at -= 3600.0
    await collector.tick()
    clock.at += 1.0
    await collector.tick()
    await collector.close()

    assert looks.looks == 2

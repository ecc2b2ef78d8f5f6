"""Virtual time: asyncio as it is, and nothing waits."""

import asyncio

import pytest

from tandem.errors import Bug
from tandem.testing.virtual_time import BEGAN, VirtualClock, run


class TestRun:
    """Real asyncio code on a loop whose time jumps."""

    def test_sleepers_wake_in_the_order_of_time(self):
        """Of several sleepers each wakes at its own moment, whoever slept first."""
        clock, woke = VirtualClock(), []

        async def sleeper(seconds):
            await clock.sleep(seconds)
            woke.append((seconds, clock.now() - BEGAN))

        async def main():
            await asyncio.gather(*(sleeper(one) for one in (30.0, 3600.0, 10.0)))

        run(main(), clock)

        assert woke == [(10.0, 10.0), (30.0, 30.0), (3600.0, 3600.0)]

    def test_timeouts_and_threads_need_no_real_time(self):
        """`asyncio.timeout`, `wait`, `wait_for` and `to_thread` work, and time is what they say."""
        clock = VirtualClock()

        async def main():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(clock.sleep(100.0), 5.0)
            task = asyncio.create_task(clock.sleep(50.0))
            done, pending = await asyncio.wait({task}, timeout=7.0)
            assert (len(done), len(pending)) == (0, 1)
            async with asyncio.timeout(1.0):
                return await asyncio.to_thread(lambda: clock.now() - BEGAN)

        assert run(main(), clock) == 12.0

    def test_what_waits_for_nothing_is_a_bug(self):
        """Everybody waiting for what cannot come ends the run with a word."""

        async def main():
            await asyncio.get_running_loop().create_future()

        with pytest.raises(Bug, match="everybody waits"):
            run(main(), VirtualClock())

    def test_what_is_left_behind_is_cancelled(self):
        """A task that outlives the main one is cancelled, and hears of it."""
        heard, clock = [], VirtualClock()

        async def left():
            try:
                await clock.sleep(1e9)
            except asyncio.CancelledError:
                heard.append("cancelled")
                raise

        async def main():
            task = asyncio.create_task(left())
            await clock.sleep(1.0)
            return task

        assert run(main(), clock).cancelled()
        assert heard == ["cancelled"]


class TestHostTime:
    """What can go wrong with the time of a watcher's host."""

    def test_a_host_that_sleeps_is_served_when_it_wakes(self):
        """Timers due while it sleeps are served at the end of the sleep."""
        clock = VirtualClock()
        clock.suspend(BEGAN + 2.0, BEGAN + 100.0)

        async def main():
            seen = []
            for _ in range(4):
                await clock.sleep(1.0)
                seen.append(clock.world - BEGAN)
            return seen

        assert run(main(), clock) == [1.0, 100.0, 101.0, 102.0]

    def test_a_jump_changes_what_it_shows_and_nothing_else(self):
        """After a jump its clock is off; sleeps last as long as before."""
        clock = VirtualClock()

        async def main():
            clock.jump(-40.0)
            await clock.sleep(10.0)
            return clock.now() - BEGAN, clock.world - BEGAN

        assert run(main(), clock) == (-30.0, 10.0)

    def test_what_blocks_makes_timers_late(self):
        """A call that takes long moves the time, and what was due is served after it."""
        clock = VirtualClock()

        async def main():
            task = asyncio.create_task(clock.sleep(1.0))
            await asyncio.sleep(0)
            clock.block(5.0)
            await task
            return clock.world - BEGAN

        assert run(main(), clock) == 5.0

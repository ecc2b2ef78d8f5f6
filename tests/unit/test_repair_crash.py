"""Repair cut short: interruptions, and a crash before and after every contact with the world."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import Crash, ListJournal, World, deployment
from repairs import POLICY, acts, co_restart, run
from tandem.plan import bring_up
from tandem.repair import succeeded


class TestInterruption:
    """Ctrl-C arrives as a cancellation."""

    async def cancelled_at(self, world, plan, sentence):
        """Run until a sentence is told, cancel there, and give the journal."""
        journal = ListJournal()
        told = asyncio.Event()

        def tell(said):
            if sentence in said:
                told.set()

        task = asyncio.ensure_future(run(plan, world, journal=journal, tell=tell))
        await asyncio.wait_for(told.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return journal

    async def test_a_start_is_undone(self):
        """The member that was starting is stopped again, and the journal says so."""
        world = World(deployment(), ready_after_s={"decode-0": 1e9})
        plan = bring_up(world.deployment, POLICY)

        journal = await self.cancelled_at(world, plan, "Still waiting for decode-0")

        assert "decode-0" not in world.lives
        assert journal.kept[-1].status == "interrupted"
        assert "its start was undone" in journal.kept[-1].detail

    async def test_a_stop_is_finished(self):
        """A stop under way goes to its end before the cancellation goes on."""
        world = World(deployment())
        world.run()

        journal = await self.cancelled_at(world, co_restart(world), "Stopping decode-0")

        assert "decode-0" not in world.lives
        assert "prefill-0" in world.lives
        assert (journal.kept[-1].step, journal.kept[-1].status) == (
            "stop:decode-0",
            "interrupted",
        )

    async def test_an_interrupted_repair_resumes(self):
        """What was interrupted is finished by a second run with the journal of the first."""
        world = World(deployment(), ready_after_s={"decode-0": 8.0})
        world.run()
        plan = co_restart(world)
        journal = await self.cancelled_at(world, plan, "Still waiting for decode-0")

        outcomes = await run(plan, world, journal=journal)

        assert succeeded(plan, outcomes)
        assert acts(world).count("start prefill-0") == 1


def crashing(world, plan, *, at, after, journal):
    """Run until the crash; gives whether it happened."""
    world.touches, world.crash_at, world.crash_after = 0, at, after
    try:
        asyncio.run(run(plan, world, journal=journal))
    except Crash:
        return True
    return False


def contacts(make):
    """How often a whole run touches the world and the journal."""
    world, plan = make()
    journal = ListJournal(world)
    asyncio.run(run(plan, world, journal=journal))
    return world.touches


def pair_restart():
    """A running pair and the plan to restart it."""
    world = World(deployment())
    world.run()
    return world, co_restart(world)


def all_down():
    """Nothing runs, and the plan is to bring it up."""
    world = World(deployment())
    return world, bring_up(world.deployment, POLICY)


def whole_and_in_order(world, old):
    """Every member runs a new life, and no role is older than the one it depends on."""
    lives = world.lives
    assert set(lives) == {"prefill-0", "decode-0", "router"}
    assert not {life.id for life in lives.values()} & old
    assert lives["prefill-0"].started_at < lives["decode-0"].started_at < lives["router"].started_at


class TestCrash:
    """kill -9 before or after every single contact with the world or the journal."""

    @pytest.mark.parametrize("make", [pair_restart, all_down])
    @pytest.mark.parametrize("after", [False, True])
    def test_every_crash_resumes_and_nothing_is_done_twice(self, make, after):
        """After any crash a resumed run ends with every member up, started exactly once."""
        total = contacts(make)
        assert total > 15

        for at in range(1, total + 1):
            world, plan = make()
            old = {life.id for life in world.lives.values()}
            journal = ListJournal(world)
            assert crashing(world, plan, at=at, after=after, journal=journal)
            world.crash_at = None

            outcomes = asyncio.run(run(plan, world, journal=journal))

            assert succeeded(plan, outcomes), (at, outcomes[-1])
            whole_and_in_order(world, old)
            done = acts(world)
            assert len(done) == len(set(done)), (at, done)

    @given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=5))
    def test_crashes_upon_crashes_resume(self, crashes):
        """However often the repair itself is killed, it ends whole, in order, and done once."""
        world, plan = pair_restart()
        old = {life.id for life in world.lives.values()}
        journal = ListJournal(world)

        for at, after in crashes:
            crashing(world, plan, at=at, after=after, journal=journal)
        world.crash_at = None
        outcomes = asyncio.run(run(plan, world, journal=journal))

        assert succeeded(plan, outcomes)
        whole_and_in_order(world, old)
        assert len(acts(world)) == len(set(acts(world)))

    @pytest.mark.parametrize("dead", ["prefill-0", "decode-0", "router"])
    def test_a_member_that_dies_while_we_are_away_is_started_in_order(self, dead):
        """When a role died meanwhile, what depends on its old life is restarted with it."""
        for at in range(1, contacts(pair_restart) + 1):
            world, plan = pair_restart()
            old = {life.id for life in world.lives.values()}
            journal = ListJournal(world)
            crashing(world, plan, at=at, after=True, journal=journal)
            world.crash_at = None
            world.lives.pop(dead, None)

            outcomes = asyncio.run(run(plan, world, journal=journal))

            assert succeeded(plan, outcomes), (at, outcomes[-1])
            whole_and_in_order(world, old)

    def test_a_prefill_restarted_by_hand_while_we_are_away_restarts_its_decode(self):
        """A decode older than its prefill's present life is not kept."""
        world, plan = pair_restart()
        journal = ListJournal(world)
        asyncio.run(run(plan, world, journal=journal))
        del world.lives["prefill-0"]
        world.spawn("prefill-0")
        world.history.clear()

        outcomes = asyncio.run(run(plan, world, journal=journal))

        assert succeeded(plan, outcomes)
        assert acts(world) == ["stop router", "stop decode-0", "start decode-0", "start router"]

    def test_records_of_an_earlier_plan_are_left_aside(self):
        """What precedes the last plan in the journal does not count as done."""
        world, plan = pair_restart()
        journal = ListJournal(world)
        asyncio.run(run(plan, world, journal=journal))
        world.history.clear()

        journal.append(plan)
        asyncio.run(run(plan, world, journal=journal))

        assert len(acts(world)) == 6

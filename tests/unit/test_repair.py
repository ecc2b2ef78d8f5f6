"""Repair against a world in memory: gates, holders, interruptions, and a crash at every contact."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import Crash, Listener, ListJournal, World, deployment
from tandem.errors import RefusedError
from tandem.plan import bring_up, take_down
from tandem.plan.steps import restart_steps
from tandem.ports import Completion
from tandem.records import Intent, Outcome, Plan, Policy
from tandem.records import vocabulary as v
from tandem.repair import repair, succeeded

POLICY = Policy()


def co_restart(world, *, scope=None):
    """The plan that restarts the first pair, with the router when there is one pair only."""
    deployed = world.deployment
    members = [deployed.member("prefill-0"), deployed.member("decode-0")]
    if len(deployed.cells()) == 1:
        members += [member for member in deployed.members if member.role == "router"]
    return Plan(
        scope="pair",
        steps=restart_steps(deployed, members, ["prefill-0>decode-0"], POLICY),
        refused=(),
        kept=(),
        costs=(),
        because="test",
    )


async def run(plan, world, *, journal=None, tell=None):
    """Execute a plan in a world; a journal with something in it is resumed."""
    journal = journal if journal is not None else ListJournal()
    return await repair(
        plan,
        world.hands(),
        journal,
        world.clock,
        tell=tell if tell is not None else Listener(),
        settings=world.settings(policy=POLICY),
        resume=bool(journal.kept),
    )


def statuses(outcomes):
    """What became of each step."""
    return {outcome.step: outcome.status for outcome in outcomes}


def acts(world):
    """Starts and stops in the order they happened."""
    return [line for line in world.history if line.startswith(("start", "stop"))]


class TestBringUp:
    async def test_members_start_in_order_and_every_gate_is_real(self):
        """Prefill, decode, a short and a long hand-off, router, a routed request."""
        world = World(deployment())
        plan = bring_up(world.deployment, POLICY)

        outcomes = await run(plan, world)

        assert succeeded(plan, outcomes)
        assert world.history == [
            "start prefill-0",
            "start decode-0",
            "handoff prefill-0>decode-0 24",
            "handoff prefill-0>decode-0 240",
            "start router",
            "routed router",
        ]

    async def test_what_runs_is_left_running(self):
        """A second `up` starts nothing and says so."""
        world = World(deployment())
        world.run()
        plan = bring_up(world.deployment, POLICY)

        outcomes = await run(plan, world)

        assert acts(world) == []
        assert statuses(outcomes)["start:prefill-0"] == "already"
        assert succeeded(plan, outcomes)

    async def test_a_member_that_dies_is_seen_at_once_with_its_last_words(self, tmp_path):
        """A death ends the wait long before the timeout, and the log's end says why."""
        log = tmp_path / "decode-0.log"
        log.write_text("loading\n--api-key hunter2 given\nbind: address already in use\n")
        world = World(deployment(), dies_after_s={"decode-0": 1.0}, ready_after_s={"decode-0": 9.0})
        world.logs["decode-0"] = str(log)
        began = world.clock.now()

        outcomes = await run(bring_up(world.deployment, POLICY), world)

        last = outcomes[-1]
        assert (last.step, last.status) == ("start:decode-0", "failed")
        assert "decode-0 died" in last.detail
        assert "address already in use" in last.detail
        assert str(log) in last.detail
        assert "hunter2" not in last.detail
        assert world.clock.now() - began < 10.0

    async def test_a_gate_that_times_out_says_what_it_saw(self):
        """A prefill that never comes up fails its gate with the health endpoint's words."""
        world = World(deployment(), ready_after_s={"prefill-0": 1e9})
        told = Listener()

        outcomes = await run(bring_up(world.deployment, POLICY), world, tell=told)

        assert statuses(outcomes) == {"start:prefill-0": "failed"}
        assert "connection refused (waited 60 s)" in outcomes[0].detail
        assert any(sentence.startswith("Still waiting for prefill-0") for sentence in told)

    async def test_a_supervisor_that_cannot_start_is_quoted(self):
        """The supervisor's refusal becomes the outcome, and nothing after it is tried."""
        world = World(deployment(), unstartable={"decode-0"})

        outcomes = await run(bring_up(world.deployment, POLICY), world)

        assert outcomes[-1].detail == "decode-0 cannot be started"
        assert acts(world) == ["start prefill-0"]

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (Completion(status="timed_out", detail="no token"), "never completed: no token"),
            (Completion(status="completed", kv_moved=None), "shows that KV moved"),
            (Completion(status="failed", detail="HTTP 500"), "failed: HTTP 500"),
        ],
    )
    async def test_a_hand_off_counts_only_when_kv_moved(self, answer, said):
        """A request that hung, failed, or moved nothing that was seen keeps the gate shut."""
        world = World(deployment(), answers={"prefill-0>decode-0": answer})

        outcomes = await run(bring_up(world.deployment, POLICY), world)

        assert outcomes[-1].step == "handoff:prefill-0>decode-0"
        assert outcomes[-1].status == "failed"
        assert said in outcomes[-1].detail

    async def test_a_hung_hand_off_is_never_tried_again(self):
        """One request that hung holds one slot; a second would hold another."""
        hung = Completion(status="timed_out", latency_s=1.0)
        world = World(deployment(), answers={"prefill-0>decode-0": hung})

        await run(bring_up(world.deployment, POLICY), world)

        assert len([line for line in world.history if line.startswith("handoff")]) == 1

    async def test_without_a_supervisor_nothing_is_touched(self):
        """A plan over members nobody can start is refused before its first step."""
        world = World(deployment(supervisor="none"))

        with pytest.raises(RefusedError, match="supervisor = 'none'"):
            await run(bring_up(world.deployment, POLICY), world)

        assert world.history == []


class TestTakeDown:
    async def test_members_stop_in_order_and_are_seen_gone(self):
        """Router, decode, prefill."""
        world = World(deployment())
        world.run()
        plan = take_down(world.deployment, POLICY)

        outcomes = await run(plan, world)

        assert succeeded(plan, outcomes)
        assert acts(world) == ["stop router", "stop decode-0", "stop prefill-0"]
        assert world.lives == {}

    async def test_only_the_named_members_stop(self):
        """`only` takes back exactly what was started."""
        world = World(deployment())
        world.run()

        await run(take_down(world.deployment, POLICY, only={"decode-0"}), world)

        assert acts(world) == ["stop decode-0"]

    async def test_a_failed_gate_names_the_holder(self):
        """What is still held is named, and nothing is started over it."""
        world = World(deployment())
        world.run()
        world.held["prefill-0"] = ["port 25100 is held by pid 77 (python3)"]
        told = Listener()

        outcomes = await run(co_restart(world), world, tell=told)

        assert outcomes[-1].step == "gone:prefill-0"
        assert "port 25100 is held by pid 77 (python3)" in outcomes[-1].detail
        assert not [line for line in world.history if line.startswith("start")]
        assert "port 25100 is held by pid 77" in told[-1]

    async def test_a_member_that_does_not_stop_ends_the_repair(self):
        """A stop that leaves the old life alive is a failure, not a hope."""
        world = World(deployment(), undying={"decode-0"})
        world.run()

        outcomes = await run(co_restart(world), world)

        assert statuses(outcomes)["stop:decode-0"] == "failed"
        assert "stop prefill-0" not in world.history


class TestCoRestart:
    async def test_the_pair_restarts_in_order(self):
        """The stop order is not the start order, and everything runs a new life."""
        world = World(deployment())
        world.run()
        old = {name: life.id for name, life in world.lives.items()}
        plan = co_restart(world)

        outcomes = await run(plan, world)

        assert succeeded(plan, outcomes)
        assert acts(world) == [
            "stop router",
            "stop decode-0",
            "stop prefill-0",
            "start prefill-0",
            "start decode-0",
            "start router",
        ]
        assert {name for name, life in world.lives.items() if life.id == old[name]} == set()

    async def test_other_pairs_are_not_touched(self):
        """In 2P2D the router and the other pair keep their lives."""
        world = World(deployment(prefills=2, decodes=2))
        world.run()
        kept = {name: world.lives[name].id for name in ("prefill-1", "decode-1", "router")}
        # An old decode meets the new prefill by asking its bootstrap again.
        world.in_order = lambda _prefill, _decode: True
        plan = co_restart(world)

        outcomes = await run(plan, world)

        assert succeeded(plan, outcomes)
        assert {name: world.lives[name].id for name in kept} == kept
        assert "routed router" in world.history

    async def test_drain_waits_for_what_moves_and_not_for_what_is_stuck(self):
        """Queues that stand still with nothing running end the drain early."""
        world = World(deployment())
        world.run()
        world.counters["prefill-0", v.INFLIGHT_QUEUE_REQS] = 8
        plan = co_restart(world)

        outcomes = await run(plan, world)

        assert outcomes[0].status == "done"
        assert "8 requests on prefill-0>decode-0 no longer move" in outcomes[0].detail
        assert outcomes[0].ended_at - outcomes[0].started_at < POLICY.drain_s

    async def test_drain_is_bounded(self):
        """What keeps running is given `drain_s` and no more."""
        world = World(deployment())
        world.run()
        world.counters["decode-0", v.RUNNING_REQS] = 3

        outcomes = await run(co_restart(world), world)

        assert outcomes[0].status == "done"
        assert "the bound of 3 s ends the wait" in outcomes[0].detail

    async def test_a_dead_member_is_stopped_already(self):
        """Stopping what is gone is done already."""
        world = World(deployment())
        world.run()
        del world.lives["decode-0"]
        plan = co_restart(world)

        outcomes = await run(plan, world)

        assert statuses(outcomes)["stop:decode-0"] == "already"
        assert succeeded(plan, outcomes)

    async def test_a_member_restarted_behind_our_back_is_refused(self):
        """A life that something else began between stop and start ends the repair by name."""
        world = World(deployment())
        world.run()
        world.held["decode-0"] = ["shm"]  # keeps the gate of the decode's end waiting

        class Restless(ListJournal):
            def append(self, record):
                super().append(record)
                if isinstance(record, Outcome) and record.step == "stop:prefill-0":
                    world.spawn("decode-0")

        outcomes = await run(co_restart(world), world, journal=Restless())

        assert outcomes[-1].status == "failed"
        assert "something else started decode-0 again" in outcomes[-1].detail

    async def test_intent_precedes_and_outcome_follows_every_act(self):
        """The journal alternates intent and outcome for each step that acts."""
        world = World(deployment())
        world.run()
        journal = ListJournal()

        await run(co_restart(world), world, journal=journal)

        assert journal.kept[0] == co_restart(world)
        kinds = [(type(record), record.step) for record in journal.kept[1:]]
        assert kinds == [
            pair
            for step in co_restart(world).steps
            for pair in (
                [(Outcome, step.id)]
                if step.verb == "expect-gone"
                else [(Intent, step.id), (Outcome, step.id)]
            )
        ]


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

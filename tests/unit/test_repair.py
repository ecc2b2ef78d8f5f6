"""Repair against a world in memory: orders, gates, and the holders that keep them shut."""

import msgspec
import pytest

from fakes import Listener, ListJournal, World, deployment
from repairs import POLICY, acts, co_restart, run, statuses
from tandem.errors import RefusedError
from tandem.plan import bring_up, take_down
from tandem.ports import Completion
from tandem.records import Intent, Outcome
from tandem.records import vocabulary as v
from tandem.repair import succeeded


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
        """A death ends the wait long before the timeout, and the log's end says why.

        Without secrets, colours, or what an earlier life wrote.
        """
        log = tmp_path / "decode-0.log"
        log.write_text("it was a fine life\n")
        world = World(deployment(), dies_after_s={"decode-0": 1.0}, ready_after_s={"decode-0": 9.0})
        world.logs["decode-0"] = str(log)
        world.writes["decode-0"] = (
            "--api-key hunter2 given\n#new-token: 7, token usage: 0.1\n"
            "\x1b[31mbind: address already in use\x1b[0m\n"
        )
        began = world.clock.now()

        outcomes = await run(bring_up(world.deployment, POLICY), world)

        last = outcomes[-1]
        assert (last.step, last.status) == ("start:decode-0", "failed")
        assert "decode-0 died" in last.detail
        assert "address already in use" in last.detail
        assert str(log) in last.detail
        assert "hunter2" not in last.detail
        assert "#new-token: 7, token usage: 0.1" in last.detail
        assert "fine life" not in last.detail
        assert last.detail.isprintable()
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

        assert outcomes[-1].detail == "decode-0 cannot be started. Look at its log"
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

    async def test_a_refused_hand_off_is_not_tried_for_a_minute(self):
        """What an engine refuses as a bad request it would refuse again: the gate says so at once.

        A context shorter than the probe's prompt is one.
        """
        refused = Completion(status="failed", detail="HTTP 400: too long", refused=True)
        world = World(deployment(), answers={"prefill-0>decode-0": refused})

        outcomes = await run(bring_up(world.deployment, POLICY), world)

        assert len([line for line in world.history if line.startswith("handoff")]) == 1
        assert "HTTP 400: too long" in outcomes[-1].detail

    async def test_without_a_supervisor_nothing_is_touched(self):
        """A plan over members nobody can restart is refused before its first step."""
        world = World(deployment(supervisor="none"))
        world.run()

        with pytest.raises(RefusedError, match="supervisor = 'none'"):
            await run(co_restart(world), world)

        assert world.history == []

    async def test_members_of_others_are_waited_for(self):
        """`up` starts what it may and waits for what somebody else starts; `down` leaves it."""
        world = World(deployment())
        others = [
            msgspec.structs.replace(member, supervisor="none")
            if member.role == "router"
            else member
            for member in world.deployment.members
        ]
        world.deployment = msgspec.structs.replace(world.deployment, members=tuple(others))
        world.spawn("router")

        up = await run(bring_up(world.deployment, POLICY), world)
        down = await run(take_down(world.deployment, POLICY), world)

        assert statuses(up)["ready:router"] == "done"
        assert "start router" not in world.history
        assert [outcome.step for outcome in down][:2] == ["stop:decode-0", "stop:prefill-0"]
        assert list(world.lives) == ["router"]


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

    async def test_a_prefills_last_batch_is_no_request_in_flight(self):
        """What a prefill calls running is its last batch, and stays when all is over."""
        world = World(deployment())
        world.run()
        world.counters["prefill-0", v.RUNNING_REQS] = 1

        outcomes = await run(co_restart(world), world)

        assert outcomes[0].detail == "nothing is in flight on prefill-0>decode-0"

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

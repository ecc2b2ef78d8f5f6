"""The requests that a repair killed: each counted once, and our own named."""

import pytest

from faults import flow
from repairs import POLICY, co_restart
from scenes import CELL, DECODE, PREFILL, ROUTER, Scene
from tandem.lost import FRESH_S, lost_requests
from tandem.plan.steps import restart_steps
from tandem.records import Plan
from tandem.records import vocabulary as v


def silent(**shape):
    """Eight hand-offs pinned and two requests behind them; the router holds all ten."""
    scene = flow(Scene(**shape))
    scene.prefill.queues = {"inflight": 8, "bootstrap": 2, "running": 4}
    scene.decode.queues = {"transfer": 8, "prealloc": 2}
    scene.active = 10.0
    return scene.run(10)


class TestARouterCounts:
    """One pair behind a router that is stopped first."""

    def test_its_number_is_the_number(self):
        """One row, however many queues hold the same requests."""
        scene = silent()
        (lost,) = lost_requests(scene.facts(), co_restart(scene))

        assert (lost.subject, lost.count) == (ROUTER, 10)

    def test_the_engines_say_where_they_were(self):
        """Queues are the detail; the size of a prefill's last batch is no request."""
        scene = silent()
        (lost,) = lost_requests(scene.facts(), co_restart(scene))

        assert lost.detail == (
            "in its hands; they were 8 computed and waiting for their hand-off, "
            "2 waiting for the decode's metadata on prefill-0; "
            "8 waiting for their KV, 2 waiting for room on decode-0"
        )

    def test_our_own_probes_are_named(self):
        """The stuck probe through the router is among its requests, the direct one is not."""
        scene = silent()
        scene.probes = {CELL: "stuck", ROUTER: "late"}
        scene.run(5)
        (lost,) = lost_requests(scene.facts(), co_restart(scene))

        assert lost.detail.startswith("in its hands, 1 of them our own probe; they were")
        assert lost.detail.endswith("(1 of these our own direct probe)")
        assert lost.count == 10

    def test_an_old_word_of_a_probe_is_none(self):
        """A probe that was stuck long ago is not counted."""
        scene = silent()
        scene.probes = {CELL: "stuck", ROUTER: "stuck"}
        scene.run(5)
        scene.probes = {}
        scene.run(int(FRESH_S) + 5)
        (lost,) = lost_requests(scene.facts(), co_restart(scene))

        assert "our own" not in lost.detail

    def test_nothing_in_flight_is_no_row(self):
        """A router with empty hands lost nothing, whatever the engines still hold."""
        scene = silent()
        scene.active = 0.0
        scene.run(3)

        assert lost_requests(scene.facts(), co_restart(scene)) == ()


class TestARouterThatStays:
    """Several pairs, one of which is restarted: the others' requests live on."""

    def test_only_what_it_sent_to_the_restarted_pair_is_lost(self):
        """The fuller of both sides counts: each request is open at a prefill and a decode."""
        scene = silent(prefills=2, decodes=2)
        for worker, count in ((PREFILL, 7), (DECODE, 9), ("prefill-1", 20), ("decode-1", 18)):
            scene.see("router", ROUTER, v.WORKER_ACTIVE_REQS, count, label=worker)
        (lost,) = lost_requests(scene.facts(), co_restart(scene))

        assert (lost.subject, lost.count) == (ROUTER, 9)
        assert "prefill-1" not in lost.detail

    def test_a_restart_of_the_router_alone_loses_what_it_holds(self):
        """The engines are not stopped, so no queue of theirs is told."""
        scene = silent()
        router = scene.deployment.member(ROUTER)
        steps = restart_steps(scene.deployment, [router], [], POLICY)
        alone = Plan(scope="router", steps=steps, refused=(), kept=(), costs=(), because="")
        (lost,) = lost_requests(scene.facts(), alone)

        assert (lost.subject, lost.count, lost.detail) == (ROUTER, 10, "in its hands")


class TestNobodyCounts:
    """Without a router's number."""

    @pytest.mark.parametrize("router", [False, True])
    def test_the_fuller_side_is_counted(self, router):
        """A request waits on both engines: ten, not twenty, and the row says `or more`."""
        scene = silent(router=router)
        without = (v.ROUTER_ACTIVE_REQS, v.WORKER_ACTIVE_REQS)
        (lost,) = lost_requests(scene.facts(without=without), co_restart(scene))

        assert (lost.subject, lost.count) == ("prefill-0 and decode-0", 10)
        assert lost.detail.startswith("or more: 8 computed")

    def test_decoding_requests_count(self):
        """What only the decode still holds is lost as well."""
        scene = silent(router=False)
        scene.prefill.queues, scene.decode.queues = {}, {"running": 3}
        scene.run(3)
        (lost,) = lost_requests(scene.facts(), co_restart(scene))

        assert (lost.count, lost.detail) == (3, "or more: 3 decoding on decode-0")

    def test_unseen_queues_are_no_row(self):
        """Where nothing was seen lately, nothing is claimed."""
        scene = silent(router=False)
        facts = scene.facts().at(scene.now)
        facts.now += FRESH_S + 20.0

        assert lost_requests(facts, co_restart(scene)) == ()

    def test_a_plan_that_stops_nothing_loses_nothing(self):
        """No stop, no row."""
        nothing = Plan(scope="nothing", steps=(), refused=(), kept=(), costs=(), because="")

        assert lost_requests(silent().facts(), nothing) == ()

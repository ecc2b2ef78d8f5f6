"""Members down, failing hand-offs, a router that disagrees: each with its near misses."""

import pytest

from faults import (
    dead_decode,
    failing_handoffs,
    flow,
    router_diverges,
    serving,
    silence,
    still,
)
from scenes import CELL, DECODE, PREFILL, ROUTER
from tandem.detect import detect
from tandem.records import Thresholds
from tandem.records import vocabulary as v
from watched import opened, watched


class TestMemberDown:
    """A process that is gone, or that answers nothing."""

    def test_a_gone_process_is_down_after_ten_seconds(self):
        """A decode whose process vanished is found after `down_s`, and nothing else is."""
        [(at, finding)] = watched(dead_decode())

        assert (finding.kind, finding.subject) == ("member-down", DECODE)
        assert 10.0 <= at - 60.0 <= 13.0
        assert {witness.side for witness in finding.witnesses} == {"client", "server"}

    def test_a_living_process_that_answers_nothing_is_down(self):
        """A process that lives but refuses HTTP for ten seconds is down."""
        scene = still(serving())
        scene.prefill.health = None
        [(_, finding)] = watched(scene.run(20))

        assert (finding.kind, finding.subject) == ("member-down", PREFILL)
        assert "answers nothing" in finding.summary

    def test_a_zombie_is_gone(self):
        """A zombie counts as gone although it has a pid."""
        scene = still(serving())
        scene.decode.health = None
        for _ in range(15):
            scene.run(1)
            scene.see("process", DECODE, v.PROCESS_STATE, "Z")
        [(_, finding)] = watched(scene)

        assert finding.subject == DECODE
        assert "has been gone" in finding.summary

    def test_what_nobody_watched_is_not_told(self):
        """A member gone before a minute without looks and after it is down since the second."""
        scene = still(serving())
        scene.decode.alive = False
        scene.decode.health = None
        scene.run(20)
        scene.now += 60
        [*_, finding] = detect(scene.run(15).facts(), (), Thresholds())

        assert (finding.kind, finding.subject) == ("member-down", DECODE)
        assert "has been gone for 14 s" in finding.summary
        assert "has not answered for 14 s" in finding.summary

    def test_the_router_can_be_down(self):
        """A router whose process is gone is down."""
        scene = serving()
        scene.router_alive = False
        scene.probes[ROUTER] = "failed"

        assert opened(scene.run(20)) == [("member-down", 71.0)]

    def test_a_restart_is_not_down(self):
        """A decode that comes back within seconds was never down."""
        scene = serving().restart(DECODE, away_s=6)

        assert opened(flow(scene).run(20)) == []

    def test_a_member_that_still_loads_is_not_down(self):
        """A process younger than a minute that does not answer yet is starting."""
        scene = serving().restart(DECODE, settle=False)
        scene.decode.health = None

        assert opened(scene.run(40)) == []

    def test_it_swallows_the_stall_it_causes(self):
        """A stall on a path closes when one of its members turns out to be gone."""
        scene = silence(serving()).run(12)
        scene.decode.alive = False
        told = watched(scene.run(20))
        closed = [one.kind for _, one in told if one.closed_at is not None]
        standing = [one.kind for _, one in told if one.closed_at is None]

        assert standing == ["silent-stall", "member-down"]
        assert closed == ["silent-stall"]

    def test_what_nobody_can_look_at_is_not_down(self):
        """Without any process or answer ever seen there is no finding."""
        scene = serving()
        scene.observations = [one for one in scene.observations if one.subject != DECODE]
        scene.blind = {"process"}
        scene.decode.health = None

        assert opened(scene.run(20)) == []


class TestFailuresRising:
    """Hand-offs that fail aloud."""

    def test_failures_that_go_on_are_found(self):
        """Failures every few seconds, with a failed probe, are a finding of the cell."""
        [(_, finding)] = watched(failing_handoffs())

        assert (finding.kind, finding.subject) == ("transfer-failures-rising", CELL)

    def test_both_engines_counting_are_two_witnesses(self):
        """Without a failed probe the other engine's count is the second witness."""
        scene = failing_handoffs()
        for seen in list(scene.observations):
            if seen.name == v.PROBE and seen.value == "failed":
                scene.observations.remove(seen)
        [(_, finding)] = watched(scene)

        assert [witness.side for witness in finding.witnesses] == ["server", "server"]

    def test_the_failures_of_a_restart_are_not(self):
        """Hand-offs that fail around a restart are that restart's."""
        scene = serving()
        scene.prefill.fails = 2.0
        scene.run(2)
        scene.restart(DECODE)
        scene.run(4)
        scene.prefill.fails = 0.0

        assert opened(flow(scene).run(60)) == []

    def test_the_failures_of_a_long_load_are_not(self):
        """What fails while a prefill takes two minutes to load is that restart's."""
        scene = serving()
        scene.decode.fails = 0.5
        scene.probes[CELL] = "failed"
        scene.restart(PREFILL, settle=False)
        scene.prefill.health = None
        scene.run(120)
        scene.prefill.health = 200
        scene.run(5)
        scene.decode.fails = 0.0

        assert "transfer-failures-rising" not in [kind for kind, _ in opened(flow(scene).run(60))]

    def test_client_aborts_explain_as_many(self):
        """Failures that aborted requests explain are no finding."""
        scene = serving()
        for engine in scene.engines.values():
            engine.fails = engine.aborts = lambda second: float(second % 4 == 0)

        assert opened(scene.run(40)) == []

    def test_one_jump_is_an_event(self):
        """A single jump of the counter is told by no finding."""
        scene = serving()
        scene.prefill.fails = scene.decode.fails = lambda second: 20.0 * (second == 3)

        assert opened(scene.run(40)) == []


class TestRouterDisagrees:
    """Routed requests hang while direct ones complete."""

    def test_a_diverging_router_is_found(self):
        """Two routed probes in a row that hang, with idle engines, are the router's fault."""
        [(_, finding)] = watched(router_diverges())

        assert (finding.kind, finding.subject) == ("router-disagrees", ROUTER)
        assert finding.incarnations.keys() == {ROUTER}

    def test_a_router_restart_is_not_a_disagreement(self):
        """Routed probes that fail while the router restarts are no finding."""
        scene = serving()
        scene.probes[ROUTER] = "failed"
        scene.restart(ROUTER, away_s=6)
        flow(scene)

        assert opened(scene.run(20)) == []

    def test_probes_that_fail_with_a_restart_are_not_a_disagreement(self):
        """Two routed probes that fail as the decode dies, and direct ones that work after."""
        scene = serving().run(1)
        scene.decode.alive = False
        scene.probes = dict.fromkeys(scene.probes, None)
        scene.run(2)
        for _ in range(2):
            scene.see("probe", ROUTER, v.PROBE, "failed")
        scene.restart(DECODE, away_s=2).run(4)
        scene.probes[CELL] = "completed"

        assert opened(scene.run(20)) == []

    @pytest.mark.parametrize("queue", ["inflight", "waiting"])
    def test_engines_that_hold_requests_clear_the_router(self, queue):
        """While an engine holds requests the router is not accused."""
        scene = serving()
        scene.prefill.queues = {queue: 2.0}
        scene.run(20)
        scene.probes[ROUTER] = "stuck"

        assert "router-disagrees" not in [kind for kind, _ in opened(scene.run(20))]

"""Findings from how processes, units and containers live and end."""

import pytest

from faults import flow, idle, serving, silence, still
from scenes import DECODE, PREFILL
from tandem.detect import detect
from tandem.records import Thresholds
from tandem.records import vocabulary as v
from watched import watched

SCHEDULER, DETOKENIZER = "41", "42"


def found(scene):
    """Kind, subject and call for action of what opened."""
    return [
        (one.kind, one.subject, one.actionable)
        for _, one in watched(scene)
        if one.closed_at is None
    ]


def children(scene, state="S", name=DECODE):
    """Show a scheduler in a state, and a detokenizer that sleeps."""
    scene.see("process", name, v.CHILDREN, 2)
    for pid, role, shown in (
        (SCHEDULER, "scheduler_TP0", state),
        (DETOKENIZER, "detokenizer", "S"),
    ):
        scene.see("process", name, v.CHILD_ROLE, role, label=pid)
        scene.see("process", name, v.CHILD_STATE, shown, label=pid)


def with_children(scene, seconds, state="S"):
    """Let seconds pass with the children looked at every second."""
    for _ in range(seconds):
        scene.run(1)
        children(scene, state)
    return scene


class TestHeadless:
    """The scheduler is gone, the API lives on."""

    @pytest.mark.parametrize("state", ["gone", "Z"])
    def test_green_without_a_scheduler_is_a_lie(self, state):
        """A dead scheduler under a 200 is found within seconds, with its role and its health."""
        scene = still(with_children(serving(), 5))
        [(at, finding)] = watched(with_children(scene, 10, state))

        assert (finding.kind, finding.subject, finding.actionable) == ("health-lies", DECODE, True)
        assert at - 65.0 <= 7.0
        assert "scheduler_TP0" in finding.summary

    def test_red_without_a_scheduler_is_down(self):
        """Where health says so itself, the member is down and nobody lies."""
        scene = still(with_children(serving(), 5))
        scene.decode.health = 503

        assert found(with_children(scene, 10, "gone")) == [("member-down", DECODE, True)]

    def test_living_schedulers_are_none(self):
        """A scheduler that sleeps or runs is where it belongs."""
        assert found(with_children(serving(), 20)) == []

    def test_one_that_was_replaced_is_none(self):
        """An engine that starts its scheduler anew goes on."""
        scene = with_children(serving(), 5)
        for _ in range(10):
            scene.run(1)
            children(scene, "gone")
            scene.see("process", DECODE, v.CHILD_ROLE, "scheduler_TP0", label="43")
            scene.see("process", DECODE, v.CHILD_STATE, "R", label="43")

        assert found(scene) == []

    def test_the_end_of_the_whole_is_not_headless(self):
        """When the leader goes as well, the member is down."""
        scene = still(with_children(serving(), 5))
        children(scene, "gone")
        scene.decode.alive = False
        told = found(scene.run(20))

        assert told == [("member-down", DECODE, True)]


class TestPaused:
    """Held by other means."""

    def test_a_stopped_scheduler_is_a_pause(self):
        """State T of the scheduler alone is named with its own pid."""
        scene = still(with_children(serving(), 5))
        scene.decode.forwards = False
        [(_, finding)] = watched(with_children(scene, 10, "T"))

        assert finding.kind == "member-paused"
        assert f"`kill -CONT {SCHEDULER}`" in finding.summary

    def test_a_paused_container_is_a_pause(self):
        """The engine's word on a container that is paused is enough, with no answer over HTTP."""
        scene = still(serving())
        scene.see("container", DECODE, v.CONTAINER_STATE, "paused")
        scene.decode.health = None
        [(_, finding)] = watched(scene.run(12))

        assert finding.kind == "member-paused"
        assert "unpausing" in finding.summary


class TestEnds:
    """Exit codes, where they can be seen."""

    def crashing(self, code, times=3):
        """Let the decode end with a code and come back, again and again, serving in between."""
        scene = serving()
        for _ in range(times):
            scene.see("unit", DECODE, v.EXIT_CODE, code)
            scene.see("unit", DECODE, v.UNIT_EXIT, f"exit code {code}")
            scene.restart(DECODE, away_s=3)
            flow(scene).run(20)
        return scene

    @pytest.mark.parametrize("code", [1, 137, -11])
    def test_crashes_of_a_member_that_serves_are_a_loop(self, code):
        """Three lives that ended badly are a crash loop, though each of them served."""
        [finding] = [one for _, one in watched(self.crashing(code)) if one.closed_at is None]

        assert (finding.kind, finding.actionable) == ("member-restarting", True)
        assert f"exit code {code}" in finding.summary

    @pytest.mark.parametrize("code", [0, 143, -15])
    def test_ends_that_were_asked_for_are_none(self, code):
        """SIGTERM and a clean exit are somebody's wish."""
        assert found(self.crashing(code)) == []

    def test_a_member_that_is_down_says_how_it_ended(self):
        """The exit is the third witness of a member that is gone."""
        scene = still(serving())
        scene.decode.alive = False
        scene.decode.health = None
        scene.run(1)
        scene.see("container", DECODE, v.CONTAINER_EXIT, "exit code 137")
        scene.see("container", DECODE, v.CONTAINER_OOM_KILLED, True)
        [finding] = detect(scene.run(15).facts(), (), Thresholds())

        assert "it ended with exit code 137, out of memory" in finding.summary

    def test_an_old_end_is_not_this_one(self):
        """How an earlier life ended says nothing of this one."""
        scene = serving()
        scene.see("unit", PREFILL, v.UNIT_EXIT, "exit code 3")
        still(scene.run(60))
        scene.prefill.alive = False
        scene.prefill.health = None
        [finding] = detect(scene.run(15).facts(), (), Thresholds())

        assert "exit code" not in finding.summary


def test_the_age_of_an_open_request_is_a_second_witness():
    """A floor that only the prefill knows of is told once the router's oldest request is old."""
    scene = serving()
    scene.prefill.queues = {"inflight": 3.0}
    for second in range(60):
        scene.run(1)
        age = 60.0 if second >= 38 else 0.0
        scene.see("router", "router", v.ROUTER_REQUEST_AGE_S, age)
    [(at, finding)] = watched(scene)

    assert finding.kind == "partial-stall"
    assert 38.0 <= at - 60.0 <= 41.0
    assert "oldest open request is older than 60 s" in finding.summary


class TestGpus:
    """A further witness, never one of the two."""

    def test_idle_gpus_are_told_beside_a_stall(self):
        """A stall names what its GPUs do, after the two witnesses it stands on."""
        scene = silence(serving()).run(12)
        for label in ("0", "1"):
            scene.see("gpu", DECODE, v.GPU_UTILIZATION, 0.0, label=label)
        scene.see("gpu", PREFILL, v.GPU_UTILIZATION, None, label="2", missing="MIG")
        [finding] = detect(scene.facts(), (), Thresholds())

        assert finding.witnesses[2].statement == f"the 2 GPUs of {DECODE} are idle"

    def test_idle_gpus_alone_are_nothing(self):
        """A deployment at rest whose GPUs idle is at rest."""
        scene = idle()
        scene.see("gpu", DECODE, v.GPU_UTILIZATION, 0.0, label="0")

        assert found(scene.run(5)) == []

"""The incident's own mode: each test's answers, the mechanism, and which changes it implicates."""

import pytest

import faults
from answers import answers, results
from judged import facts_of
from scenes import DECODE, PREFILL, ROUTER, T0, Scene
from tandem.failures.answers import clock
from tandem.failures.degraded_pair_after_decode_restarts import MODE, implicates
from tandem.failures.floor_steps import mechanism
from tandem.records import Change
from tandem.records import vocabulary as v


def young(decode_after_s: float, *, watched: bool = False) -> Scene:
    """Paint a pair whose decode began some seconds after its prefill, watched from then on."""
    scene = Scene()
    scene.lives[PREFILL] = T0 - 200.0
    scene.lives[DECODE] = T0 - 200.0 + decode_after_s
    if watched:
        scene.now = T0 - 210.0
        scene.see("process", DECODE, v.ALIVE, value=False)
        scene.now = T0
    return faults.silence(faults.flow(scene).run(20)).run(15)


class TestRestartedAlone:
    """A decode restarted while the prefill lived on."""

    def test_restarts_within_one_prefill_life_support(self):
        """Three decode restarts under one prefill support the mode, moderately."""
        said = results(MODE, facts_of(faults.stale_peers))["decode-restarted-alone"]

        assert (said.answer, said.strength) == ("supports", "moderate")
        assert "restarted alone 3 times" in said.because

    def test_no_restart_excludes_it(self):
        """Without a restart the mode is excluded, decisively."""
        found = answers(MODE, facts_of(faults.stall_without_restart))

        assert found["decode-restarted-alone"] == "contradicts decisive"

    def test_a_prefill_restarted_last_excludes_it(self):
        """A co-restart leaves a prefill that remembers no dead decode."""
        scene = faults.serving().restart(DECODE).run(10).restart(PREFILL)
        faults.silence(faults.flow(scene).run(10)).run(15)

        assert answers(MODE, scene)["decode-restarted-alone"] == "contradicts decisive"

    @pytest.mark.parametrize(
        ("after_s", "watched", "answer"),
        [
            (5.0, False, "contradicts decisive"),
            (60.0, True, "contradicts decisive"),
            (60.0, False, "unknown"),
            (150.0, False, "supports moderate"),
        ],
    )
    def test_a_bring_up_is_no_restart(self, after_s, watched, answer):
        """A decode that starts soon after its prefill is the bring-up, if that is certain."""
        assert answers(MODE, young(after_s, watched=watched))["decode-restarted-alone"] == answer

    def test_unknown_start_times_are_asked_for(self):
        """Without start times the test says what to collect."""
        facts = facts_of(faults.stall_without_restart).without(v.STARTED_AT)
        said = results(MODE, facts)["decode-restarted-alone"]

        assert said.answer == "unknown"
        assert said.collect == f"when {PREFILL} and {DECODE} started"


class TestHeld:
    """The inflight queue."""

    def test_a_pinned_queue_supports(self):
        """The reason gives the floor and for how long."""
        said = results(MODE, facts_of(faults.stale_peers))["handoffs-held"]

        assert (said.answer, said.strength) == ("supports", "strong")
        assert said.because == f"{PREFILL}'s inflight queue was never below 8 in the last 14 s"

    def test_an_empty_queue_excludes(self):
        """A queue that empties holds nothing for ever."""
        assert answers(MODE, faults.near_miss())["handoffs-held"] == "contradicts decisive"

    def test_the_rise_must_follow_a_restart(self):
        """A floor that rises with a restart supports; before one, or long after, excludes."""
        found = {
            paint.__name__: answers(MODE, facts_of(paint))["held-since-a-restart"]
            for paint in (
                faults.stale_peers,
                faults.orphaned_transfers,
                faults.stall_before_a_restart,
                faults.stall_long_after_a_restart,
                faults.stall_without_restart,
            )
        }

        assert found == {
            "stale_peers": "supports strong",
            "orphaned_transfers": "supports strong",
            "stall_before_a_restart": "contradicts decisive",
            "stall_long_after_a_restart": "contradicts decisive",
            "stall_without_restart": "unknown",
        }

    def test_a_window_that_begins_too_late_cannot_tell(self):
        """Held as far back as is known: the rise is unknown, and what would tell is named."""
        scene = faults.stale_peers()
        cut = scene.facts(window_s=20.0)
        said = results(MODE, cut)["held-since-a-restart"]

        assert said.answer == "unknown"
        assert said.collect is not None
        assert "before the decode restart" in said.collect

    def test_a_busy_queue_is_dated_by_its_floor(self):
        """Under load the queue is never empty, but its present floor came after the restarts."""
        scene = faults.serving()
        scene.prefill.queues = {"inflight": lambda second: 1.0 + second % 2}
        scene.run(30).restart(DECODE)
        scene.prefill.queues = {"inflight": 6.0}

        assert answers(MODE, scene.run(20))["held-since-a-restart"] == "supports weak"


class TestOthers:
    """What supports it beside the definition."""

    def test_the_silent_incident_has_every_support(self):
        """Forward steps run, the decode waits, the direct probe hangs, nothing was counted."""
        found = answers(MODE, facts_of(faults.stale_peers))

        assert found["forwards-still-run"] == "supports moderate"
        assert found["decode-waits"] == "supports moderate"
        assert found["direct-probe-hangs"] == "supports moderate"
        assert found["no-failure-counted"] == "supports weak"
        assert found["peer-of-held-rooms"] == "unknown"

    def test_engines_that_do_not_step_speak_against_it(self):
        """A decode that computes nothing is sick in itself."""
        found = answers(MODE, facts_of(faults.decode_hangs))

        assert found["forwards-still-run"] == "contradicts moderate"

    def test_counted_failures_speak_against_silence(self):
        """More failures than held hand-offs are not silent."""
        scene = faults.serving()
        scene.prefill.queues = {"inflight": 1.0}
        scene.prefill.fails = 1.0

        assert answers(MODE, scene.run(20))["no-failure-counted"] == "contradicts weak"


class TestMechanism:
    """Stale peer or orphaned transfer."""

    def test_a_floor_that_rises_between_restarts_is_a_stale_peer(self):
        """Rooms that hang while no decode restarts are bound to a dead peer."""
        name, said = mechanism(facts_of(faults.stale_peers), f"{PREFILL}>{DECODE}")

        assert name == "stale-peer"
        assert said is not None
        assert said.strength == "strong"

    def test_a_floor_that_rises_only_at_restarts_is_orphans(self):
        """Rooms that hang only when a decode dies were in flight to it."""
        name, said = mechanism(facts_of(faults.orphaned_transfers), f"{PREFILL}>{DECODE}")

        assert name == "orphaned-transfer"
        assert said is not None
        assert "only at restarts" in said.because

    @pytest.mark.parametrize("window_s", [10.0, 25.0, 60.0])
    def test_a_short_window_splits_nothing(self, window_s):
        """What began before the window leaves the family together."""
        for paint in (faults.stale_peers, faults.orphaned_transfers):
            cut = paint().facts(window_s=window_s)

            assert mechanism(cut, f"{PREFILL}>{DECODE}") == (None, None)

    def test_one_restart_under_load_and_silence_is_not_split(self):
        """When nothing completes after the only restart, both mechanisms fit."""
        scene = faults.serving().run(10)
        scene.prefill.queues = {"inflight": 8.0}
        scene.restart(DECODE)
        faults.silence(scene, 8).run(20)
        name, _ = mechanism(scene.facts(), f"{PREFILL}>{DECODE}")

        assert name is None

    def test_restarts_too_close_together_split_nothing(self):
        """When every look is near a restart no rise can be put down to one or to none."""
        scene = faults.serving()
        for held in range(1, 6):
            scene.prefill.queues = {"inflight": 2.0 * held}
            scene.restart(DECODE).run(2)
        faults.silence(scene, 10).run(15)

        assert mechanism(scene.facts(), f"{PREFILL}>{DECODE}") == (None, None)

    def test_a_window_that_begins_just_before_the_first_restart_will_do(self):
        """An empty queue seen at the death of the first decode is enough to count from."""
        for paint, name in (
            (faults.stale_peers, "stale-peer"),
            (faults.orphaned_transfers, "orphaned-transfer"),
        ):
            scene = paint()
            since = scene.now - T0 - 58.0

            assert mechanism(scene.facts(window_s=since), f"{PREFILL}>{DECODE}")[0] == name

    def test_no_restart_has_no_mechanism(self):
        """Without the family there is nothing to split."""
        cell = f"{PREFILL}>{DECODE}"

        assert mechanism(facts_of(faults.stall_without_restart), cell) == (None, None)


class TestImplicates:
    """Which ledger rows belong to it."""

    def rows(self, scene: Scene, subject: str) -> list[str]:
        """Each of a subject's ledger rows, by what the mode says of it."""
        facts = scene.facts()
        found = [implicates(facts, change) for change in facts.changes_of(subject)]
        return ["no opinion" if one is None else one.answer for one in found]

    def test_decode_restarts_are_implicated(self):
        """Every restart of the decode alone is."""
        assert self.rows(faults.stale_peers(), DECODE) == ["supports"] * 3

    def test_each_row_names_its_own_restart(self):
        """With restarts seconds apart every row is tied to the one it tells of."""
        scene = faults.serving()
        for _ in range(3):
            scene.restart(DECODE).run(2)
        facts = scene.facts()
        said = [implicates(facts, change) for change in facts.changes_of(DECODE)]

        assert all(
            one is not None and clock(change.at) in one.because
            for one, change in zip(said, facts.changes_of(DECODE), strict=True)
        )

    def test_prefill_and_router_restarts_are_not(self):
        """A prefill that starts holds nothing, and the router is not on the hand-off's path."""
        scene = faults.serving().restart(PREFILL).run(40).restart(ROUTER)

        assert self.rows(scene, PREFILL) == ["contradicts"]
        assert self.rows(scene, ROUTER) == ["contradicts"]

    def test_a_setting_is_not_its_business(self):
        """Flags and variables are left to the table of what they touch."""
        scene = faults.serving().change(DECODE, "--cuda-graph-max-bs", "compute", kind="flag")

        assert self.rows(scene, DECODE) == ["no opinion"]

    def test_the_end_of_the_life_before_belongs_to_the_restart(self):
        """A stop row just before a decode-only restart is part of it."""
        scene = faults.serving()
        scene.changes.append(Change(at=scene.now, subject=DECODE, kind="stop"))
        scene.restart(DECODE).run(5)

        assert self.rows(scene, DECODE) == ["supports", "supports"]

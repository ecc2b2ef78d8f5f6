"""Stalls: what is found, how soon, and everything that only looks like one."""

import pytest

from faults import (
    abort_wedge,
    burst,
    cold_start,
    decode_hangs,
    flow,
    idle,
    long_prefill,
    lost_response,
    near_miss,
    orphaned_transfers,
    overload,
    serving,
    silence,
    stale_peers,
    stall_before_a_restart,
    stall_without_restart,
    still,
)
from scenes import CELL, DECODE, PREFILL, T0, Scene
from tandem.detect import detect
from tandem.records import Thresholds
from tandem.records import vocabulary as v
from watched import opened, watched


class TestSilent:
    """Nothing completes on a path."""

    def test_the_incident_is_found_within_six_seconds_of_silence(self):
        """A pair that goes silent is found at most 6 s after its last completion."""
        scene = stale_peers(silent_s=15)
        silent_at = scene.now - T0 - 15.0
        [(found_at, finding)] = [
            (at, one)
            for at, one in watched(scene)
            if one.kind == "silent-stall" and one.closed_at is None
        ]

        assert finding.subject == CELL
        assert found_at - silent_at <= 6.0
        assert [witness.side for witness in finding.witnesses] == ["client", "server"]
        assert all(witness.evidence for witness in finding.witnesses)
        assert set(finding.incarnations) == {PREFILL, DECODE}

    @pytest.mark.parametrize("paint", [stall_without_restart, abort_wedge, orphaned_transfers])
    def test_silence_is_found_whatever_its_cause(self, paint):
        """A silent pair is a silent stall, wherever its requests are held."""
        assert [kind for kind, _ in opened(paint())] == ["silent-stall"]

    def test_the_router_alone_is_witness_enough_when_probing_is_off(self):
        """With probes off, requests without responses are the client's testimony."""
        scene = serving()
        scene.probes = dict.fromkeys(scene.probes, "off")
        scene.run(10)
        silence(scene)
        scene.probes = dict.fromkeys(scene.probes, "off")
        [(at, finding)] = watched(scene.run(12))

        assert at <= 10 + 60 + 7
        assert "sent no response" in finding.witnesses[0].statement

    def test_without_live_queues_a_probe_must_be_stuck(self):
        """An engine that shows no queues is judged by a probe missed twice and flat counters."""
        scene = serving()
        scene.blind.add("loads")
        scene.observations = [one for one in scene.observations if one.source != "loads"]
        [(kind, at)] = opened(silence(scene).run(30))

        assert kind == "silent-stall"
        assert at - 60.0 <= 20.0

    def test_the_onset_is_the_last_progress(self):
        """The onset is when the last request completed, not when the finding was made."""
        [(_, finding)] = watched(stall_without_restart())

        assert finding.onset_at == pytest.approx(T0 + 60.0, abs=1.0)
        assert finding.found_at >= finding.onset_at + 4.0

    def test_the_summary_tells_that_health_lied(self):
        """What `/health` answered meanwhile is part of the summary."""
        [(_, finding)] = watched(stall_without_restart())

        assert "/health answered 200 in" in finding.summary

    def test_a_spinning_process_is_given_twice_as_long(self):
        """A core busy without a token is found after 8 s where its steps were short before."""
        [(kind, at)] = opened(decode_hangs())

        assert kind == "silent-stall"
        assert 8.0 <= at - 60.0 <= 9.5

    def test_a_process_of_long_steps_is_given_its_own_pace(self):
        """Who paused for six seconds before, and went on, may pause three times as long."""
        scene = serving()
        scene.decode.tokens, scene.decode.completes, scene.decode.forwards = 0.0, 0.0, False
        scene.decode.queues = {"running": 3.0}
        scene.run(6)
        scene.decode.tokens, scene.decode.completes, scene.decode.forwards = 40.0, 1.0, True
        scene.run(10)
        hangs = scene.now - T0
        still(scene)
        scene.decode.forwards, scene.decode.health, scene.decode.cpu = False, 503, 1.0
        scene.decode.queues = {"running": 3.0, "prealloc": 2.0}
        scene.offered, scene.active = 0.0, 5.0
        scene.probes = dict.fromkeys(scene.probes, "stuck")
        [(kind, at)] = opened(scene.run(30))

        assert kind == "silent-stall"
        assert 18.0 <= at - hangs <= 23.0

    def test_a_starved_process_that_seems_idle_is_given_its_own_pace(self):
        """With a twentieth of a core and nine seconds a chunk it is slow, and no stall."""
        scene = serving()
        still(scene)
        scene.prefill.forwards, scene.prefill.cpu = False, 0.05
        scene.prefill.queues, scene.decode.queues = {"waiting": 2.0}, {"transfer": 3.0}
        scene.offered, scene.active = 0.0, 3.0
        scene.run(3)
        scene.prefill.tokens = 256.0
        scene.run(1)
        scene.prefill.tokens = 0.0
        scene.run(8)
        scene.prefill.tokens = 256.0
        scene.run(1)
        scene.prefill.tokens = 0.0
        scene.run(20)

        assert [kind for kind, _ in opened(scene)] == ["slow-but-moving"]

    def test_idle_time_is_no_pause_of_a_step(self):
        """A long prompt after idle minutes is given its time from when it came."""
        scene = Scene().run(60)
        scene.prefill.forwards, scene.prefill.cpu = False, 0.15
        scene.prefill.queues, scene.decode.queues = {"waiting": 2.0}, {"transfer": 3.0}
        scene.active = 3.0

        assert opened(scene.run(11)) == []

    def test_a_decode_that_has_not_completed_any_yet_is_judged_by_its_tokens(self):
        """Engines leave a counter out until the first request of a life is done."""
        scene = serving().restart(DECODE)
        silence(scene).run(15)
        scene.observations = [
            one
            for one in scene.observations
            if one.name != v.REQUESTS_TOTAL or one.subject != DECODE or one.at < T0 + 62.0
        ]

        assert [kind for kind, _ in opened(scene)] == ["silent-stall"]

    def test_a_starved_step_is_waited_for(self):
        """A process that gets a fifth of a core and computes no token for 8 s is in a long step."""
        scene = still(serving())
        scene.prefill.forwards, scene.prefill.cpu = False, 0.2
        scene.prefill.queues, scene.decode.queues = {"running": 2.0}, {"transfer": 5.0}
        scene.offered, scene.active = 0.0, 7.0

        assert opened(scene.run(9)) == []

    def test_queues_on_the_metrics_page_do_not_count(self):
        """Frozen gauges are no floor: without live loads and a stuck probe there is no finding."""
        scene = serving()
        scene.blind.add("loads")
        scene.observations = [one for one in scene.observations if one.source != "loads"]
        silence(scene)
        scene.probes = dict.fromkeys(scene.probes, "late")

        assert opened(scene.run(20)) == []


class TestNotAStall:
    """Everything that must raise nothing that calls for action."""

    @pytest.mark.parametrize(
        "paint", [near_miss, idle, burst, lost_response], ids=lambda one: one.__name__
    )
    def test_nothing_is_found(self, paint):
        """Restarts with leases, idle gaps, bursts and lost answers are no stall."""
        assert opened(paint()) == []

    @pytest.mark.parametrize(
        ("paint", "since_s", "reason"),
        [
            (long_prefill, 90.0, "long prefill"),
            (overload, 90.0, "overload"),
            (cold_start, 27.0, "cold start"),
        ],
        ids=lambda one: getattr(one, "__name__", ""),
    )
    def test_slowness_is_told_by_its_reason_and_never_repaired(self, paint, since_s, reason):
        """A long prefill, overload and a cold start are slow but moving, after half a minute."""
        told = watched(paint())

        assert told
        assert {(one.kind, one.actionable) for _, one in told} == {("slow-but-moving", False)}
        assert any(f"({reason}; no stall)" in one.summary for _, one in told)
        assert all(at >= since_s for at, _ in told)

    def test_a_chunk_longer_than_the_flat_time_is_no_stall(self):
        """A prefill whose chunks take eight seconds of computing is not silent."""
        scene = long_prefill(0)
        scene.prefill.tokens = lambda second: 256.0 if second % 8 == 0 else 0.0

        assert [kind for kind, _ in opened(scene.run(29))] == []

    def test_counters_that_are_not_seen_stand_not_still(self):
        """When counters stop being seen nothing is claimed of them, whatever is held."""
        scene = serving()
        scene.blind.add("metrics")

        assert opened(silence(scene).run(30)) == []

    def test_queues_that_are_not_seen_hold_nothing(self):
        """A healthy path whose live queues stop being seen is no finding."""
        scene = serving()
        scene.blind.add("loads")

        assert opened(scene.run(60)) == []

    def test_no_client_no_stall(self):
        """Held hand-offs that no client waits for are not a silent stall."""
        scene = silence(serving())
        scene.active = 0.0
        scene.probes = dict.fromkeys(scene.probes, "off")

        assert "silent-stall" not in [kind for kind, _ in opened(scene.run(20))]

    def test_a_late_probe_of_empty_engines_is_no_stall(self):
        """Engines that show empty queues hold nothing: one answer may have got lost."""
        scene = still(serving(router=False))
        scene.probes[CELL] = "stuck"

        assert {(one.kind, one.actionable) for _, one in watched(scene.run(30))} == {
            ("health-lies", False)
        }

    def test_a_paused_collector_is_no_stall(self):
        """A gap of half a minute in every series is not silence."""
        scene = serving()
        scene.now += 30.0
        facts = scene.facts()

        assert detect(facts, (), Thresholds()) == ()

    def test_a_decode_that_is_away_is_not_judged(self):
        """While a decode restarts for ten seconds, its pair is not silent."""
        scene = serving()
        scene.prefill.queues = {"bootstrap": 4.0}
        scene.prefill.completes, scene.answered, scene.active = 0.0, 0.0, 4.0
        scene.probes = dict.fromkeys(scene.probes, "late")
        scene.restart(DECODE, away_s=9)
        flow(scene)

        assert opened(scene.run(15)) == []

    def test_a_slow_transfer_is_waited_for(self):
        """Where hand-offs take three seconds each, one in flight for twelve is not overdue."""
        scene = flow(Scene())
        scene.prefill.seconds_each = 3.0
        still(scene.run(60))
        scene.prefill.queues, scene.decode.queues = {"inflight": 1.0}, {"transfer": 1.0}
        scene.offered, scene.active = 0.0, 1.0
        scene.probes = dict.fromkeys(scene.probes, "late")

        assert opened(scene.run(10)) == []


class TestPartial:
    """Some hand-offs hang while others flow."""

    def test_one_stuck_hand_off_is_found_while_others_flow(self):
        """A floor of one that traffic does not explain is a partial stall after nine seconds."""
        scene = serving()
        scene.prefill.queues, scene.decode.queues = {"inflight": 1.0}, {"transfer": 1.0}
        [(at, finding)] = watched(scene.run(30))

        assert finding.kind == "partial-stall"
        assert 9.0 <= at - 60.0 <= 12.0
        assert "while" in finding.summary
        assert finding.onset_at == pytest.approx(T0 + 61.0, abs=1.0)

    def test_a_floor_that_traffic_explains_is_none(self):
        """A busy path with three hand-offs in flight on average is not stalled."""
        scene = serving(6.0)
        scene.prefill.seconds_each = 0.5
        scene.prefill.queues = {"inflight": lambda second: 1.0 + second % 5}
        scene.decode.queues = {"transfer": lambda second: 1.0 + second % 4}
        scene.active = 9.0

        assert opened(scene.run(90)) == []

    def test_a_pinned_floor_needs_a_second_process(self):
        """What only the prefill says is found late, once the decode denies it for 45 s."""
        scene = serving()
        scene.prefill.queues = {"inflight": 3.0}
        [(kind, at)] = opened(scene.run(70))

        assert kind == "partial-stall"
        assert 45.0 <= at - 60.0 <= 48.0

    def test_it_hands_its_onset_to_the_silence_that_follows(self):
        """The silent stall carries the partial one's onset, which closes in that very turn."""
        told = watched(stale_peers())
        [silent] = [one for _, one in told if one.kind == "silent-stall"]
        [closed] = [
            one
            for _, one in told
            if one.kind == "partial-stall" and one.closed_at == silent.found_at
        ]

        assert silent.onset_at == closed.onset_at
        assert silent.subject == closed.subject


class TestLifeOfAFinding:
    """One finding per cause, and its end."""

    def test_it_stays_the_same_while_it_holds(self):
        """A standing finding is returned unchanged, turn after turn."""
        scene = stall_without_restart()
        facts = scene.facts()
        first = detect(facts.at(scene.now - 5.0), (), Thresholds())
        later = detect(facts, first, Thresholds())

        assert later == first
        assert len(first) == 1

    def test_it_closes_when_nothing_was_seen_of_it_for_ten_seconds(self):
        """After recovery the finding closes once, ten to fourteen seconds later."""
        scene = silence(serving()).run(20)
        flow(scene).run(30)
        closings = [(at, one) for at, one in watched(scene) if one.closed_at is not None]

        assert len(closings) == 1
        assert 10.0 <= closings[0][0] - 80.0 <= 15.0

    def test_it_closes_with_the_life_it_speaks_of(self):
        """A restart of the prefill closes the finding at once."""
        scene = silence(serving()).run(20)
        flow(scene)
        scene.restart(PREFILL).run(5)
        [closing] = [(at, one) for at, one in watched(scene) if one.closed_at is not None]

        assert closing[0] == pytest.approx(82.0, abs=1.5)

    def test_a_short_recovery_does_not_split_it(self):
        """One request that gets through keeps the silent stall open."""
        scene = silence(serving()).run(15)
        scene.prefill.completes = scene.decode.completes = 1.0
        scene.run(1)
        silence(scene).run(15)

        assert [kind for kind, _ in opened(scene)] == ["silent-stall"]

    def test_a_useless_decode_restart_keeps_the_onset(self):
        """Restarting the decode under a stall opens a finding that began before the restart."""
        told = [one for _, one in watched(stall_before_a_restart()) if one.closed_at is None]

        assert [one.kind for one in told] == ["silent-stall", "silent-stall"]
        assert told[1].onset_at <= told[0].onset_at + 2.0

    def test_ids_are_deterministic(self):
        """The id is made of kind, subject and onset."""
        [(_, finding)] = watched(stall_without_restart())

        assert finding.id == f"silent-stall@{CELL}@{int(finding.onset_at)}"


class TestMatrix:
    """Several prefills or decodes."""

    def test_silent_cells_of_one_prefill_are_one_finding(self):
        """A prefill that serves neither decode is one finding, named by the prefill."""
        scene = serving(prefills=1, decodes=2)
        still(scene)
        scene.prefill.queues = {"inflight": 4.0}
        scene.offered, scene.active = 0.0, 4.0
        scene.probes = dict.fromkeys(scene.probes, "stuck")
        [(_, finding)] = watched(scene.run(12))

        assert finding.kind == "silent-stall"
        assert finding.subject == PREFILL

    def test_a_cell_that_both_ends_hold_is_the_silent_one(self):
        """Where one prefill and one decode hold requests, their cell is named, not its row."""
        scene = still(serving(prefills=2, decodes=2))
        scene.prefill.queues, scene.decode.queues = {"inflight": 4.0}, {"transfer": 4.0}
        scene.offered, scene.active = 0.0, 4.0
        scene.probes = dict.fromkeys(scene.probes, "stuck")
        [(_, finding)] = watched(scene.run(12))

        assert (finding.kind, finding.subject) == ("silent-stall", CELL)

    def test_a_partial_stall_names_the_cell_whose_probe_hangs(self):
        """With two decodes the stuck probe tells to which one hand-offs hang."""
        scene = serving(prefills=1, decodes=2)
        scene.prefill.queues = {"inflight": 2.0}
        scene.probes["prefill-0>decode-1"] = "stuck"
        [(_, finding)] = watched(scene.run(20))

        assert (finding.kind, finding.subject) == ("partial-stall", "prefill-0>decode-1")


def test_loads_that_stop_being_seen_claim_nothing():
    """When the live loads vanish together with progress no floor is claimed."""
    facts = silence(serving()).run(12).facts(without=(v.INFLIGHT_QUEUE_REQS,))
    found = detect(facts, (), Thresholds())

    assert all("inflight" not in one.summary for one in found)

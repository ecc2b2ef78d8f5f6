"""Findings that are no stall of their own: paused, restarting, health that lies, hazards."""

import msgspec
import pytest

from faults import flow, lost_response, serving, silence, still
from scenes import CELL, DECODE, PREFILL, ROUTER, T0, Scene
from tandem.detect import RECURS_S, detect
from tandem.records import Thresholds, Trait
from tandem.records import vocabulary as v
from watched import opened, watched


def told(scene):
    """What opened: its kind, and whether it calls for action."""
    return [(one.kind, one.actionable) for _, one in watched(scene) if one.closed_at is None]


def held(scene, seconds=12, name=DECODE):
    """Stop a member's process: it answers nothing, and its state is T."""
    scene.engines[name].health = None
    for _ in range(seconds):
        scene.run(1)
        scene.see("process", name, v.PROCESS_STATE, "T")
    return scene


def probed(scene, answer="completed", *, long=False):
    """A probe of the cell, now; a long one is told twice."""
    for label in ("", v.LONG) if long else ("",):
        scene.see("probe", CELL, v.PROBE, answer, label=label)


class TestPaused:
    """A process that somebody holds."""

    def test_a_stopped_process_is_paused_within_eight_seconds(self):
        """It is named with the state and what lets it go on, long before it would be down."""
        [(at, finding)] = watched(held(still(serving())))

        assert (finding.kind, finding.subject) == ("member-paused", DECODE)
        assert at - 60.0 <= 8.0
        assert "state T" in finding.summary
        assert "`kill -CONT" in finding.summary
        assert {one.side for one in finding.witnesses} == {"client", "server"}

    def test_stacks_taken_with_a_blink_are_none(self):
        """A process that is stopped for three seconds is not told of."""
        scene = held(still(serving()), 3)
        scene.see("process", DECODE, v.PROCESS_STATE, "S")

        assert told(flow(scene).run(10)) == []

    def test_a_stopped_process_that_answers_is_none(self):
        """A state T of a process whose port answers belongs to somebody else."""
        scene = serving()
        for _ in range(12):
            scene.run(1)
            scene.see("process", DECODE, v.PROCESS_STATE, "T")

        assert told(scene) == []


class TestHealthLies:
    """Green while dead, red while useful."""

    @pytest.fixture
    def dead(self):
        """Give a pair that takes requests and does nothing with them, its queues empty."""
        scene = still(serving())
        scene.offered, scene.active = 0.0, 3.0
        scene.probes = dict.fromkeys(scene.probes, "stuck")
        return scene

    def test_green_while_dead_is_found(self, dead):
        """200 in every look, two clients without an answer, nothing held and nothing computed."""
        [(at, finding)] = watched(dead.run(20))

        assert (finding.kind, finding.subject) == ("health-lies", CELL)
        assert finding.actionable
        assert at - 60.0 <= 12.0
        assert "green and dead" in finding.summary

    def test_one_client_alone_is_told_only(self, dead):
        """Where only one request waits, its answer may have got lost."""
        dead.active = 0.0
        dead.probes = {CELL: "stuck"}

        assert told(dead.run(20)) == [("health-lies", False)]

    def test_a_second_client_makes_it_a_matter(self, dead):
        """When a second one waits, the same finding comes to call for action."""
        dead.active, dead.probes = 0.0, {CELL: "stuck"}
        dead.run(20)
        [first] = detect(dead.facts(), (), Thresholds())
        dead.probes = {CELL: "stuck", ROUTER: "stuck"}
        [later] = detect(dead.run(6).facts(), (first,), Thresholds())

        assert (first.actionable, later.actionable) == (False, True)
        assert later.id == first.id

    def test_a_long_step_is_waited_for(self, dead):
        """While a process computes, a probe is left twenty seconds."""
        dead.decode.cpu = 1.0
        assert told(dead.run(18)) == []

    def test_red_while_useful_is_told_only(self):
        """An engine whose health times out while it completes requests is not to be restarted."""
        scene = serving()
        scene.decode.health = 503
        [(_, finding)] = watched(scene.run(40))

        assert (finding.kind, finding.subject) == ("health-lies", DECODE)
        assert not finding.actionable
        assert "do not restart it" in finding.summary

    def test_a_stall_that_is_red_is_a_stall(self):
        """Red and useless is a stall, not a lie."""
        scene = silence(serving())
        scene.decode.health = 503

        assert {kind for kind, _ in told(scene.run(20))} == {"silent-stall"}


class TestRestarting:
    """A member that does not stay up."""

    def crashed(self, times, serves):
        """Restart the decode again and again; it answers in between, or does not."""
        scene = still(serving())
        scene.prefill.health = 200
        scene.probes = dict.fromkeys(scene.probes, "failed")
        for _ in range(times):
            scene.decode.health = 200 if serves else None
            scene.restart(DECODE, away_s=3, settle=False)
            scene.run(12)
        return scene

    def test_lives_that_never_serve_are_a_crash_loop(self):
        """Three lives in a row that never answered: one finding, however many restarts follow."""
        told_of = [one for _, one in watched(self.crashed(6, serves=False))]
        [finding] = [one for one in told_of if one.kind == "member-restarting"]

        assert finding.subject == DECODE
        assert finding.actionable
        assert "none of its last 3 lives ever answered" in finding.summary

    def test_three_restarts_that_served_are_none(self):
        """Somebody who tries settings restarts a decode three times: that is no finding."""
        assert told(self.crashed(3, serves=True)) == []

    def test_five_are_told_only(self):
        """Five restarts in five minutes are worth a word."""
        assert ("member-restarting", False) in told(self.crashed(5, serves=True))


class TestHazard:
    """A decode restarted alone against an old prefill."""

    @pytest.fixture
    def restarted(self):
        """Give a pair whose decode was just restarted, with an engine that is hurt by it."""
        scene = serving()
        scene.traits.append(
            Trait(
                subject="*",
                name=v.T_DECODE_ALONE_RESTART_HURTS,
                at=T0,
                value=True,
                because="it keeps old peers",
            )
        )
        scene.probes = dict.fromkeys(scene.probes, None)
        scene.restart(DECODE)
        return flow(scene)

    def test_it_is_noted_and_calls_for_nothing(self, restarted):
        """The hazard is told with its reason, and no incident begins."""
        restarted.probes = dict.fromkeys(restarted.probes, None)
        [(_, finding)] = watched(restarted.run(10))

        assert (finding.kind, finding.subject) == ("restart-hazard", CELL)
        assert not finding.actionable
        assert "it keeps old peers" in finding.summary

    def test_probes_of_both_lengths_clear_it(self, restarted):
        """Once a short and a long probe completed it closes, and stays closed."""
        restarted.run(3)
        probed(restarted)
        restarted.run(3)
        probed(restarted, long=True)
        restarted.run(60)
        last = watched(restarted)[-1][1]

        assert (last.kind, last.closed_at is not None) == ("restart-hazard", True)
        assert told(restarted) == [("restart-hazard", False)]

    def test_a_long_probe_that_fails_escalates_it(self, restarted):
        """Short ones pass and long ones do not, twice: now it calls for action."""
        restarted.run(3)
        [first] = detect(restarted.facts(), (), Thresholds())
        probed(restarted)
        for _ in range(2):
            restarted.run(5)
            probed(restarted, "failed", long=True)
        [later] = detect(restarted.facts(), (first,), Thresholds())

        assert (later.id, later.actionable) == (first.id, True)

    def test_without_the_trait_a_restart_is_a_restart(self, restarted):
        """Where nothing says that it hurts, nothing is told."""
        restarted.traits.pop()

        assert told(restarted.run(10)) == []

    def test_a_pair_that_started_together_is_none(self):
        """A prefill that never met an earlier decode holds nothing of one."""
        scene = serving()
        scene.restart(PREFILL, settle=False).restart(DECODE, settle=False)
        scene.traits.append(
            Trait(subject="*", name=v.T_DECODE_ALONE_RESTART_HURTS, at=T0, value=True)
        )

        assert told(flow(scene).run(30)) == []


class TestCorruption:
    """Answers that are not what they were."""

    @staticmethod
    def answering(scene, *answers, cell=CELL):
        """Let a path tell its first, its last but one and its last answer, now."""
        scene.see("probe", cell, v.PROBE_ANSWERS, answers)
        return scene.run(1)

    def test_two_answers_that_differ_raise_a_suspicion(self):
        """A path that answers otherwise than before, twice, is suspected; no more is claimed."""
        [(_, finding)] = watched(self.answering(serving(), "12 9", "77 9", "77 9"))

        assert (finding.kind, finding.subject) == ("corruption-suspected", CELL)
        assert not finding.actionable
        assert "suspected" in finding.summary
        assert "12 9" in finding.summary
        assert all(one.evidence for one in finding.witnesses)

    @pytest.mark.parametrize("answers", [("12", "77", "12"), ("12", "12", "77"), ("12",) * 3])
    def test_one_answer_that_differs_is_a_near_tie(self, answers):
        """A single other answer is no finding, and the same one is none at all."""
        assert told(self.answering(serving(), *answers)) == []

    @pytest.mark.parametrize(("versions", "found"), [("111", ["prefill-2"]), ("123", [])])
    def test_a_path_that_differs_from_all_others_is_suspected(self, versions, found):
        """Two others of the same versions agree, and this one says something else."""
        scene = serving(prefills=3, decodes=1)
        for number, (name, version) in enumerate(zip(scene.engines, versions + "1", strict=True)):
            scene.traits.append(Trait(subject=name, name=v.T_ENGINE_VERSION, at=T0, value=version))
            if name != DECODE:
                answer = "77" if number == 2 else "12"
                self.answering(scene, *[answer] * 3, cell=f"{name}>{DECODE}")

        assert [one.subject for _, one in watched(scene)] == [f"{one}>{DECODE}" for one in found]


class TestRouterCounts:
    """A router whose counts disagree with its engines'."""

    def test_an_answer_that_got_lost_is_told_only(self):
        """A request that is open for a minute on the router and on no engine is told."""
        scene = lost_response()

        assert told(scene.run(60)) == [("router-disagrees", False)]

    def test_engines_that_are_never_empty_clear_it(self):
        """Where engines always hold something nothing is said of the router."""
        scene = serving()
        scene.active, scene.decode.queues["running"] = 1.0, 1.0

        assert told(scene.run(90)) == []

    def test_a_breaker_that_stays_open_is_a_disagreement(self):
        """A worker refused for minutes, whose direct probes all complete."""
        scene = serving()
        for _ in range(170):
            scene.run(1)
            scene.see("router", ROUTER, v.WORKER_BREAKER_OPEN, True, label=DECODE)
        [(at, finding)] = watched(scene)

        assert (finding.kind, finding.actionable) == ("router-disagrees", True)
        assert at >= 210.0

    def test_a_breaker_that_tries_again_is_none(self):
        """One that closes after a minute did its work."""
        scene = serving()
        for second in range(170):
            scene.run(1)
            value = second % 70 < 60
            scene.see("router", ROUTER, v.WORKER_BREAKER_OPEN, value, label=DECODE)

        assert told(scene) == []


class TestWaitedByDecode:
    """Hand-offs that a decode waits for and no prefill has."""

    def test_a_decode_that_waits_for_nobody_is_a_partial_stall(self):
        """While others flow and clients wait, a transfer queue pinned without a sender is found."""
        scene = serving()
        scene.decode.queues = {"transfer": 2.0}
        scene.answered, scene.active = 1.6, 4.0
        [(at, finding)] = watched(scene.run(30))

        assert (finding.kind, finding.subject) == ("partial-stall", DECODE)
        assert at - 60.0 <= 12.0

    def test_a_prefill_that_computes_is_waited_for(self):
        """While any prefill has a request in hand the decode waits for that."""
        scene = serving()
        scene.decode.queues = {"transfer": 2.0}
        scene.prefill.queues = {"running": 1.0}
        scene.answered, scene.active = 1.6, 4.0

        assert told(scene.run(40)) == []


class TestCounters:
    """What a counter that never moved proves."""

    @staticmethod
    def unwired(scene, *names):
        """Show the scene with counters that are always zero."""
        scene.observations = [
            msgspec.structs.replace(one, value=0.0) if one.name in names else one
            for one in scene.observations
        ]
        return scene

    def test_unwired_hand_off_counters_are_no_partial_stall(self):
        """A busy path whose hand-offs are not counted is judged by its requests."""
        scene = serving(6.0)
        scene.prefill.queues = {"inflight": lambda second: 1.0 + second % 5}
        scene.decode.queues = {"transfer": lambda second: 1.0 + second % 4, "running": 9.0}
        scene.active = 9.0
        scene.run(90)

        assert told(self.unwired(scene, v.TRANSFERS_TOTAL, v.TRANSFER_SECONDS_TOTAL)) == []

    def test_unwired_tokens_of_a_busy_engine_are_no_silence(self):
        """A long prefill of an engine that counts no tokens computes: nothing is claimed."""
        scene = still(serving())
        scene.prefill.queues, scene.decode.queues = {"waiting": 2.0}, {"transfer": 3.0}
        scene.prefill.cpu = 1.0
        scene.offered, scene.active = 0.0, 3.0
        scene.probes = dict.fromkeys(scene.probes, "stuck")

        assert told(self.unwired(scene.run(30), v.PROGRESS_TOKENS_TOTAL)) == []

    def test_unwired_tokens_of_idle_engines_are_silence(self):
        """Where the processes do nothing either, the stall is found all the same."""
        scene = silence(serving()).run(20)

        assert told(self.unwired(scene, v.PROGRESS_TOKENS_TOTAL)) == [("silent-stall", True)]


class TestLooking:
    """Gaps and clocks are not the deployment's."""

    def test_a_gap_in_looking_closes_nothing(self):
        """A stall that stands while the collector is paused for a minute is the same after it."""
        scene = silence(serving()).run(20)
        scene.now += 60.0
        scene.run(15)

        assert [one.closed_at for _, one in watched(scene)] == [None]

    def test_a_gap_is_no_floor(self):
        """Six seconds without a look do not become part of "never below"."""
        scene = serving()
        scene.prefill.queues, scene.decode.queues = {"inflight": 1.0}, {"transfer": 1.0}
        scene.run(2)
        flow(scene)
        scene.now += 7.0
        scene.prefill.queues, scene.decode.queues = {"inflight": 1.0}, {"transfer": 1.0}

        assert told(flow(scene.run(3)).run(20)) == []

    def test_what_is_of_the_future_is_not_seen(self):
        """After a clock went back, what was seen under the later time speaks of no moment now."""
        scene = silence(serving()).run(30)
        facts = scene.facts().at(T0 + 55.0)
        facts._until = float("inf")

        assert detect(facts, (), Thresholds()) == ()


class TestRecurrence:
    """What comes back is the same finding."""

    @pytest.fixture
    def cleared(self):
        """Give a scene whose stall has cleared, and the finding as it closed."""
        scene = silence(serving()).run(20)
        [opened_one] = detect(scene.facts(), (), Thresholds())
        flow(scene).run(30)
        [closed] = detect(scene.facts(), (opened_one,), Thresholds())
        return scene, closed

    def test_it_opens_again_under_its_own_id(self, cleared):
        """The same id and onset, with the moment at which it came back."""
        scene, closed = cleared
        again_at = scene.now
        silence(scene).run(20)
        [again] = detect(scene.facts(), (closed,), Thresholds())

        assert (again.id, again.onset_at, again.closed_at) == (closed.id, closed.onset_at, None)
        assert again.recurred_at == (pytest.approx(again_at, abs=2.0),)

    def test_other_lives_make_another_finding(self, cleared):
        """After a restart of the pair it is a new one."""
        scene, closed = cleared
        scene.restart(PREFILL).restart(DECODE)
        flow(scene).run(20)
        silence(scene).run(20)
        [other] = detect(scene.facts(), (closed,), Thresholds())

        assert other.id != closed.id

    def test_long_after_it_is_another(self, cleared):
        """What cleared more than ten minutes ago is over."""
        scene, closed = cleared
        before = msgspec.structs.replace(closed, closed_at=closed.closed_at - RECURS_S)
        silence(scene).run(20)
        [other] = detect(scene.facts(), (before,), Thresholds())

        assert other.recurred_at == ()

    def test_what_stays_away_is_not_returned(self, cleared):
        """A finding that cleared is told once, and never again while it stays away."""
        scene, closed = cleared

        assert detect(scene.run(5).facts(), (closed,), Thresholds()) == ()


def test_several_prefills_that_hang_on_one_decode_are_one_finding():
    """One decode that acknowledges nobody is one partial stall, named by the decode."""
    scene = serving(prefills=2, decodes=1)
    for name in ("prefill-0", "prefill-1"):
        scene.engines[name].queues = {"inflight": 2.0}
    scene.decode.queues = {"transfer": 4.0}
    found = [one for _, one in watched(scene.run(20))]

    assert [(one.kind, one.subject) for one in found] == [("partial-stall", DECODE)]


def test_router_errors_are_a_second_witness_of_failures():
    """Failures that only the prefill counts are told when the router answers with errors too."""
    scene = serving()
    count, scene.prefill.fails = 0, 0.25
    for _ in range(30):
        scene.run(1)
        count += int(scene.now) % 5 == 0
        scene.see("router", ROUTER, v.ROUTER_RESPONSES_TOTAL, count, label="500")
    [(_, finding)] = watched(scene)

    assert finding.kind == "transfer-failures-rising"
    assert "HTTP 500" in finding.summary


def test_a_quiet_deployment_is_quiet():
    """A healthy matrix of four prefills and four decodes tells nothing."""
    assert opened(serving(prefills=4, decodes=4)) == []


def test_an_empty_past_is_no_finding():
    """Nothing seen at all is nothing found."""
    assert detect(Scene().facts(), (), Thresholds()) == ()

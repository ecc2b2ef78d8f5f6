"""Ranks that wait for each other: only stacks name it, and forward steps exclude it."""

import pytest

import faults
from answers import answers, results
from judged import facts_of, judged
from scenes import DECODE, PREFILL, SWITCH
from tandem.failures.collective_desync import MODE
from tandem.records import Trait
from tandem.records import vocabulary as v


class TestForwards:
    """Forward steps that still complete."""

    def test_steps_on_every_engine_exclude_it(self):
        """A silent pair whose health checks run forward steps has no desync."""
        said = results(MODE, facts_of(faults.stale_peers))["forwards-still-complete"]

        assert (said.answer, said.strength) == ("contradicts", "decisive")
        assert "/health, which runs one, answered 200" in said.because

    def test_health_is_only_quoted_where_it_runs_a_step(self):
        """An engine whose health says nothing of steps is judged by its counters alone."""
        scene = faults.stall_without_restart()
        scene.traits = [one for one in scene.traits if one.name != v.T_HEALTH_RUNS_FORWARD]
        said = results(MODE, scene)["forwards-still-complete"]

        assert said.answer == "contradicts"
        assert "/health" not in said.because

    def test_an_engine_that_stopped_supports_it_a_little(self):
        """No step on one engine fits it, as it fits any fault inside an engine."""
        found = answers(MODE, facts_of(faults.decode_hangs))

        assert found["forwards-still-complete"] == "supports moderate"
        assert found["one-engine-stopped"] == "supports weak"
        assert found["computes-without-progress"] == "supports weak"

    def test_idle_excludes_nothing(self):
        """A stopped engine that uses no CPU is no evidence against it."""
        scene = faults.decode_hangs()
        scene.decode.cpu = 0.0
        found = answers(MODE, scene.run(20))

        assert found["computes-without-progress"] == "unknown"


class TestStacks:
    """Where the ranks stand."""

    def test_different_calls_confirm_it(self):
        """Two ranks in different collectives of an engine that stands still are the failure."""
        found = answers(MODE, facts_of(faults.ranks_apart))

        assert found["ranks-in-different-calls"] == "supports decisive"

    def test_the_same_call_speaks_against_it(self):
        """Ranks that all wait in one call are not apart."""
        scene = faults.decode_hangs()
        for rank in range(2):
            scene.see("stack", DECODE, v.STACK, "all_reduce (c10d.py:1)", label=f"1/1 TP{rank}")

        assert answers(MODE, scene)["ranks-in-different-calls"] == "contradicts strong"

    def test_processes_count_as_ranks_by_their_scheduler_loop(self):
        """Main threads of several scheduler processes are ranks, whatever they are named."""
        scene = faults.decode_hangs()
        for pid, call in ((41, "all_gather"), (42, "broadcast")):
            frames = f"{call} (c10d.py:1)\nevent_loop_normal (scheduler.py:9)"
            scene.see("stack", DECODE, v.STACK, frames, label=f"{pid}/{pid} MainThread")

        assert answers(MODE, scene)["ranks-in-different-calls"] == "supports decisive"

    def test_helper_threads_of_one_process_are_no_ranks(self):
        """Threads of one process wait in different calls as a matter of course."""
        scene = faults.decode_hangs()
        for thread, call in ((41, "wait"), (42, "recv_multipart"), (43, "send")):
            frames = f"{call} (threading.py:1)\nforward (loop.py:9)"
            scene.see("stack", DECODE, v.STACK, frames, label=f"41/{thread} helper")

        assert answers(MODE, scene)["ranks-in-different-calls"] == "unknown"

    def test_without_stacks_they_are_asked_for(self):
        """The unknown names the stacks of every rank, and a stopped engine stays undetermined."""
        said = judged(faults.decode_hangs())

        assert said.verdict == "undetermined"
        assert said.next_observation is not None
        assert "stacks of every rank" in said.next_observation


class TestSingleRank:
    """Engines that have nobody to fall out of step with."""

    @pytest.mark.parametrize(("size", "answer"), [("1", "contradicts strong"), ("4", "unknown")])
    def test_one_rank_each_speaks_against_it(self, size, answer):
        """Only engines of a single rank cannot desync."""
        scene = faults.decode_hangs()
        for name in (PREFILL, DECODE):
            scene.see("server_info", name, v.SERVER_ARG, size, label="tp_size")

        assert answers(MODE, scene)["single-rank"] == answer


class TestOverlap:
    """The overlap schedule, one way into it."""

    def test_the_flag_in_every_live_command_line_closes_it(self):
        """The flag, known by a trait, in the command line of both engines."""
        found = answers(MODE, facts_of(faults.stale_peers))

        assert found["overlap-switched-off"] == "contradicts weak"

    def test_one_engine_without_the_flag_leaves_it_open(self):
        """The flag on one side alone closes nothing."""
        scene = faults.serving()
        scene.command_lines[DECODE] = ("python", "-m", "engine")

        assert answers(MODE, scene.run(5))["overlap-switched-off"] == "unknown"

    def test_a_command_line_of_a_dead_life_does_not_count(self):
        """What an earlier life was started with says nothing of the present one."""
        scene = faults.serving().restart(DECODE).run(3)
        life = f"{DECODE}:{scene.lives[DECODE]:.0f}"
        scene.observations = [
            one
            for one in scene.observations
            if one.name != v.COMMAND_LINE or one.incarnation != life
        ]

        assert answers(MODE, scene)["overlap-switched-off"] == "unknown"

    def test_an_environment_variable_can_be_the_switch(self):
        """A `VAR=value` label is looked for in the environment."""
        scene = faults.serving()
        scene.traits = [
            Trait(subject="*", name=v.T_SWITCHES_OFF, at=0.0, label="OVERLAP=0", value=MODE.slug)
        ]
        for name in (PREFILL, DECODE):
            scene.see("process", name, v.ENVIRONMENT, "0", label="OVERLAP")

        assert answers(MODE, scene)["overlap-switched-off"] == "contradicts weak"

    def test_a_server_argument_stands_in_for_a_command_line(self):
        """Where no command line is seen the engine's own argument is."""
        scene = faults.serving()
        for name in (PREFILL, DECODE):
            label = SWITCH.lstrip("-").replace("-", "_")
            scene.see("server_info", name, v.SERVER_ARG, "True", label=label)
        facts = scene.facts(without=(v.COMMAND_LINE,))

        assert answers(MODE, facts)["overlap-switched-off"] == "contradicts weak"

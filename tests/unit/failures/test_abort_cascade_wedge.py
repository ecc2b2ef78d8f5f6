"""The abort cascade: aborts before, bootstrapping stuck, and everything that excludes it."""

import faults
from answers import answers, results
from judged import facts_of, judged
from scenes import DECODE, PREFILL
from tandem.failures.abort_cascade_wedge import MODE
from tandem.records import Trait
from tandem.records import vocabulary as v


def stack(scene, thread):
    """Add one stack of the prefill."""
    frames = "recv (zmq.py:1)\nThread._bootstrap_inner (threading.py:1)\nThread._bootstrap (t.py:1)"
    scene.see("stack", PREFILL, v.STACK, frames, label=f"7/8 {thread}")
    return scene


class TestWedge:
    """The failure itself."""

    def test_aborts_and_a_stuck_bootstrap_queue_support_it(self):
        """Thirty aborts before the onset and a pinned bootstrap queue are its signature."""
        found = answers(MODE, faults.abort_wedge(logged=False))

        assert found["aborts-before-the-onset"] == "supports moderate"
        assert found["stuck-in-bootstrapping"] == "supports strong"
        assert found["handoffs-stopped"] == "supports weak"
        assert found["bootstrap-thread"] == "unknown"

    def test_without_log_or_stacks_it_is_best_supported(self):
        """The signature alone is no proof, and the stacks are what to take next."""
        said = judged(faults.abort_wedge(logged=False))

        assert (said.verdict, said.cause) == ("best_supported", MODE.slug)
        assert said.next_observation == f"stacks of every thread of {PREFILL}"

    def test_its_log_line_confirms_it(self):
        """The engine's own word of the thread's death is decisive."""
        assert answers(MODE, facts_of(faults.abort_wedge))["bootstrap-thread"] == (
            "supports decisive"
        )

    def test_stacks_without_the_thread_support_it(self):
        """A prefill without a bootstrap thread has lost it."""
        scene = stack(faults.abort_wedge(logged=False), "scheduler")

        assert answers(MODE, scene)["bootstrap-thread"] == "supports moderate"

    def test_a_release_known_to_break_supports_it(self):
        """A trait that aborts are unsafe here makes it likelier."""
        scene = faults.abort_wedge(logged=False)
        scene.traits.append(
            Trait(subject="*", name=v.T_ACTIVE_PROBE_SAFE, at=0.0, value=False, because="0.5.14")
        )
        said = results(MODE, scene)["release-known-bad"]

        assert (said.answer, said.strength) == ("supports", "moderate")
        assert "0.5.14" in said.because


class TestExcluded:
    """What rules it out."""

    def test_the_incident_is_not_it(self):
        """Requests that stick in flight passed bootstrapping, and nobody aborted."""
        found = answers(MODE, facts_of(faults.stale_peers))

        assert found["stuck-in-bootstrapping"] == "contradicts strong"
        assert found["aborts-before-the-onset"] == "contradicts strong"
        assert found["release-known-bad"] == "contradicts moderate"

    def test_a_hand_off_that_completes_excludes_it(self):
        """The dead thread would have had to serve it."""
        assert answers(MODE, faults.serving())["handoffs-stopped"] == "contradicts decisive"

    def test_a_live_thread_in_the_stacks_speaks_against_it(self):
        """A bootstrap thread that is there did not die."""
        scene = stack(faults.abort_wedge(logged=False), "bootstrap")

        assert answers(MODE, scene)["bootstrap-thread"] == "contradicts strong"

    def test_an_engine_that_does_not_step_is_another_fault(self):
        """A decode that hangs fills the bootstrap queue without any wedge."""
        found = answers(MODE, facts_of(faults.decode_hangs))

        assert found["stuck-in-bootstrapping"] == "supports strong"
        assert found["forwards-run"] == "contradicts strong"

    def test_aborts_after_the_onset_do_not_count(self):
        """Clients that give up because of a stall did not cause it."""
        scene = faults.silence(faults.serving()).run(10)
        scene.prefill.aborts = scene.decode.aborts = 3.0

        assert answers(MODE, scene.run(10))["aborts-before-the-onset"] == "contradicts strong"

    def test_aborts_of_a_restart_are_that_restarts(self):
        """What a dying decode's clients abort is no burst of aborts."""
        scene = faults.serving()
        scene.prefill.aborts = 10.0
        scene.restart(DECODE)
        scene.prefill.aborts = 0.0
        faults.silence(faults.flow(scene).run(15)).run(15)

        assert answers(MODE, scene)["aborts-before-the-onset"] == "contradicts strong"

    def test_an_empty_bootstrap_queue_speaks_against_it(self):
        """Where nothing waits in bootstrapping nothing is wedged there."""
        assert answers(MODE, faults.idle())["stuck-in-bootstrapping"] == "contradicts strong"

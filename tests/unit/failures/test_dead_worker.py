"""A member that is gone, a zombie, or mute; and members that live."""

import pytest

import faults
from answers import answers, results
from judged import facts_of, judged
from scenes import DECODE, PREFILL, ROUTER
from tandem.failures.dead_worker import MODE
from tandem.records import vocabulary as v


def paused(member, seconds):
    """Give a scene in which a member is held in state T."""
    scene = faults.still(faults.serving())
    scene.engines[member].health = None
    for _ in range(seconds):
        scene.run(1)
        scene.see("process", member, v.PROCESS_STATE, "T")
    return scene


class TestDead:
    """The failure itself."""

    def test_a_process_gone_for_long_is_decisive(self):
        """A process that is gone for ten seconds or more is the failure."""
        found = answers(MODE, facts_of(faults.dead_decode))

        assert found["process-gone"] == "supports decisive"
        assert found["answers-http"] == "supports strong"

    def test_a_process_gone_for_a_moment_may_come_back(self):
        """In the first seconds it may be a restart under way, and nothing is claimed."""
        scene = faults.dead_decode(5)

        assert answers(MODE, scene)["process-gone"] == "supports moderate"
        assert judged(scene).verdict == "none"

    def test_a_zombie_is_dead(self):
        """A zombie has a pid and no life."""
        scene = faults.serving()
        for _ in range(15):
            scene.run(1)
            scene.see("process", DECODE, v.PROCESS_STATE, "Z")
        said = results(MODE, scene)["process-gone"]

        assert (said.answer, said.strength) == ("supports", "decisive")
        assert "a zombie" in said.because

    def test_a_mute_process_is_best_supported_with_the_routers_word(self):
        """A process that lives and answers nothing is supported, not proven."""
        scene = faults.serving()
        scene.decode.health = None
        scene.run(20)
        scene.see("router", ROUTER, v.WORKER_HEALTHY, value=False, label=DECODE)
        found = answers(MODE, scene)

        assert found["process-gone"] == "contradicts weak"
        assert found["answers-http"] == "supports strong"
        assert found["router-unhealthy"] == "supports weak"

    @pytest.mark.parametrize("member", [PREFILL, DECODE])
    def test_a_stopped_process_is_the_cause_and_can_go_on(self, member):
        """State T is seen from outside: it is confirmed, with the word that ends it."""
        scene = paused(member, 15)

        found = judged(scene)

        assert (found.verdict, found.cause) == ("confirmed", "dead-worker")
        said = results(MODE, scene, member)["process-gone"].because
        assert "stopped (state T)" in said
        assert "kill -CONT" in said

    def test_a_process_stopped_for_a_moment_is_not(self):
        """Whoever takes stacks stops a process for a moment: nothing is claimed."""
        assert judged(paused(DECODE, 1)).verdict == "none"

    def test_its_log_supports_it(self):
        """A crash line in the log makes it likelier."""
        scene = faults.dead_decode()
        scene.see("log", DECODE, v.LOG_SIGNATURE, 1, label="subprocess-crashed")

        assert answers(MODE, scene)["died-in-its-log"] == "supports moderate"

    def test_the_subject_can_be_the_member(self):
        """Asked of a member, it speaks of that member alone."""
        facts = facts_of(faults.dead_decode)

        assert answers(MODE, facts, DECODE)["process-gone"] == "supports decisive"
        assert answers(MODE, facts, PREFILL)["process-gone"] == "contradicts strong"


class TestAlive:
    """What rules it out."""

    def test_answers_of_every_member_exclude_it(self):
        """The silent incident is excluded: everybody lives and answers."""
        found = answers(MODE, facts_of(faults.stale_peers))

        assert found["process-gone"] == "contradicts strong"
        assert found["answers-http"] == "contradicts decisive"

    def test_what_was_not_asked_is_unknown(self):
        """Members that nobody asked lately are neither dead nor alive."""
        scene = faults.serving()
        scene.now += 60.0

        assert answers(MODE, scene)["answers-http"] == "unknown"

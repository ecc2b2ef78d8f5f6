"""Overload: slow, queued, moving; never named where anything stands still."""

import faults
from answers import answers
from judged import facts_of, judged
from scenes import DECODE
from tandem.failures.overload_not_stall import MODE
from tandem.records import vocabulary as v


class TestOverload:
    """The thing itself, which is no fault."""

    def test_full_queues_and_moving_counters_are_overload(self):
        """Work that goes on and queues that never empty support it."""
        found = answers(MODE, facts_of(faults.overload))

        assert found["work-goes-on"] == "supports moderate"
        assert found["requests-wait-their-turn"] == "supports strong"
        assert found["handoffs-explained"] == "unknown"

    def test_a_long_prefill_is_overload_too(self):
        """Nothing is repaired for a long prompt."""
        said = judged(faults.long_prefill(40))

        assert (said.verdict, said.cause) == ("best_supported", MODE.slug)
        assert said.modes[0].scope == "nothing"


class TestExcluded:
    """What rules it out."""

    def test_counters_that_stand_still_exclude_it(self):
        """A silent pair is not slow."""
        found = answers(MODE, facts_of(faults.stale_peers))

        assert found["work-goes-on"] == "contradicts decisive"

    def test_hand_offs_that_traffic_does_not_explain_speak_against_it(self):
        """In a partial stall work goes on, but the hand-offs held are not waiting their turn."""
        scene = faults.serving()
        scene.prefill.queues, scene.decode.queues = {"inflight": 2.0}, {"transfer": 1.0}
        found = answers(MODE, scene.run(20))

        assert found["work-goes-on"] == "supports moderate"
        assert found["handoffs-explained"] == "contradicts strong"
        assert found["requests-wait-their-turn"] == "contradicts strong"

    def test_a_subject_with_one_end_is_judged_by_it(self):
        """Asked of one decode, that decode's own work is what counts."""
        facts = facts_of(faults.overload)

        assert answers(MODE, facts, DECODE)["work-goes-on"] == "supports moderate"

    def test_without_counters_nothing_is_said(self):
        """Where no progress was seen it is unknown."""
        facts = facts_of(faults.stale_peers).without(
            v.PROGRESS_TOKENS_TOTAL, v.REQUESTS_TOTAL, v.TRANSFERS_TOTAL
        )

        assert answers(MODE, facts)["work-goes-on"] == "unknown"

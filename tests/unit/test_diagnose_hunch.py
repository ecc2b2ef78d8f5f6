"""The hunch: understood, answered by name, and without any weight."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import faults
from judged import ANSWERS, DEGRADED, facts_of, judge, judged
from scenes import DECODE
from tandem.failures import discover
from tandem.records import vocabulary as v

MODES = discover()
PHRASES = [*(m.slug for m in MODES), *(name for m in MODES for name in m.aliases), "", "gremlins"]


class TestWeight:
    """A hunch orders the questions; it never moves a score."""

    @given(
        st.sampled_from(list(ANSWERS)), st.one_of(st.sampled_from(PHRASES), st.text(max_size=40))
    )
    def test_no_hunch_moves_anything(self, paint, hunch):
        """But for its own answer, a diagnosis with a hunch is the diagnosis without."""
        without = judge(facts_of(paint))
        with_it = judge(facts_of(paint), hunch)

        assert msgspec.structs.replace(with_it, hunch=None) == without


class TestAnswer:
    """What becomes of it."""

    @pytest.mark.parametrize(
        "asked",
        ["overlap schedule", "the overlap change", "Overlap-Schedule!", "maybe it is the overlap"],
    )
    def test_the_incidents_hunch_is_ruled_out_by_name(self, asked):
        """The wrong hunch of the incident is understood and ruled out, twice over."""
        said = judge(facts_of(faults.stale_peers), asked).hunch

        assert said is not None
        assert (said.asked, said.matched, said.answer) == (asked, "overlap-schedule", "ruled_out")
        assert "--disable-overlap-schedule" in said.because
        assert "forward steps still complete" in said.because
        assert said.evidence

    def test_it_is_ruled_out_without_the_command_line_as_well(self):
        """Forward steps that complete rule it out where no command line was seen."""
        facts = facts_of(faults.stale_peers).without(v.COMMAND_LINE)
        said = judge(facts, "overlap schedule").hunch

        assert said is not None
        assert said.answer == "ruled_out"
        assert "--disable" not in said.because

    def test_its_mechanism_is_ruled_out_even_where_the_failure_is_confirmed(self):
        """A desync with the overlap schedule off is not the overlap schedule's."""
        facts = facts_of(faults.ranks_apart)

        assert judge(facts).cause == "collective-desync"
        answers = {
            asked: said.answer
            for asked in ("overlap schedule", "collective desync")
            if (said := judge(facts, asked).hunch)
        }
        assert answers == {"overlap schedule": "ruled_out", "collective desync": "confirmed"}

    @pytest.mark.parametrize(
        ("paint", "asked", "matched", "answer"),
        [
            (faults.stale_peers, "decode restarts", "decode-restart", "supported"),
            (faults.stale_peers, DEGRADED, DEGRADED, "supported"),
            (faults.dead_decode, "a crash", "crash", "confirmed"),
            (faults.decode_hangs, "nccl hang", "nccl-hang", "open"),
            (faults.stale_peers, "solar flares", None, "not_understood"),
        ],
    )
    def test_each_standing_is_an_answer(self, paint, asked, matched, answer):
        """Confirmed, supported, open and not understood are said as such."""
        said = judge(facts_of(paint), asked).hunch

        assert said is not None
        assert (said.matched, said.answer) == (matched, answer)

    def test_a_change_can_be_the_hunch(self):
        """A flag or variable in the ledger is understood by its name."""
        scene = faults.serving()
        scene.change(DECODE, "SGLANG_SM120_MMA_TARGET_CTAS", "compute")
        scene.change(DECODE, "NIXL_BACKEND", "kv-transfer")
        faults.after_restarts(scene.run(30))
        cleared = judged(scene, "target ctas sm120").hunch
        left = judged(scene, "nixl backend").hunch

        assert cleared is not None
        assert (cleared.matched, cleared.answer) == ("SGLANG_SM120_MMA_TARGET_CTAS", "ruled_out")
        assert left is not None
        assert (left.matched, left.answer) == ("NIXL_BACKEND", "open")

    @pytest.mark.parametrize("asked", [None, "", "   "])
    def test_no_hunch_has_no_answer(self, asked):
        """Nothing asked, nothing answered."""
        assert judge(facts_of(faults.serving), asked).hunch is None

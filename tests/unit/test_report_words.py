"""How a report writes times, lengths, clauses and changes."""

import pytest

import night
from tandem.records import Change
from tandem.report.words import changed, clock, length, sentence


class TestWords:
    @pytest.mark.parametrize(
        ("seconds", "said"),
        [(0.594, "0.59 s"), (9.84, "9.8 s"), (125, "2 min 5 s"), (61_440, "17 h 4 min")],
    )
    def test_lengths_read_naturally(self, seconds, said):
        """Two figures are enough for a person."""
        assert length(seconds) == said

    def test_a_clause_becomes_a_sentence(self):
        """A capital where a plain word begins it; flags and names keep their spelling."""
        assert sentence("the floor is 8") == "The floor is 8."
        assert sentence("--flag is off") == "--flag is off."
        assert sentence("decode-0 died.") == "decode-0 died."

    def test_a_change_reads_from_before_to_after(self):
        """A missing side is called absent; an event of a life is a sentence."""
        flag = Change(at=0, subject="d", kind="flag", what="--x", after="96")

        assert changed(flag) == "--x absent -> 96"
        assert changed(Change(at=0, subject="d", kind="restart")) == "restarted"
        assert (
            changed(Change(at=0, subject="d", kind="restart", before="7:90", after="8:91"))
            == "restarted (pid 7, now pid 8)"
        )
        assert changed(Change(at=0, subject="d", kind="start", after="a1b2")) == "started (a1b2)"

    def test_a_moment_of_the_day_is_a_time(self):
        """Another day's carries its date."""
        assert clock(night.ONSET, night.NOW) == "21:00:00"
        assert clock(night.ONSET - 86_400, night.NOW) == "2025-11-28 21:00:00"

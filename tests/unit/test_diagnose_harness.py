"""The harness on made-up modes: weights, standings, verdicts, crashes, and the next observation."""

from collections.abc import Callable

import pytest

import faults
from judged import facts_of
from scenes import CELL, Scene
from tandem.detect import detect
from tandem.diagnose import diagnose
from tandem.diagnose.weigh import MARGIN, SCORE_MIN, WEIGHTS
from tandem.facts import Facts
from tandem.ports import Mode
from tandem.records import Diagnosis, TestResult, Thresholds
from tandem.records.diagnosis import Answer, Strength

Test = Callable[[Facts, str], TestResult]


def says(name: str, answer: Answer, strength: Strength, *, collect: str | None = None) -> Test:
    """Make a test with a fixed answer, on evidence of its own."""

    def test(facts: Facts, subject: str) -> TestResult:
        return TestResult(
            test=name,
            answer=answer,
            strength=strength,
            because=f"{name} {answer}",
            evidence=(sum(map(ord, name)),),
            collect=collect,
        )

    return test


def mode(slug: str, *tests: Test, scope: str = "pair", needs: tuple[str, ...] = ()) -> Mode:
    """Make a mode of some tests."""
    return Mode(
        slug=slug,
        incident_class=f"class-of-{slug}",
        scope=scope,
        safety="",
        tests=tests,
        needs=needs,
    )


def stalled(*modes: Mode) -> Diagnosis:
    """Diagnose a silent pair with some modes."""
    facts = facts_of(faults.stall_without_restart)
    return diagnose(facts, detect(facts, (), Thresholds()), modes, None)


def standing(said: Diagnosis, slug: str) -> str:
    """The standing of one mode."""
    return next(one.standing for one in said.modes if one.mode == slug)


STRONG = says("one", "supports", "strong")
MODERATE = says("two", "supports", "moderate")
DECISIVE = says("seen", "supports", "decisive")


class TestVerdict:
    """What may be claimed."""

    def test_a_decisive_support_confirms(self):
        """A mode seen at work is confirmed."""
        said = stalled(mode("a", DECISIVE), mode("b", MODERATE))

        assert (said.verdict, said.cause) == ("confirmed", "a")
        assert said.incident_class == "class-of-a"
        assert said.next_observation is None

    def test_a_strong_contradiction_keeps_from_confirmed(self):
        """A decisive support with a strong contradiction is best supported at most."""
        said = stalled(mode("a", DECISIVE, STRONG, says("no", "contradicts", "strong")))

        assert said.verdict == "best_supported"

    def test_two_modes_seen_at_once_confirm_neither(self):
        """Two decisive supports leave the cause undetermined."""
        said = stalled(mode("a", DECISIVE), mode("b", says("too", "supports", "decisive")))

        assert (said.verdict, said.cause) == ("undetermined", None)

    def test_a_strong_and_a_moderate_support_are_best_supported(self):
        """Two independent supports with a margin name a cause that is not proven."""
        said = stalled(mode("a", STRONG, MODERATE), mode("b", MODERATE))

        assert (said.verdict, said.cause) == ("best_supported", "a")
        assert WEIGHTS["strong"] + WEIGHTS["moderate"] >= SCORE_MIN
        assert "not proven" in said.confidence_note

    def test_one_support_is_an_accident(self):
        """Several answers on the same evidence are one support."""
        twice = mode("a", STRONG, STRONG)

        assert stalled(twice).verdict == "undetermined"

    def test_a_rival_within_the_margin_leaves_it_undetermined(self):
        """A rival less than one strong answer behind is not beaten."""
        said = stalled(mode("a", STRONG, MODERATE), mode("b", says("other", "supports", "strong")))

        assert said.verdict == "undetermined"
        assert said.modes[0].score - said.modes[1].score < MARGIN
        assert "a (+4.5) and b (+3.0)" in said.confidence_note

    def test_a_rival_that_is_ruled_out_is_no_rival(self):
        """A decisive contradiction removes a rival, whatever its score."""
        rival = mode("b", STRONG, DECISIVE, says("no", "contradicts", "decisive"))
        said = stalled(mode("a", STRONG, MODERATE), rival)

        assert (said.verdict, said.cause) == ("best_supported", "a")
        assert standing(said, "b") == "ruled_out"
        assert [(one.mode, one.because) for one in said.ruled_out] == [("b", "no contradicts")]

    def test_a_low_score_is_ruled_out_too(self):
        """A strong contradiction and another, with nothing against them, rule a mode out."""
        said = stalled(
            mode("b", says("x", "contradicts", "strong"), says("y", "contradicts", "moderate"))
        )

        assert standing(said, "b") == "ruled_out"

    def test_a_mode_without_what_it_needs_is_possible_at_most(self):
        """While a defining test is unknown, other support names no cause."""
        needy = mode("a", STRONG, MODERATE, says("core", "unknown", "strong"), needs=("core",))

        assert stalled(needy).verdict == "undetermined"

    def test_nothing_known_is_untestable(self):
        """A mode of unknowns alone is untestable and no rival."""
        said = stalled(mode("a", STRONG, MODERATE), mode("b", says("x", "unknown", "strong")))

        assert said.cause == "a"
        assert standing(said, "b") == "untestable"

    @pytest.mark.parametrize("scope", ["pair", "nothing"])
    def test_without_a_finding_support_is_no_cause(self, scope):
        """Where nothing is found wrong only what is seen directly is named."""
        facts = facts_of(faults.serving)
        weak = mode("a", STRONG, MODERATE, scope=scope)
        seen = mode("b", DECISIVE)

        assert diagnose(facts, (), (weak,), None).verdict == "none"
        assert diagnose(facts, (), (seen,), None).verdict == "confirmed"


class TestCrash:
    """A test that crashes."""

    def test_it_becomes_an_unknown(self):
        """A crashing test costs its own answer and nothing else."""

        def breaks(facts: Facts, subject: str) -> TestResult:
            raise ZeroDivisionError(subject)

        said = stalled(mode("a", STRONG, MODERATE, breaks))
        [crashed] = [one for one in said.modes[0].tests if one.answer == "unknown"]

        assert said.cause == "a"
        assert crashed.test == "breaks"
        assert "ZeroDivisionError" in crashed.because


class TestNextObservation:
    """Computed from the unknowns of the leaders."""

    def test_it_is_the_unknown_that_moves_the_gap_most(self):
        """Of two unknowns the weightier one is asked for."""
        said = stalled(
            mode("a", STRONG, says("x", "unknown", "moderate", collect="small")),
            mode("b", MODERATE, says("y", "unknown", "strong", collect="big")),
        )

        assert said.next_observation == "big"

    def test_what_both_leaders_wait_for_counts_twice(self):
        """An observation that speaks to both leaders beats a weightier one of a single leader."""
        said = stalled(
            mode("a", STRONG, says("x", "unknown", "moderate", collect="both")),
            mode(
                "b",
                MODERATE,
                says("y", "unknown", "moderate", collect="both"),
                says("z", "unknown", "weak", collect="one"),
            ),
        )

        assert said.next_observation == "both"

    def test_a_mode_that_is_out_asks_for_nothing(self):
        """Unknowns of a mode that is ruled out are not worth collecting."""
        said = stalled(
            mode("a", STRONG, says("x", "unknown", "weak", collect="worth it")),
            mode(
                "b",
                says("no", "contradicts", "decisive"),
                says("y", "unknown", "decisive", collect="not worth it"),
            ),
        )

        assert said.next_observation == "worth it"

    def test_where_every_mode_is_out_it_is_a_source_not_seen(self):
        """When nothing known is left, the first kind of evidence that is missing is asked for."""
        said = stalled(mode("b", says("no", "contradicts", "decisive")))

        assert said.next_observation is not None
        assert "stacks" in said.next_observation
        assert "something else" in said.confidence_note


class TestSubject:
    """Who is asked about."""

    def test_tests_are_asked_about_the_findings_subject(self):
        """Each test gets the subject of the finding, or the first cell without one."""
        asked: list[str] = []

        def listens(facts: Facts, subject: str) -> TestResult:
            asked.append(subject)
            return STRONG(facts, subject)

        stalled(mode("a", listens))
        diagnose(Scene(2, 2).facts(), (), (mode("a", listens),), None)

        assert asked == [CELL, CELL]

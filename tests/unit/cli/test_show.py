"""What the views say: every figure and name of a record, aligned, and whole without colour."""

import re

import msgspec
import pytest

import night
from tandem.cli.show.diagnosis import diagnosis_view, why_view
from tandem.cli.show.evidence import value_text
from tandem.cli.show.finding import findings_view
from tandem.cli.show.incident import incident_view, incidents_view
from tandem.cli.show.plan import outcomes_view, plan_view
from tandem.cli.show.status import status_view
from tandem.cli.show.sweep import sweep_view
from tandem.cli.show.times import ago, duration, length, utc, when
from tandem.cli.show.verification import verification_view
from tandem.ports import Harvest
from tandem.records import MemberStatus, Plan, Status, Trait

WHOLE = incident_view(night.INCIDENT, night.FACTS, "incidents/x", night.NOW)


def text_of(view, columns=100):
    """Draw a view as a pipe gets it."""
    return night.text(view, columns)


def words(drawn: str) -> str:
    """Give the words of a drawn view, however they were wrapped."""
    return " ".join(drawn.split())


class TestTimes:
    """Times are read by tired people."""

    @pytest.mark.parametrize(
        ("seconds", "said"),
        [
            (0.59, "0.6 s"),
            (9.8, "9.8 s"),
            (42, "42 s"),
            (600, "10 min"),
            (17 * 3600, "17 h"),
            (3 * 86400, "3 days"),
        ],
    )
    def test_a_duration_has_one_unit(self, seconds, said):
        """A length of time is said in the largest unit that still tells."""
        assert duration(seconds) == said

    def test_a_moment_is_said_both_ways(self):
        """A moment comes in UTC and relative to now."""
        assert when(night.ONSET, night.NOW) == "21:00:00Z (42 s ago)"

    def test_another_day_has_its_date(self):
        """A moment of another day carries its date."""
        assert utc(night.ONSET - 86400, night.NOW) == "2025-11-28 21:00:00Z"

    def test_the_future_is_not_past(self):
        """A moment ahead is said to be ahead."""
        assert (ago(110, 100), ago(100, 100)) == ("in 10 s", "just now")

    @pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("24h", 86400)])
    def test_a_length_is_read_as_people_write_it(self, text, seconds):
        """Lengths of time carry one letter for their unit."""
        assert length(text) == seconds

    @pytest.mark.parametrize("text", ["", "h", "24", "-3h", "0s", "1e9d", "nanh", "24 hours"])
    def test_no_length_is_refused(self, text):
        """What is no length of time is refused, never guessed."""
        with pytest.raises(ValueError, match=r"length of time|could not convert"):
            length(text)


class TestDiagnosis:
    """The differential is the heart of the product's screen."""

    def test_the_verdict_comes_first(self):
        """The first line names the verdict and the cause."""
        drawn = text_of(diagnosis_view(night.DIAGNOSIS, night.FACTS))

        assert drawn.splitlines()[0].rstrip() == (
            "best supported: degraded-pair-after-decode-restarts"
        )

    def test_the_differential_counts_for_against_and_missing(self):
        """Each mode has one aligned line with its counts, and the sentence that decided it."""
        lines = text_of(diagnosis_view(night.DIAGNOSIS, night.FACTS)).splitlines()
        at = next(number for number, line in enumerate(lines) if "failure mode" in line)

        assert [line.split() for line in lines[at : at + 4]] == [
            ["standing", "failure", "mode", "for", "against", "missing"],
            ["best", "supported", night.FAMILY.mode, "2", "strong", "-", "1"],
            night.FAMILY.because.split(),
            ["ruled", "out", night.DESYNC.mode, "-", "1", "decisive", "-"],
        ]
        assert lines[at].index("against") == lines[at + 3].index("1 decisive")

    def test_the_hunch_is_answered_by_name(self):
        """The hunch is repeated, answered, and the reason given."""
        drawn = words(text_of(diagnosis_view(night.DIAGNOSIS, night.FACTS)))

        assert "“overlap schedule”: ruled out (understood as collective-desync)" in drawn
        assert "its mechanism is off in the live process" in drawn

    def test_a_change_says_when_it_is_only_inferred(self):
        """A verdict that rests on a table alone is marked."""
        drawn = words(text_of(diagnosis_view(night.DIAGNOSIS, night.FACTS)))

        assert "exonerated --cuda-graph-max-bs not on the failing path (inferred)" in drawn
        assert "20:50:00Z decode-0 implicated restarted" in drawn

    def test_why_reaches_down_to_the_values(self):
        """Each test of a mode shows its reason and the observations it rests on."""
        drawn = words(text_of(why_view(night.FAMILY, night.FACTS)))

        assert "inflight_pinned (strong) inflight stays at 8" in drawn
        assert "#7 21:00:30Z prefill-0 inflight_queue_reqs = 8" in drawn
        assert "#3 20:50:00Z decode-0 restarted" in drawn

    def test_what_is_missing_says_why_and_what_would_answer(self):
        """An unknown names the reason, the observation to take, and evidence that is not here."""
        drawn = words(text_of(why_view(night.FAMILY, night.FACTS)))

        assert "stack: py-spy may not trace pid 12" in drawn
        assert "would be answered by: a stack dump of the prefill's transfer thread" in drawn
        assert "#404 not in this window" in drawn

    def test_long_values_are_cut(self):
        """A value takes one line of bounded width."""
        assert value_text("a\nb") == "a | b"
        assert value_text("x" * 99, columns=10) == "x" * 9 + "…"
        assert value_text(("--port", "1")) == "--port 1"


class TestPlan:
    """A plan is read before it is approved."""

    def test_steps_are_numbered_with_their_bounds(self):
        """Each step shows what, to whom, behind which gate, for how long and why."""
        drawn = words(text_of(plan_view(night.PLAN)))

        assert "1 15 s stop decode-0 before its prefill" in drawn
        assert "2 60 s start prefill-0, gate: bootstrap its bootstrap comes first" in drawn

    def test_smaller_repairs_kept_changes_and_costs_are_named(self):
        """What was refused, what stays, and what it costs are on the page."""
        drawn = words(text_of(plan_view(night.PLAN)))

        assert "engine:decode that is how it began" in drawn
        assert "- decode-0: --cuda-graph-max-bs 64 -> 96" in drawn
        assert "- 8 requests will be lost" in drawn

    def test_the_command_that_approves_it_is_last(self):
        """The last line is the command that would run it."""
        drawn = text_of(plan_view(night.PLAN, "tandem repair x --approve"))

        assert drawn.splitlines()[-1].rstrip() == (
            "A person has to approve it: tandem repair x --approve"
        )

    def test_steps_that_do_the_same_are_one_row(self):
        """Neighbouring steps of one verb and reason share a row, with their numbers."""
        stop, start = night.PLAN.steps
        alike = [
            msgspec.structs.replace(stop, verb="expect-gone", why="w", target=who) for who in "ab"
        ]
        plan = msgspec.structs.replace(night.PLAN, steps=(stop, *alike, start))
        drawn = words(text_of(plan_view(plan)))

        assert "2-3 15 s expect-gone a, b w 4 60 s start" in drawn

    def test_an_empty_plan_offers_no_command(self):
        """When nothing is to be done there is nothing to approve."""
        nothing = Plan(
            scope="nothing", steps=(), refused=(), kept=(), costs=(), because="it is a long prompt"
        )
        drawn = text_of(plan_view(nothing, "tandem repair x --approve"))

        assert "none: nothing is touched" in drawn
        assert "--approve" not in drawn

    def test_outcomes_say_what_was_seen(self):
        """Each outcome has its status, its length and its detail."""
        drawn = words(text_of(outcomes_view(night.OUTCOMES)))

        assert "stop:decode-0 done 1.5 s ended on SIGTERM" in drawn
        assert "start:prefill-0 failed 60 s port 30000 is held by pid 77 (nginx)" in drawn


class TestVerification:
    """A proof that falls short says where."""

    def test_every_figure_is_there(self):
        """Counts, latency, re-scoring, failures and the unknown are all said."""
        drawn = words(text_of(verification_view(night.VERIFICATION)))

        for said in (
            "the proof falls short (2 requests in 21 s)",
            "8/8 passed, median 0.59 s",
            "29/30 clean",
            "96 tokens, largest gap 0.021",
            "transfer failures +0",
            "inflight after unknown",
            "- inflight: the prefill did not answer",
            "s02 3 corrupted 0.7 s marker of s17 leaked",
        ):
            assert said in drawn

    def test_clean_requests_are_not_listed(self):
        """Only requests that were not clean take a line."""
        assert "s01" not in text_of(verification_view(night.VERIFICATION))


class TestStatus:
    """The first line of status is what a tired person acts on."""

    STATUS = Status(
        deployment="laptop",
        state="sick",
        since=night.ONSET,
        summary="8 hand-offs pinned",
        next_command="tandem investigate",
        never="never restart decode alone",
        members=(
            MemberStatus(
                name="decode-0", role="decode", state="up", since=night.ONSET, incarnation="12:9"
            ),
            MemberStatus(name="router", role="router", state="down", since=None, incarnation=None),
        ),
    )

    def test_the_first_line_is_enough(self):
        """It says the state, since when, the next command, and what not to do."""
        drawn = text_of(status_view(self.STATUS, night.NOW), columns=200)

        assert drawn.splitlines()[0].rstrip() == (
            "sick since 21:00:00Z (42 s ago); next: tandem investigate; never restart decode alone"
        )

    def test_every_member_has_a_line(self):
        """Each member shows its role, its state, its age and its life."""
        drawn = words(text_of(status_view(self.STATUS, night.NOW)))

        assert "decode-0 decode up 42 s ago pid 12" in drawn
        assert "router router down - -" in drawn


class TestFinding:
    """A finding is told with both witnesses."""

    def test_both_witnesses_speak(self):
        """Each side's statement is shown with the ids it cites."""
        drawn = words(text_of(findings_view((night.FINDING,), night.NOW)))

        assert "client says a probe is 6 s late #5" in drawn
        assert "server says inflight never below 8 #7" in drawn
        assert "since 21:00:00Z (42 s ago), found 6.0 s later" in drawn

    def test_nothing_found_is_said(self):
        """No finding is an answer, not an empty screen."""
        assert words(text_of(findings_view((), night.NOW))) == "nothing is found wrong"


class TestSweep:
    """One sweep shows what was seen, and with equal rank what could not be."""

    def test_what_is_missing_comes_first(self):
        """Missing observations come before seen ones, each with its reason."""
        trait = Trait(subject="*", name="start_order", at=1.0, value=("prefill", "decode"))
        harvest = Harvest((night.INFLIGHT, night.STACKS), (trait,), (night.RESTART,))
        drawn = words(text_of(sweep_view(harvest, night.NOW)))

        assert drawn.startswith("1 things seen, 1 could not be Missing")
        assert "prefill-0 stack py-spy may not trace pid 12: stack Seen" in drawn
        assert "prefill-0 loads inflight_queue_reqs 8" in drawn
        assert "* start_order prefill decode" in drawn

    def test_labelled_zeros_are_gathered(self):
        """Of many labelled counts only those that are not zero take room."""
        seen = [
            msgspec.structs.replace(night.INFLIGHT, name="log_signature", label=label, value=value)
            for label, value in (("traceback", 0), ("cuda-error", 0), ("peer-lost", 2))
        ]
        drawn = words(text_of(sweep_view(Harvest(tuple(seen)), night.NOW)))

        assert "log_signature: peer-lost 2; 2 are 0" in drawn

    def test_values_have_units(self):
        """Moments and sizes are written as people read them."""
        assert value_text(night.ONSET, name="started_at") == "2025-11-29 21:00:00Z"
        assert value_text(59_000_000, name="rss_bytes") == "59.0 MB"


class TestIncident:
    """An incident is one page, in the order of the stages."""

    def test_stages_follow_in_order(self):
        """Finding, diagnosis, plan, repair and verification come in this order."""
        lines = [line.rstrip() for line in text_of(WHOLE).splitlines()]
        stages = ["Finding", "Diagnosis", "Plan", "Repair", "Verification"]

        assert [line for line in lines if line in stages] == stages

    def test_the_first_lines_are_the_answer(self):
        """What, since when, why, the hunch, the repair and the proof come before everything."""
        lines = text_of(WHOLE).splitlines()[:6]

        assert [" ".join(line.split()) for line in lines] == [
            "2025-11-29T21-00-06Z-silent-stall: failed",
            "found silent-stall on prefill-0>decode-0 since 21:00:00Z (42 s ago)",
            "cause degraded-pair-after-decode-restarts (best supported)",
            "hunch “overlap schedule”: ruled out",
            "repair pair: 2 of 2 steps were taken",
            "proof falls short",
        ]

    def test_the_last_line_is_the_command(self):
        """Advice ends with the command that would carry it out."""
        advised = msgspec.structs.replace(
            night.INCIDENT, outcomes=(), verification=None, state="advised"
        )
        drawn = text_of(incident_view(advised, night.FACTS, "incidents/x", night.NOW))

        assert drawn.splitlines()[-1].rstrip() == (
            f"A person has to approve it: tandem repair {advised.id} --approve"
        )

    def test_advice_to_do_nothing_is_called_that(self):
        """A look that found nothing to repair is no advice."""
        nothing = Plan(scope="nothing", steps=(), refused=(), kept=(), costs=(), because="well")
        looked = msgspec.structs.replace(night.INCIDENT, plan=nothing, state="advised")

        assert "nothing proposed" in text_of(incidents_view([looked], night.NOW))

    def test_the_seal_is_shown(self):
        """The hash of the evidence, and what did not fit, are on the page."""
        drawn = words(text_of(WHOLE, columns=140))

        assert f"evidence 2 observations, sealed sha256 {'ab' * 32}" in drawn
        assert "left out stacks: py-spy may not trace" in drawn

    def test_what_was_acted_on_offers_no_approval(self):
        """An incident with outcomes offers no second repair."""
        assert "--approve" not in text_of(WHOLE)

    def test_the_list_names_the_cause(self):
        """A row of the list has id, age, state and cause."""
        drawn = words(text_of(incidents_view([night.INCIDENT], night.NOW)))

        assert (
            f"{night.INCIDENT.id} 36 s ago failed "
            "degraded-pair-after-decode-restarts (best supported)" in drawn
        )

    def test_an_empty_list_says_so(self):
        """No incident is an answer."""
        assert words(text_of(incidents_view([], night.NOW))) == "no incident yet"


class TestColour:
    """Colour repeats words; it never stands alone."""

    def test_a_pipe_gets_no_escape(self):
        """Without a terminal no view carries an escape sequence."""
        assert "\x1b" not in text_of(WHOLE)

    def test_colour_adds_nothing_to_the_words(self):
        """With colours stripped, a terminal shows the same words as a pipe."""
        coloured = re.sub(r"\x1b\[[0-9;]*m", "", night.text(WHOLE, colour=True))

        assert coloured == text_of(WHOLE)

    @pytest.mark.parametrize("columns", [80, 100, 140])
    def test_no_line_is_wider_than_the_screen(self, columns):
        """Views fit the screen they are drawn on."""
        widths = [len(line) for line in text_of(WHOLE, columns=columns).splitlines()]

        assert max(widths) <= columns

    def test_brackets_are_data(self):
        """Text from the world is never read as markup."""
        bold = night.FINDING.__class__(
            id="x",
            kind="k",
            subject="[bold]s",
            onset_at=0,
            found_at=0,
            summary="[red]",
            witnesses=(),
        )

        assert "[bold]s" in text_of(findings_view((bold,), night.NOW))

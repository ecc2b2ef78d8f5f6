"""The score of a drill: the loop's records held against what the clients saw."""

import msgspec
import pytest

import night
from tandem.drills.incident_demo import summary
from tandem.drills.score import EXPECTED_CAUSE, score
from tandem.drills.traffic import ClientLog, Sent
from tandem.errors import NotProvenError

HUNG = Sent(session="s0.0", turn=0, sent_at=night.ONSET + 1.0, status="failed")
HUNG.ended_at = night.NOW
SERVED = Sent(session="s1.0", turn=0, sent_at=night.ONSET, ended_at=night.ONSET + 1.0)
SERVED.status = "completed"
LOG = ClientLog(sent=[SERVED, HUNG])

PROVEN = msgspec.structs.replace(
    night.VERIFICATION, passed=True, sessions_passed=30, corrupted=0, inflight_after=0
)
GOOD = msgspec.structs.replace(
    night.INCIDENT,
    outcomes=tuple(msgspec.structs.replace(one, status="done") for one in night.OUTCOMES),
    verification=PROVEN,
    state="closed",
)


def scored(incident, log=LOG, *, stall_expected=True):
    """Score an incident, or its absence."""
    return score("d", 7, incident, log, stall_expected=stall_expected)


def changed(part, **fields):
    """The good incident with some fields of one part changed."""
    old = getattr(GOOD, part)
    return msgspec.structs.replace(GOOD, **{part: msgspec.structs.replace(old, **fields)})


class TestStall:
    """A drill in which something had to be found and mended."""

    def test_all_of_it_is_ok(self):
        """Found, explained, hunch answered, repaired, proven, committed."""
        result = scored(GOOD)

        assert (result.why, result.ok) == ([], True)
        assert (result.drill, result.seed) == ("d", 7)

    def test_found_after_is_counted_from_the_first_request_that_hung(self):
        """From its client's send time to the finding, in seconds."""
        assert scored(GOOD).found_after_s == 5.0

    @pytest.mark.parametrize(
        ("incident", "short"),
        [
            (None, "the stall was found"),
            (changed("diagnosis", cause="dead-worker"), f"the cause is {EXPECTED_CAUSE}"),
            (changed("diagnosis", verdict="undetermined"), "the verdict is confirmed or best"),
            (changed("diagnosis", hunch=None), "the hunch was ruled out"),
            (changed("plan", scope="all"), "the pair was repaired"),
            (msgspec.structs.replace(GOOD, outcomes=night.OUTCOMES), "the pair was repaired"),
            (msgspec.structs.replace(GOOD, outcomes=()), "the pair was repaired"),
            (changed("verification", passed=False), "the proof holds"),
            (msgspec.structs.replace(GOOD, verification=None), "the proof holds"),
            (changed("report", commit=None), "the report is committed"),
            (msgspec.structs.replace(GOOD, report=None), "the report is committed"),
        ],
    )
    def test_each_shortfall_is_named(self, incident, short):
        """One thing that is not so is enough, and the score says which."""
        result = scored(incident)

        assert not result.ok
        assert any(why.startswith(f"not so: {short}") for why in result.why)

    def test_a_stall_no_client_felt_does_not_count(self):
        """When no request hung there was nothing to find."""
        result = scored(GOOD, ClientLog(sent=[SERVED]))

        assert (result.found_after_s, result.why) == (
            None,
            ["not so: a client request really hung"],
        )

    def test_its_json_has_the_shape_that_scripts_read(self):
        """Every key of the drill's JSON is there, null where nothing was."""
        said = msgspec.json.decode(msgspec.json.encode(scored(GOOD)))

        assert {"drill", "seed", "ok", "found_after_s", "finding"} <= said.keys()
        assert {"verdict", "cause", "incident_class", "ruled_out", "hunch", "next_observation"} <= (
            said["diagnosis"].keys()
        )
        assert {"mode", "because", "evidence"} <= said["diagnosis"]["ruled_out"][0].keys()
        assert {"asked", "matched", "answer"} <= said["diagnosis"]["hunch"].keys()
        assert said["repair"].keys() == {"scope", "steps", "duration_s"}
        assert said["verification"]["sequential"] == {"passed": 8, "total": 8}
        assert said["report"] == {"path": "INCIDENTS.md", "commit": "1a2b3c4"}


CALM = msgspec.structs.replace(
    GOOD,
    finding=None,
    diagnosis=msgspec.structs.replace(night.DIAGNOSIS, cause=None, verdict="none"),
    plan=None,
    outcomes=(),
    verification=None,
)


SLOW = msgspec.structs.replace(night.FINDING, kind="slow-but-moving", actionable=False)
ASKED = "nobody is accused, even when a person asks"


class TestCalm:
    """Near misses and controls."""

    @pytest.mark.parametrize("told", [None, SLOW])
    def test_nothing_accused_and_nothing_touched_is_ok(self, told):
        """Neither the loop nor a person with a hunch found more than that it is slow."""
        result = scored(msgspec.structs.replace(CALM, finding=told), stall_expected=False)

        assert (result.why, result.ok) == ([], True)
        assert (result.finding, result.repair) == (None, None)

    @pytest.mark.parametrize(
        ("incident", "short"),
        [
            (msgspec.structs.replace(CALM, finding=night.FINDING), "nothing was found"),
            (msgspec.structs.replace(CALM, diagnosis=night.DIAGNOSIS), ASKED),
            (None, ASKED),
            (msgspec.structs.replace(CALM, plan=night.PLAN), "no repair was proposed"),
            (
                msgspec.structs.replace(CALM, outcomes=night.OUTCOMES, plan=night.PLAN),
                "nothing was repaired",
            ),
        ],
    )
    def test_each_accusation_is_named(self, incident, short):
        """A finding, a cause or a repair is a false alarm, and asking nobody proves nothing."""
        assert f"not so: {short}" in scored(incident, stall_expected=False).why

    def test_silence_proves_nothing(self):
        """A control whose clients were never served shows nothing."""
        result = scored(CALM, ClientLog(sent=[HUNG]), stall_expected=False)

        assert result.why == ["not so: clients were served"]


class TestSummary:
    """The last line of the demo."""

    def test_it_is_made_of_real_figures(self):
        """Times, cause, hunch, repair, proof and commit, as they were."""
        assert summary(scored(GOOD), "INCIDENTS.md") == (
            "demo passed: silent stall found in 5.0 s; "
            "cause degraded-pair-after-decode-restarts (best supported); "
            "hunch collective-desync ruled out; pair restarted in 62.0 s; "
            "8/8 sequential, 30/30 sessions clean; INCIDENTS.md @ 1a2b3c4"
        )

    def test_without_them_there_is_no_such_line(self):
        """A demo that fell short says what is missing."""
        with pytest.raises(NotProvenError, match="the stall was found"):
            summary(scored(None), "INCIDENTS.md")

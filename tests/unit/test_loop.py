"""The watching: one incident per cause, what it may do by itself, and others at work beside it."""

import os

import msgspec
import pytest

import faults
from sites import AUTO, CELL, DECODE, PREFILL, ROUTER, partial
from tandem import loop
from tandem.errors import RefusedError, WorldError
from tandem.loop import watch
from tandem.ports import Harvest
from tandem.records import Incident, Outcome, Policy, ReportRef
from tandem.records import vocabulary as v
from tandem.standing import take_down

RESTARTED = ["stop router", "stop decode-0", "stop prefill-0"]
RESTARTED += ["start prefill-0", "start decode-0", "start router"]


def going_silent(site):
    """Let the deployment go silent from now on."""
    faults.silence(site.scene, 8)


def repaired_elsewhere(site, *, turns, then=lambda: None):
    """Let somebody hold the repair lock for the next turns; gives a list of when it was free."""
    lock, left, free_at = site.store.lock("repair"), list(range(turns)), []
    lock.__enter__()

    def count(_):
        if left:
            left.pop()
        elif not free_at:
            free_at.append(site.clock.now())
            lock.__exit__(None, None, None)
            then()

    site.store.before["append"] = count
    return free_at


class TestOneIncidentPerCause:
    """However long it lasts and whatever it grows into."""

    async def test_a_partial_stall_that_grows_silent_is_the_same(self, site_of):
        """The stall goes on under its graver name; no second folder is begun."""
        site = site_of(partial)
        site.when("report", lambda: going_silent(site))
        await site.watch(turns=40)

        assert [one.kind for one in site.store.open_findings()] == ["silent-stall"]
        assert [one.finding.kind for one in site.store.incidents()] == ["partial-stall"]

    async def test_a_stall_that_grows_under_another_name_is_the_same(self, site_of, monkeypatch):
        """A silent stall with another subject, opened as the partial one closes, is in hand."""
        site = site_of(partial)
        real = loop.detect

        def renaming(facts, known, thresholds):
            # What several decodes do to the subject of a partial stall: it names the prefill.
            before = [msgspec.structs.replace(one, subject=CELL) for one in known]
            return tuple(
                msgspec.structs.replace(one, subject=PREFILL)
                if one.kind == "partial-stall"
                else one
                for one in real(facts, before, thresholds)
            )

        monkeypatch.setattr(loop, "detect", renaming)
        site.when("report", lambda: going_silent(site))
        await site.watch(turns=40)

        assert [one.kind for one in site.store.open_findings()] == ["silent-stall"]
        assert [one.finding.subject for one in site.store.incidents()] == [PREFILL]

    async def test_a_finding_that_stands_is_told_once(self, site_of):
        """Turn after turn the same finding says nothing new."""
        site = site_of()
        await site.watch(turns=30)

        assert (site.kinds().count("finding"), site.kinds().count("report")) == (1, 1)

    async def test_it_is_told_at_once_and_judged_when_there_is_enough_to_judge(self, site_of):
        """A stall is evidence only once it is as old as failure modes look back."""
        site = site_of(faults.serving)
        going_silent(site)
        silent_at = site.clock.now()
        at = {}
        for kind in ("finding", "evidence"):
            site.when(kind, lambda kind=kind: at.update({kind: site.clock.now() - silent_at}))
        await site.watch(until="report")

        assert at["finding"] < 9.0
        assert loop.EVIDENCE_S <= at["evidence"] < loop.EVIDENCE_S + 3.0
        assert site.store.incidents()[0].diagnosis.verdict == "undetermined"

    async def test_a_second_watch_takes_over_what_was_written_down(self, site_of):
        """A watch that starts anew knows which open findings have had their incident."""
        site = site_of()
        await site.watch(until="report")
        site.open()
        await site.watch(turns=20)

        assert "evidence" not in site.kinds()
        assert len(site.store.incidents()) == 1

    async def test_a_stall_that_comes_back_is_the_same(self, site_of):
        """What cleared and came back in the same lives goes on as the incident it had."""
        site = site_of()
        site.when("report", lambda: faults.flow(site.scene))
        site.when("cleared", lambda: going_silent(site))
        await site.watch(until="recurred")
        await site.watch(turns=5)
        (incident,) = site.store.incidents()

        assert incident.id in site.texts("recurred")[0]
        assert len(incident.finding.recurred_at) == 1
        assert site.texts("report")[1:] != []

    async def test_a_flapping_stall_is_one_incident(self, site_of):
        """However often it comes and goes, there is one folder, and each time a word."""
        site = site_of()
        for kind in ("report", "recurred", "recurred"):
            site.when(kind, lambda: faults.flow(site.scene))
            await site.watch(until="cleared")
            going_silent(site)
        await site.watch(until="recurred")
        (incident,) = site.store.incidents()

        assert len(site.texts("recurred")) == 3
        assert len(incident.finding.recurred_at) >= 2

    async def test_a_second_watch_knows_what_cleared(self, site_of):
        """What an earlier watch saw clear, and wrote down, is the same when it comes back."""
        site = site_of()
        site.when("report", lambda: faults.flow(site.scene))
        await site.watch(until="cleared")
        site.open()
        going_silent(site)
        await site.watch(until="recurred")

        assert len(site.store.incidents()) == 1

    async def test_other_lives_are_another_incident(self, site_of):
        """A stall of a pair that was restarted in between is a new one."""
        site = site_of()
        site.when("report", lambda: faults.flow(site.scene))
        await site.watch(until="cleared")
        for name in (PREFILL, DECODE):
            site.world.spawn(name)
        await site.watch(turns=10)
        going_silent(site)
        await site.watch(until="report")

        assert len(site.store.incidents()) == 2

    async def test_a_member_that_dies_again_is_the_same(self, site_of):
        """A decode that is started and dies again within minutes has one incident."""
        site = site_of(faults.serving)
        await site.watch(turns=5)
        del site.world.lives[DECODE]
        await site.watch(until="report")
        site.world.spawn(DECODE)
        await site.watch(until="cleared")
        del site.world.lives[DECODE]
        await site.watch(until="goes-on")
        await site.watch(turns=10)
        (incident,) = site.store.incidents()

        assert incident.finding.kind == "member-down"
        assert incident.id in site.texts("goes-on")[0]


class TestJudgedAgain:
    """An undetermined verdict, while its finding stands."""

    async def test_it_is_judged_twice_more_at_most(self, site_of):
        """Half a minute and five minutes later, in the same folder; then it is left."""
        site = site_of(faults.stall_without_restart)
        await site.watch(turns=60)
        site.clock.time += 290.0
        site.scene.now += 290.0
        await site.watch(turns=60)
        (incident,) = site.store.incidents()
        sealed = sorted(one.name for one in site.store.folder(incident.id).glob("*.sqlite"))

        assert sealed == ["evidence-2.sqlite", "evidence-3.sqlite", "evidence.sqlite"]
        assert site.kinds().count("diagnosis") == 3
        assert incident.seal.path == "evidence-3.sqlite"

    async def test_new_evidence_settles_it(self, site_of):
        """Stacks that could not be taken at first tell of two ranks apart: a cause is named."""
        site = site_of(faults.decode_hangs)
        await site.watch(until="report")
        first = site.store.incidents()[0]

        async def ranks(_members):
            painted = faults.ranks_apart().observations
            rows = [one for one in painted if one.name == v.STACK]
            now = site.clock.now()
            return Harvest(tuple(msgspec.structs.replace(one, at=now) for one in rows))

        site.take_stacks_with(ranks)
        await site.watch(turns=60)
        (again,) = site.store.incidents()

        assert first.diagnosis.verdict == "undetermined"
        assert (again.id, again.diagnosis.cause) == (first.id, "collective-desync")

    async def test_evidence_that_cannot_be_sealed_again_begins_no_second_incident(self, site_of):
        """A full disk while it is judged again: told, and the incident stays as it was."""
        site = site_of(faults.stall_without_restart)
        await site.watch(until="report")

        def full(*_):
            raise WorldError("The disk is full.", next_step="Free some.")

        site.store.before["seal"] = full
        await site.watch(turns=130)
        (incident,) = site.store.incidents()

        assert "The disk is full" in site.texts("failed")[0]
        assert (incident.state, incident.seal.path) == ("advised", "evidence.sqlite")

    async def test_what_is_determined_is_left_alone(self, site_of):
        """A verdict that names a cause is judged once."""
        site = site_of()
        await site.watch(turns=80)

        assert site.kinds().count("diagnosis") == 1


class TestClock:
    """A clock that is set while it watches."""

    @pytest.mark.parametrize("by_s", [-3600.0, -40.0, 3600.0])
    async def test_a_healthy_deployment_stays_healthy(self, site_of, by_s):
        """Nothing is found of a clock that jumps, back or forth."""
        site = site_of(faults.serving)
        await site.watch(turns=20)
        site.clock.time += by_s
        site.scene.now += by_s
        await site.watch(turns=40)

        assert site.store.open_findings() == []
        assert site.store.incidents() == []

    async def test_a_stall_outlasts_a_clock_set_back(self, site_of):
        """The same stall goes on as the same incident, and clears when it is over."""
        site = site_of(faults.stall_without_restart)
        turns = []

        def set_back():
            site.clock.time -= 600.0
            site.scene.now -= 600.0
            site.store.before["append"] = count

        def count(_):
            turns.append(site.clock.now())
            if len(turns) == 20:
                turns.append(site.store.open_findings())
                faults.flow(site.scene)

        site.when("report", set_back)
        await site.watch(until="cleared")

        assert "the clock went back" in site.texts("clock")[0]
        assert len(turns[20]) == 1
        assert len(site.store.incidents()) == 1


class TestAdvise:
    """The default policy."""

    async def test_it_seals_judges_plans_reports_and_acts_on_nothing(self, site_of):
        """The incident is complete but for a repair, the advice names the command."""
        site = site_of()
        await site.watch(until="report", hunch="overlap schedule")
        (incident,) = site.store.incidents()

        assert incident.state == "advised"
        assert incident.diagnosis.cause == "degraded-pair-after-decode-restarts"
        assert incident.diagnosis.hunch.answer == "ruled_out"
        assert (incident.plan.scope, incident.plan.needs_approval) == ("pair", True)
        assert incident.report.path == "INCIDENTS.md"
        assert f"tandem repair {incident.id} --approve" in site.texts("advice")[0]
        assert site.world.history == []


class TestAuto:
    """What a policy lets it do by itself."""

    async def test_the_pair_is_repaired_proven_and_written_down(self, site_of):
        """Evidence, repair, proof and report follow one another without a person."""
        site = site_of(policy=AUTO)
        await site.watch(until="report")
        (incident,) = site.store.incidents()

        assert site.acts() == RESTARTED
        assert incident.state == "closed"
        assert incident.verification.passed
        order = ["finding", "sealed", "diagnosis", "plan", "repair", "repaired", "proof", "report"]
        assert [kind for kind in dict.fromkeys(site.kinds()) if kind in order] == order

    async def test_after_a_repair_what_was_seen_before_opens_nothing(self, site_of):
        """The pair flows again: no finding stands, no second incident is begun."""
        site = site_of(policy=AUTO)
        await site.watch(turns=120)

        assert site.store.incidents()[0].state == "closed"
        assert (site.store.open_findings(), len(site.store.incidents())) == ([], 1)

    @pytest.mark.parametrize(
        ("policy", "said"),
        [
            (Policy(mode="auto"), "scope pair"),
            (Policy(mode="approve", auto_scopes=("pair",)), "Policy approve"),
        ],
    )
    async def test_a_scope_that_is_not_allowed_waits(self, site_of, policy, said):
        """Without the scope in `auto_scopes`, or in another mode, nothing is touched."""
        site = site_of(policy=policy)
        await site.watch(until="report")

        assert said in site.texts("advice")[0]
        assert site.world.history == []

    async def test_nothing_is_done_about_what_is_undetermined(self, site_of):
        """A stall no mode describes is sealed and written down, and left alone."""
        site = site_of(faults.stall_without_restart, policy=AUTO)
        await site.watch(until="report")
        (incident,) = site.store.incidents()

        assert (incident.diagnosis.verdict, incident.plan.steps) == ("undetermined", ())
        assert "--approve" not in site.texts("advice")[0]
        assert site.world.history == []

    async def test_a_failed_repair_is_not_repeated_beyond_the_bound(self, site_of):
        """A router that will not die is tried as often in the hour as the policy allows."""
        site = site_of(policy=AUTO)
        site.world.undying.add(ROUTER)
        await site.watch(until="advice")
        states = [one.state for one in site.store.incidents()]

        assert states == ["advised", "failed", "failed"]
        assert "2 repairs ran within the hour and the policy allows 2" in site.texts("advice")[0]
        assert "needs a person" in site.texts("failed")[0]
        assert site.acts() == ["stop router"] * AUTO.repairs_per_hour

    async def test_a_prefill_that_does_not_come_back_stays_a_matter_of_a_person(self, site_of):
        """After a start that failed nothing else is tried by itself; what is down is told."""
        site = site_of(policy=AUTO)
        site.world.unstartable.add(PREFILL)
        await site.watch(turns=60)

        assert "prefill-0 cannot be started" in site.texts("failed")[0]
        assert site.acts() == ["stop router", "stop decode-0", "stop prefill-0"]
        assert {one.kind for one in site.store.open_findings()} == {"member-down"}

    async def test_a_pair_that_goes_silent_again_is_not_restarted_for_an_old_cause(self, site_of):
        """After the ordered restart the old cause is over: undetermined, so a person decides."""
        site = site_of(policy=AUTO)
        site.heals = False
        await site.watch(until="advice")
        again, first = site.store.incidents()

        assert (first.state, again.diagnosis.verdict) == ("closed", "undetermined")
        assert site.acts() == RESTARTED

    async def test_the_bound_counts_repairs_by_when_they_ran(self, site_of):
        """An incident of two hours ago that a person had repaired minutes ago counts."""
        policy = msgspec.structs.replace(AUTO, repairs_per_hour=1)
        site = site_of(policy=policy)
        ran = Outcome(
            step="stop:router",
            status="done",
            started_at=site.clock.now() - 60.0,
            ended_at=site.clock.now() - 59.0,
            detail="stopped",
        )
        site.store.save(
            Incident(
                id=site.store.new_incident_id(site.clock.now() - 7200.0, "by hand"),
                opened_at=site.clock.now() - 7200.0,
                deployment=site.world.deployment,
                outcomes=(ran,),
                report=ReportRef(path="INCIDENTS.md", commit=None, subject=None),
                state="closed",
            )
        )
        await site.watch(until="report")

        assert "the policy allows 1" in site.texts("advice")[0]
        assert site.world.history == []


class TestOthersAtWork:
    """A repair, an `up` or a `down` of another process."""

    async def test_a_repair_elsewhere_blinds_it(self, site_of):
        """While another process holds the repair lock nothing is found and nothing begun."""
        site = site_of(policy=AUTO)
        with site.store.lock("repair"):
            await site.watch(turns=20)

        assert site.kinds() == ["watching"]

    async def test_afterwards_it_judges_afresh(self, site_of):
        """A pair that is still silent is found again, but only by what was seen since."""
        site = site_of()
        free_at = repaired_elsewhere(site, turns=3)
        await site.watch(until="finding")

        assert site.clock.now() - free_at[0] >= site.parts.settings.detect.floor_s

    async def test_what_that_repair_cured_is_no_finding(self, site_of):
        """What was seen before and during it opens nothing; a new silence does."""
        site = site_of(policy=AUTO)
        repaired_elsewhere(site, turns=3, then=lambda: faults.flow(site.scene))
        await site.watch(turns=25)
        calm = site.kinds()
        going_silent(site)
        await site.watch(until="finding")

        assert calm == ["watching"]

    async def test_a_finding_is_over_when_somebody_repairs(self, site_of):
        """What stood before is closed, so that `status` does not tell it any more."""
        site = site_of()
        await site.watch(until="report")
        with site.store.lock("repair"):
            await site.watch(turns=2)

        assert site.store.open_findings() == []

    async def test_what_a_person_took_down_is_left_alone(self, site_of):
        """After `tandem down` the missing members are told and not brought up again."""
        site = site_of(faults.serving, policy=AUTO)
        await site.watch(turns=5)
        await take_down(site.parts, tell=site.told.append)
        await site.watch(turns=40)

        assert len(site.texts("left-alone")) == 3
        assert site.store.incidents() == []
        assert site.acts() == ["stop router", "stop decode-0", "stop prefill-0"]

    async def test_what_died_after_it_was_brought_up_again_is_not(self, site_of):
        """A member that was started since its `down` and then died is an incident."""
        site = site_of(faults.serving)
        await take_down(site.parts, tell=site.told.append)
        for name in (PREFILL, DECODE, ROUTER):
            site.world.spawn(name)
        await site.watch(turns=5)
        del site.world.lives[DECODE]
        await site.watch(until="report")

        assert site.store.incidents()[0].finding.subject == DECODE

    async def test_a_second_watch_is_refused(self, site_of):
        """It names the pid of the first, and looks at nothing."""
        site = site_of()
        with site.store.lock("watch"), pytest.raises(RefusedError, match=f"pid {os.getpid()} "):
            await watch(site.parts, hunch=None, tell=site.told.append)

        assert site.told == []

"""Looking by hand, and a repair that a person approves: what they touch, and what they leave."""

import re

import msgspec
import pytest

import faults
from sites import PREFILL, ROUTER
from tandem.errors import RefusedError, WorldError
from tandem.handling import run_repair, why_not_automatic
from tandem.loop import LOOK_S, investigate
from tandem.records import Policy
from tandem.records import vocabulary as v
from tandem.store import load_incident

DAY_S = 86400.0


async def investigated(site, *, hunch=None, since_s=DAY_S):
    """Look by hand; gives the incident and its sealed facts."""
    incident = await investigate(site.parts, hunch=hunch, since_s=since_s, tell=site.told.append)
    return load_incident(site.store.folder(incident.id))


class TestInvestigate:
    """The word of the person in the incident."""

    async def test_it_acts_on_nothing(self, site_of):
        """Sealed, judged, planned, the hunch answered; no member was started or stopped."""
        site = site_of(policy=Policy(mode="auto", auto_scopes=("pair",)))
        incident, _ = await investigated(site, hunch="overlap schedule")

        assert (incident.state, incident.report) == ("advised", None)
        assert incident.diagnosis.cause == "degraded-pair-after-decode-restarts"
        assert incident.diagnosis.hunch.answer == "ruled_out"
        assert incident.plan.scope == "pair"
        assert site.world.history == []

    async def test_without_a_watch_it_looks_itself(self, site_of):
        """It says so, and looks for as long as every threshold needs."""
        site = site_of(faults.serving)
        began = site.clock.now()
        await investigated(site)

        assert site.told[0].startswith("nobody was watching: looking for 14 s")
        assert LOOK_S <= site.clock.now() - began < LOOK_S + 5.0

    async def test_without_a_past_it_finds_what_it_sees_itself(self, site_of):
        """On a store that knows nothing, its own look is enough to find the stall."""
        site = site_of()
        site.forget()
        incident, _ = await investigated(site)

        assert incident.finding.kind == "silent-stall"

    async def test_beside_a_watch_the_watch_has_looked(self, site_of):
        """What the watch stored is judged at once, and the watch is not disturbed."""
        site = site_of()
        await site.watch(turns=3)
        began = site.clock.now()
        with site.store.lock("watch"):
            incident, _ = await investigated(site)

        assert incident.finding.kind == "silent-stall"
        assert site.clock.now() - began < 1.0
        assert [one for one in site.told if "nobody was watching" in one] == []

    async def test_a_healthy_deployment_is_said_to_be(self, site_of):
        """No finding, no cause, a plan that does nothing; the evidence is sealed all the same."""
        site = site_of(faults.serving)
        incident, facts = await investigated(site)

        assert (incident.finding, incident.diagnosis.verdict) == (None, "none")
        assert (incident.plan.scope, incident.plan.steps) == ("nothing", ())
        assert [one for one in site.told if "cause" in one] == []
        assert incident.id.endswith("-investigation")
        assert facts.numbers(PREFILL, v.INFLIGHT_QUEUE_REQS)

    async def test_what_is_slow_is_told_and_not_repaired(self, site_of):
        """A finding that is told but never repaired is named when there is no graver one."""
        site = site_of(faults.overload)
        incident, _ = await investigated(site)

        assert incident.finding is not None
        assert not incident.finding.actionable
        assert incident.plan.steps == ()

    @pytest.mark.parametrize(("since_s", "reaches"), [(30.0, 30.0), (DAY_S, 156.0)])
    async def test_the_evidence_reaches_as_far_back_as_asked(self, site_of, since_s, reaches):
        """Observations older than that are not sealed; younger ones are, as far as remembered."""
        site = site_of()
        incident, facts = await investigated(site, since_s=since_s)
        first = facts.numbers(PREFILL, v.INFLIGHT_QUEUE_REQS)[0].at

        assert incident.seal.sealed_at - first == pytest.approx(reaches, abs=20.0)

    async def test_a_full_disk_is_told_to_the_person(self, site_of):
        """Nothing sealed is an error with the next step, and the folder is not left open."""
        site = site_of()

        def full(_):
            raise WorldError("The disk is full.", next_step="Free some space.")

        site.store.before["seal"] = full
        with pytest.raises(WorldError, match="Free some space"):
            await investigate(site.parts, hunch=None, since_s=DAY_S, tell=site.told.append)

        assert [one.state for one in site.store.incidents()] == ["failed"]


class TestApproved:
    """`tandem repair --approve`, after an advice."""

    async def test_it_runs_beside_a_watch_that_looks_on(self, site_of):
        """The watch is blind to it, and afterwards sees a deployment that serves."""
        site = site_of()
        await site.watch(until="report")
        (incident,) = site.store.incidents()
        done = await run_repair(site.parts, incident, tell=site.told.append)
        site.open()
        await site.watch(turns=30)

        assert done.state == "closed"
        assert (site.store.open_findings(), len(site.store.incidents())) == ([], 1)

    async def test_the_report_tells_how_it_ended(self, site_of):
        """The section of the advice is replaced by the one of the repair."""
        site = site_of()
        await site.watch(until="report")
        (incident,) = site.store.incidents()
        before = (site.root / "INCIDENTS.md").read_text()
        await run_repair(site.parts, incident, tell=site.told.append)
        after = (site.root / "INCIDENTS.md").read_text()

        assert before.count("tandem:incident") == after.count("tandem:incident") == 2
        assert "2/2 sessions" not in before
        assert "2/2" in after

    async def test_the_requests_it_kills_are_looked_at_right_before(self, site_of):
        """What was in flight when the evidence was sealed an hour ago is not what is lost now."""
        site = site_of()
        await site.watch(until="report")
        (incident,) = site.store.incidents()
        site.open()
        site.clock.time += 30.0
        site.scene.active = 3.0
        done = await run_repair(site.parts, incident, tell=site.told.append)
        (lost,) = done.verification.lost

        assert (lost.subject, lost.count) == (ROUTER, 3)

    async def test_only_one_repair_at_a_time(self, site_of):
        """A second one is refused by name of the holder; nothing is touched."""
        site = site_of()
        await site.watch(until="report")
        (incident,) = site.store.incidents()
        with site.store.lock("repair"), pytest.raises(RefusedError, match="under way in pid"):
            await run_repair(site.parts, incident, tell=site.told.append)

        assert site.world.history == []

    async def test_a_plan_without_steps_is_refused(self, site_of):
        """There is nothing to run, and where to read why."""
        site = site_of(faults.serving)
        incident, _ = await investigated(site)

        with pytest.raises(RefusedError, match=re.escape(f"tandem plan {incident.id}")):
            await run_repair(site.parts, incident, tell=site.told.append)

    async def test_a_proof_that_falls_short_is_a_failure(self, site_of):
        """Restarted but not proven: the incident is failed, and the figures are told."""
        site = site_of()
        await site.watch(until="report")
        (incident,) = site.store.incidents()
        site.world.gaps = [9.0]
        done = await run_repair(site.parts, incident, tell=site.told.append)

        assert (done.state, done.verification.passed) == ("failed", False)
        assert "proof falls short" in site.texts("proof")[0]

    async def test_what_may_be_done_without_a_person_is_said(self, site_of):
        """A plan that needs nobody's word has no reason to wait."""
        site = site_of(policy=Policy(mode="auto", auto_scopes=("pair",)))
        incident, _ = await investigated(site)
        waiting = msgspec.structs.replace(
            incident, plan=msgspec.structs.replace(incident.plan, needs_approval=True)
        )

        assert why_not_automatic(site.parts, incident) is None
        assert "wants a person's word" in why_not_automatic(site.parts, waiting)

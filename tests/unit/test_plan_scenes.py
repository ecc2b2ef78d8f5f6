"""Judged scenes, carried on to plan and report: what is touched, and what is said."""

import re

import pytest

import faults
from judged import ANSWERS, facts_of
from tandem.detect import detect
from tandem.diagnose import diagnose
from tandem.failures import discover
from tandem.plan import plan_repair
from tandem.records import Incident, Policy, Thresholds
from tandem.records import vocabulary as v
from tandem.report import render

SCOPES = {
    faults.stale_peers: ("pair", ["router", "decode-0", "prefill-0"]),
    faults.orphaned_transfers: ("pair", ["router", "decode-0", "prefill-0"]),
    faults.abort_wedge: ("pair", ["router", "decode-0", "prefill-0"]),
    faults.ranks_apart: ("pair", ["router", "decode-0", "prefill-0"]),
    faults.router_diverges: ("router", ["router"]),
    faults.dead_decode: ("engine", ["decode-0"]),
}
"""The scenes that call for a repair; every other scene is left alone."""


def judged_and_planned(paint):
    """Detect, diagnose and plan a scene at its end."""
    facts = facts_of(paint)
    findings = detect(facts, (), Thresholds())
    diagnosis = diagnose(facts, findings, discover(), "overlap schedule")
    found = next((one for one in findings if one.actionable), next(iter(findings), None))
    plan = plan_repair(diagnosis, found, facts, Policy())
    incident = Incident(
        id="scene",
        opened_at=facts.now,
        deployment=facts.deployment,
        finding=found,
        hunch="overlap schedule",
        diagnosis=diagnosis,
        plan=plan,
        state="advised",
    )
    return plan, incident, facts


@pytest.mark.parametrize("paint", ANSWERS, ids=lambda paint: paint.__name__)
def test_only_what_is_sick_is_touched(paint):
    """Each scene gets the smallest repair, and what is healthy or not understood gets none."""
    plan, _, _ = judged_and_planned(paint)

    stops = [step.target for step in plan.steps if step.verb == "stop"]
    assert (plan.scope, stops) == SCOPES.get(paint, ("nothing", []))
    assert plan.because.endswith(".")
    assert all(rung.because for rung in plan.refused)


@pytest.mark.parametrize("paint", ANSWERS, ids=lambda paint: paint.__name__)
def test_every_scene_can_be_written_down(paint):
    """The report names the verdict, and every citation is a row that was really observed."""
    _, incident, facts = judged_and_planned(paint)

    rendered = render(incident, facts)

    body, rows = rendered.markdown.split("### Evidence")
    cited = set(re.findall(r"\[e(\d+)\]", body))
    assert cited == set(re.findall(r"^\| \[e(\d+)\]", rows, flags=re.MULTILINE))
    assert "not in the sealed window" not in rows
    assert incident.diagnosis.verdict.replace("_", " ") in rendered.markdown
    assert len(rendered.subject) <= 200


def test_the_incident_teaches_not_to_restart_decode_alone():
    """The guidance of the story's incident begins with what never to do."""
    _, incident, facts = judged_and_planned(faults.stale_peers)

    text = render(incident, facts).markdown

    assert "1. Never restart decode-0 alone against a long-running prefill-0" in text
    assert "if it recurs without what is implicated here (restarts of decode-0)" in text


def test_a_paused_member_is_never_restarted():
    """What lets it go on is said instead of any step, even where a failure mode fits."""
    plan, incident, _ = judged_and_planned(faults.paused_decode)

    assert incident.finding.kind == "member-paused"
    assert incident.diagnosis.cause == "dead-worker"
    assert (plan.scope, plan.steps) == ("nothing", ())
    assert "`kill -CONT" in plan.because
    assert "Do that first" in plan.because


def test_a_pause_told_as_a_stall_is_no_restart_either():
    """The state of the process decides, whatever the finding is called."""
    facts = facts_of(faults.paused_decode)
    [finding] = detect(facts.without(v.PROCESS_STATE), (), Thresholds())
    diagnosis = diagnose(facts, (finding,), discover(), None)
    plan = plan_repair(diagnosis, finding, facts, Policy())

    assert finding.kind == "member-down"
    assert plan.steps == ()
    assert "is stopped (state T): `kill -CONT" in plan.because

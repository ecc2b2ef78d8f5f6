"""Diagnose over painted scenes: the right cause, or none, whatever evidence is missing."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import faults
from judged import ANSWERS, DEGRADED, facts_of, judge, judged
from scenes import DECODE, PREFILL, T0, Scene
from tandem.detect import detect
from tandem.diagnose import diagnose, knowledge_version
from tandem.facts import Facts
from tandem.failures import discover
from tandem.records import Change, Thresholds
from tandem.records import vocabulary as v

SCENES = pytest.mark.parametrize(
    ("paint", "answer"), ANSWERS.items(), ids=[paint.__name__ for paint in ANSWERS]
)
NAMES = sorted(
    value
    for name, value in vars(v).items()
    if name.isupper() and not name.startswith("T_") and isinstance(value, str)
)


class TestVerdicts:
    """What each scene is called."""

    @SCENES
    def test_the_cause_is_named_or_nothing_is(self, paint, answer):
        """Each scene gets its verdict, its cause and its mechanism."""
        said = judge(facts_of(paint))

        assert (said.verdict, said.cause, said.mechanism) == answer

    @SCENES
    def test_the_same_facts_give_the_same_bytes(self, paint, answer):
        """Two diagnoses of one scene are equal to the byte."""
        first = msgspec.json.encode(judge(facts_of(paint), "overlap schedule"))

        assert first == msgspec.json.encode(judge(facts_of(paint), "overlap schedule"))

    @SCENES
    def test_undetermined_names_the_next_observation(self, paint, answer):
        """An undetermined diagnosis says what to look at; a settled or empty one does not."""
        said = judge(facts_of(paint))

        if said.verdict == "undetermined":
            assert said.next_observation
        if said.verdict in ("none", "confirmed"):
            assert said.next_observation is None

    @SCENES
    def test_every_reason_is_a_clause_with_its_evidence(self, paint, answer):
        """Every answer but an unknown cites evidence that exists, and says why in words."""
        facts = facts_of(paint)
        for verdict in judge(facts).modes:
            for test in verdict.tests:
                assert len(test.because) > 10
                assert all(facts.observation(cite) is not None for cite in test.evidence)

    def test_at_every_moment_of_the_incident_nothing_else_is_accused(self):
        """From the first stuck hand-off on, the only cause ever named is the right one."""
        facts = facts_of(faults.stale_peers)
        named = set()
        moment = T0 + 20.0
        while moment <= facts.now:
            named.add(judge(facts.at(moment)).cause)
            moment += 3.0

        assert named == {None, DEGRADED}

    def test_the_partial_stage_is_already_explained(self):
        """The partial stall that precedes the silence has the same cause."""
        facts = facts_of(faults.stale_peers)
        said = judge(facts.at(T0 + 75.0))

        assert (said.verdict, said.cause) == ("best_supported", DEGRADED)


class TestRobustness:
    """What is missing may cost the answer, never turn it into a wrong one."""

    @SCENES
    def test_the_command_line_decides_nothing(self, paint, answer):
        """With command line and server arguments removed the verdict is the same."""
        facts = facts_of(paint).without(v.COMMAND_LINE, v.SERVER_ARG)
        said = judge(facts)

        assert (said.verdict, said.cause, said.mechanism) == answer

    @SCENES
    def test_any_one_kind_of_observation_may_be_missing(self, paint, answer):
        """With any one name removed no other cause is named."""
        facts = facts_of(paint)
        seen = {name for name in NAMES if facts.subjects(name)}
        for name in sorted(seen):
            assert judge(facts.without(name)).cause in (answer[1], None), name

    @given(st.sampled_from(list(ANSWERS)), st.sets(st.sampled_from(NAMES), min_size=2, max_size=5))
    def test_any_few_kinds_of_observation_may_be_missing(self, paint, names):
        """With any few names removed no other cause is named."""
        said = judge(facts_of(paint).without(*names))

        assert said.cause in (ANSWERS[paint][1], None)

    @given(st.sampled_from(list(ANSWERS)), st.integers(0, 9), st.integers(2, 10))
    def test_looks_may_be_dropped(self, paint, first, every):
        """With every n-th observation lost no other cause is named."""
        facts = facts_of(paint)
        kept = [
            row
            for name in NAMES
            for subject in facts.subjects(name)
            for label in facts.labels(subject, name)
            for row in facts.rows(subject, name, label)
            if row.id % every != first % every
        ]
        thinned = Facts(
            facts.deployment, kept, now=facts.now, changes=facts.changes, traits=facts.traits
        )

        assert judge(thinned).cause in (ANSWERS[paint][1], None)

    @pytest.mark.parametrize("name", [v.PROBE, v.STACK])
    def test_the_incident_is_named_without_probes_or_stacks(self, name):
        """Neither probes nor stacks are needed to name the incident's cause."""
        assert judge(facts_of(faults.stale_peers).without(name)).cause == DEGRADED

    def test_nothing_at_all_is_no_fault(self):
        """An empty window has no verdict but none."""
        empty = Facts(facts_of(faults.serving).deployment, (), now=T0)
        said = judge(empty)

        assert (said.verdict, said.cause) == ("none", None)
        assert {one.standing for one in said.modes} == {"untestable"}


class TestSubject:
    """Whom the diagnosis speaks of."""

    def test_it_is_the_finding_of_the_earliest_actionable(self):
        """A slow finding never hides a stall: the actionable one is explained."""
        facts = facts_of(faults.stale_peers)
        stall = detect(facts, (), Thresholds())[0]
        slow = msgspec.structs.replace(
            stall, id="s", kind="slow-but-moving", subject=DECODE, onset_at=T0, actionable=False
        )

        assert diagnose(facts, (slow, stall), discover(), None).subject == stall.subject

    def test_without_a_finding_it_is_nobody(self):
        """A diagnosis without a finding names no sick member."""
        assert judge(facts_of(faults.serving)).subject is None

    def test_a_closed_finding_is_not_explained(self):
        """What is over has no cause any more."""
        facts = facts_of(faults.serving)
        [stall] = detect(facts_of(faults.stale_peers), (), Thresholds())
        closed = msgspec.structs.replace(stall, closed_at=T0)

        assert diagnose(facts, (closed,), discover(), None).verdict == "none"

    def test_a_dead_member_gives_its_role_to_the_scope(self):
        """The repair of a dead decode is that of one engine, named by its role."""
        said = judge(facts_of(faults.dead_decode))

        assert said.modes[0].scope == "engine:decode"


class TestChanges:
    """The ledger, row by row."""

    def night(self):
        """The incident, with the improvements of the day before in the ledger."""
        scene = faults.serving()
        scene.change(DECODE, "SGLANG_SM120_MMA_TARGET_CTAS", "compute")
        scene.change(DECODE, "--cuda-graph-max-bs", "compute", kind="flag")
        scene.change(DECODE, "--disable-overlap-schedule", "scheduler", kind="flag")
        scene.change(PREFILL, "NIXL_BACKEND", "kv-transfer")
        scene.change(PREFILL, "MY_VARIABLE", "unknown")
        scene.run(30)
        return faults.after_restarts(scene)

    def test_decode_restarts_are_implicated_and_improvements_are_not(self):
        """Restarts are implicated, compute settings exonerated, the transfer path stays open."""
        said = judged(self.night())
        verdicts = {(one.what, one.verdict) for one in said.changes}

        assert said.cause == DEGRADED
        assert verdicts == {
            ("restart", "implicated"),
            ("SGLANG_SM120_MMA_TARGET_CTAS", "exonerated"),
            ("--cuda-graph-max-bs", "exonerated"),
            ("--disable-overlap-schedule", "exonerated"),
            ("NIXL_BACKEND", "open"),
            ("MY_VARIABLE", "open"),
        }

    def test_the_start_before_a_restart_is_not_the_restart(self):
        """A decode that came up with its prefill is not accused of the restart that followed."""
        scene = Scene()
        scene.changes.append(
            Change(
                at=scene.now,
                subject=DECODE,
                kind="start",
                incarnation=f"{DECODE}:{scene.lives[DECODE]:.0f}",
            )
        )
        faults.after_restarts(faults.flow(scene).run(3))
        [row] = [one for one in judged(scene).changes if one.what == "start"]

        assert row.verdict == "exonerated"

    def test_work_done_under_a_change_is_evidence(self):
        """A change with completions in force is exonerated by them, not by a table alone."""
        said = judged(self.night())
        [row] = [one for one in said.changes if one.what == "--cuda-graph-max-bs"]

        assert not row.inferred
        assert row.evidence
        assert "hand-offs completed with it in force" in row.because

    def test_a_table_alone_is_called_inferred(self):
        """Without completions under it a change is cleared by the table, and said so."""
        scene = self.night()
        said = judge(scene.facts(without=(v.TRANSFERS_TOTAL, v.TRANSFER_SECONDS_TOTAL)))
        rows = [one for one in said.changes if one.what == "--cuda-graph-max-bs"]

        assert [(one.verdict, one.inferred) for one in rows] == [("exonerated", True)]
        assert "not on the failing path (inferred)" in rows[0].because

    def test_a_router_restart_is_exonerated(self):
        """A restart of the router is not on the hand-off's path."""
        scene = faults.serving()
        scene.restart("router")
        faults.after_restarts(faults.flow(scene).run(20))
        rows = [one for one in judged(scene).changes if one.subject == "router"]

        assert [one.verdict for one in rows] == ["exonerated"]

    def test_nothing_is_implicated_where_nothing_fails(self):
        """In a healthy deployment every change under which work was done is exonerated."""
        scene = faults.near_miss()
        verdicts = {one.verdict for one in judged(scene).changes}

        assert verdicts == {"exonerated"}

    def test_an_undetermined_cause_leaves_restarts_open(self):
        """Without a cause nobody is accused and a restart stays open."""
        said = judge(facts_of(faults.stall_long_after_a_restart))

        assert [one.verdict for one in said.changes] == ["open"]


class TestKnowledge:
    """The version that a diagnosis names."""

    def test_it_changes_with_any_mode(self):
        """Another text of one mode is another knowledge version."""
        modes = discover()
        assert all(mode.version for mode in modes)
        changed = (dataclasses.replace(modes[0], version="other"), *modes[1:])

        assert knowledge_version(modes) != knowledge_version(changed)
        assert knowledge_version(modes) == knowledge_version(tuple(reversed(modes)))

"""The planner: the smallest rung, its refusals, its orders, its price, and who must approve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import deployment
from tandem.facts import Facts
from tandem.plan import bring_up, plan_repair, take_down
from tandem.records import (
    Change,
    ChangeVerdict,
    Deployment,
    Diagnosis,
    Finding,
    ModeVerdict,
    Observation,
    Policy,
    Trait,
    Witness,
)
from tandem.records import vocabulary as v

NOW = 1_764_500_000.0
CELL = "prefill-0>decode-0"
AUTO = Policy(mode="auto", auto_scopes=("pair", "router", "engine"))


def mode(slug="degraded-pair-after-decode-restarts", scope="pair", standing="best_supported"):
    """A leading mode's verdict."""
    return ModeVerdict(
        mode=slug,
        incident_class="stale-peer-after-one-sided-restart",
        standing=standing,
        score=3.0,
        tests=(),
        scope=scope,
        because="the inflight queue stays pinned since decode-only restarts",
    )


def diagnosed(verdict="best_supported", leading=None, subject=CELL, changes=(), look=None):
    """A diagnosis that names the leading mode, or nothing."""
    leading = leading or mode()
    named = verdict in ("confirmed", "best_supported")
    return Diagnosis(
        knowledge_version="test",
        verdict=verdict,
        cause=leading.mode if named else None,
        incident_class=leading.incident_class if named else None,
        mechanism=None,
        confidence_note="",
        modes=(leading,),
        ruled_out=(),
        changes=changes,
        hunch=None,
        next_observation=look,
        subject=subject,
    )


def found(kind="silent-stall", subject=CELL, *, actionable=True):
    """A finding that began half a minute ago."""
    return Finding(
        id=f"{kind}@{subject}",
        kind=kind,
        subject=subject,
        onset_at=NOW - 30,
        found_at=NOW - 24,
        summary=f"{kind} on {subject}",
        witnesses=(Witness(side="server", statement="flat", evidence=(41, 42)),),
        actionable=actionable,
    )


def seen(subject, name, value, *, at=NOW - 1, number=0, incarnation=None, missing=None):
    """One observation."""
    return Observation(
        source="loads",
        subject=subject,
        name=name,
        value=value,
        at=at,
        id=number,
        incarnation=incarnation,
        missing=missing,
    )


def facts(*observations, deployed=None, changes=(), traits=()):
    """Facts of a deployment at NOW."""
    return Facts(deployed or deployment(), observations, now=NOW, changes=changes, traits=traits)


HURTS = Trait(
    subject="decode-0",
    name=v.T_DECODE_ALONE_RESTART_HURTS,
    at=0.0,
    value=True,
    because="the prefill remembers dead peers",
)


def ids(plan, verb=None):
    """The step ids of a plan, or those of one verb."""
    return [step.id for step in plan.steps if verb in (None, step.verb)]


def refused(plan):
    """The refused rungs with their reasons."""
    return {rung.scope: rung.because for rung in plan.refused}


class TestOrder:
    def test_one_pair_is_restarted_with_its_router(self):
        """Drain, stop router decode prefill, see them gone, start the other way round, gate."""
        plan = plan_repair(diagnosed(), found(), facts(), Policy())

        assert ids(plan) == [
            "drain:prefill-0>decode-0",
            "stop:router",
            "stop:decode-0",
            "stop:prefill-0",
            "gone:router",
            "gone:decode-0",
            "gone:prefill-0",
            "start:prefill-0",
            "start:decode-0",
            "handoff:prefill-0>decode-0",
            "start:router",
            "routed:router",
        ]
        assert {step.id: step.gate for step in plan.steps}["start:prefill-0"] == "bootstrap"

    def test_among_several_pairs_only_the_sick_one_is_touched(self):
        """The router stays up, every touched path is gated, and the plan says so."""
        deployed = deployment(prefills=2, decodes=2)

        plan = plan_repair(
            diagnosed(subject="prefill-1>decode-0"), None, facts(deployed=deployed), Policy()
        )

        assert ids(plan, "stop") == ["stop:decode-0", "stop:prefill-1"]
        assert ids(plan, "gate") == [
            "handoff:prefill-0>decode-0",
            "handoff:prefill-1>decode-0",
            "handoff:prefill-1>decode-1",
            "routed:router",
        ]
        assert "it has no drain" in plan.because

    def test_an_engine_may_bring_its_own_start_order(self):
        """The order of a trait is followed; the router keeps its end."""
        trait = Trait(subject="*", name=v.T_START_ORDER, at=0.0, value=("decode", "prefill"))

        plan = plan_repair(diagnosed(), found(), facts(traits=(trait,)), Policy())

        assert ids(plan, "start") == ["start:decode-0", "start:prefill-0", "start:router"]

    def test_up_and_down_are_mirror_orders(self):
        """`up` starts prefill, decode, router; `down` stops router, decode, prefill."""
        deployed = deployment()

        assert ids(bring_up(deployed, Policy()), "start") == [
            "start:prefill-0",
            "start:decode-0",
            "start:router",
        ]
        assert ids(take_down(deployed, Policy()), "stop") == [
            "stop:router",
            "stop:decode-0",
            "stop:prefill-0",
        ]

    @given(
        prefills=st.integers(1, 3),
        decodes=st.integers(1, 3),
        routers=st.integers(0, 2),
        scope=st.sampled_from(
            ["router", "engine", "engine:prefill", "engine:decode", "pair", "role:decode", "all"]
        ),
        column=st.integers(0, 2),
        row=st.integers(0, 2),
        hurts=st.booleans(),
    )
    def test_every_plan_keeps_the_orders(  # noqa: PLR0917 - Hypothesis gives them by name
        self, prefills, decodes, routers, scope, column, row, hurts
    ):
        """Stops precede gates precede starts, roles stay in order, and nothing is done twice."""
        deployed = deployment(prefills=prefills, decodes=decodes, routers=routers)
        subject = f"prefill-{min(row, prefills - 1)}>decode-{min(column, decodes - 1)}"
        known = facts(deployed=deployed, traits=(HURTS,) if hurts else ())

        plan = plan_repair(diagnosed(leading=mode(scope=scope), subject=subject), None, known, AUTO)

        names = ids(plan)
        verbs = [step.verb for step in plan.steps]
        ranks = {"drain": 0, "stop": 1, "expect-gone": 2, "start": 3, "gate": 3}
        assert len(names) == len(set(names))
        assert [ranks[verb] for verb in verbs] == sorted(ranks[verb] for verb in verbs)
        role = {member.name: member.role for member in deployed.members}
        stops = [step.target for step in plan.steps if step.verb == "stop"]
        starts = [step.target for step in plan.steps if step.verb == "start"]
        gone = [step.target for step in plan.steps if step.verb == "expect-gone"]
        assert sorted(stops) == sorted(starts) == sorted(gone)
        order = ["router", "decode", "prefill"]
        assert [role[name] for name in stops] == sorted(
            (role[name] for name in stops), key=order.index
        )
        assert [role[name] for name in starts] == sorted(
            (role[name] for name in starts), key=order[::-1].index
        )
        for place, step in enumerate(plan.steps):
            assert step.timeout_s > 0
            assert step.on_failure == ("continue" if step.verb == "drain" else "stop")
            if step.gate == "handoff":
                touched = set(step.target.split(">")) & set(starts)
                assert touched
                assert all(f"start:{name}" in names[:place] for name in touched)
        if hurts and "decode-0" in stops:
            assert any(role[name] == "prefill" for name in stops) or plan.scope in ("role", "all")


class TestLadder:
    def test_smaller_rungs_are_refused_with_this_nights_reasons(self):
        """Each refusal cites what was seen: the finding, the direct probe, the restarts."""
        known = facts(
            seen(CELL, v.PROBE, "late", number=7),
            seen("prefill-0", v.STARTED_AT, NOW - 61_000, incarnation="p1"),
            seen("decode-0", v.TRANSFER_QUEUE_REQS, 3, number=9),
            changes=[
                Change(at=NOW - 500 + i, subject="decode-0", kind="restart", id=i) for i in range(4)
            ],
            traits=(HURTS,),
        )

        plan = plan_repair(diagnosed(), found(), known, Policy())

        assert refused(plan) == {
            "nothing": "silent-stall on prefill-0>decode-0 has lasted 30 s; nothing seen ends it "
            "by itself. [e41] [e42]",
            "router": "The direct probe of prefill-0>decode-0, which passes no router, was late "
            "too. [e7]",
            "engine": "Restarting decode-0 alone is what led here: it was restarted 4 times "
            "against the same life of prefill-0 (trait decode_alone_restart_hurts: the prefill "
            "remembers dead peers). Restarting prefill-0 alone leaves decode-0 with 3 requests "
            "that wait for the old one's hand-offs. [e9]",
        }

    def test_undetermined_touches_nothing_and_says_what_to_observe(self):
        """Without a cause there is no repair, only the next observation."""
        plan = plan_repair(
            diagnosed("undetermined", look="take the stacks of every rank"), found(), facts(), AUTO
        )

        assert (plan.scope, plan.steps) == ("nothing", ())
        assert "Observe next: take the stacks of every rank" in plan.because

    @pytest.mark.parametrize(
        ("diagnosis", "finding"),
        [
            (diagnosed("none"), found()),
            (diagnosed(leading=mode("overload-not-stall", "nothing")), found()),
            (diagnosed(), found("slow-but-moving", actionable=False)),
            (diagnosed(leading=mode(scope="pair"), subject="host"), None),
        ],
    )
    def test_nothing_is_done_without_a_cause_that_calls_for_it(self, diagnosis, finding):
        """No cause, overload, a finding that is only told, or an unknown pair: no steps."""
        deployed = deployment(prefills=2, decodes=2)

        plan = plan_repair(diagnosis, finding, facts(deployed=deployed), AUTO)

        assert (plan.scope, plan.steps, plan.refused) == ("nothing", (), ())
        assert plan.because

    def test_a_router_fault_restarts_the_router_alone(self):
        """Engines are left alone when the router is what disagrees."""
        plan = plan_repair(
            diagnosed(leading=mode("router-state-divergence", "router"), subject="router"),
            found("router-disagrees", "router"),
            facts(),
            Policy(),
        )

        assert plan.scope == "router"
        assert ids(plan) == ["stop:router", "gone:router", "start:router", "routed:router"]
        assert set(refused(plan)) == {"nothing"}

    @pytest.mark.parametrize(
        ("traits", "scope", "stops"),
        [
            ((), "engine", ["stop:decode-0"]),
            ((HURTS,), "pair", ["stop:router", "stop:decode-0", "stop:prefill-0"]),
        ],
    )
    def test_a_dead_decode_is_restarted_alone_only_where_that_is_harmless(
        self, traits, scope, stops
    ):
        """A trait that says decode alone hurts lifts the repair to the pair."""
        plan = plan_repair(
            diagnosed(leading=mode("dead-worker", "engine"), subject="decode-0"),
            found("member-down", "decode-0"),
            facts(seen("decode-0", v.ALIVE, value=False), traits=traits),
            Policy(),
        )

        assert (plan.scope, ids(plan, "stop")) == (scope, stops)

    def test_a_pair_that_is_wholly_dead_is_started_as_one(self):
        """One engine alone would wait at a gate that needs the other."""
        plan = plan_repair(
            diagnosed(leading=mode("dead-worker", "engine"), subject="prefill-0"),
            found("member-down", "prefill-0"),
            facts(
                *(seen(name, v.ALIVE, value=False) for name in ("prefill-0", "decode-0", "router"))
            ),
            Policy(),
        )

        assert plan.scope == "pair"
        assert ids(plan, "start") == ["start:prefill-0", "start:decode-0", "start:router"]
        assert refused(plan)["engine"].startswith("prefill-0, decode-0 and router are dead")

    def test_the_cell_whose_probe_hangs_names_the_pair(self):
        """When the subject is one engine of several, the direct probes say which pair."""
        deployed = deployment(prefills=2, decodes=1)
        known = facts(
            seen("prefill-0>decode-0", v.PROBE, "completed"),
            seen("prefill-1>decode-0", v.PROBE, "stuck"),
            deployed=deployed,
        )

        plan = plan_repair(diagnosed(subject="decode-0"), None, known, Policy())

        assert ids(plan, "stop") == ["stop:decode-0", "stop:prefill-1"]


CHANGES = (
    Change(
        at=NOW - 9000, subject="decode-0", kind="flag", what="--cuda-graph-max-bs",
        before=None, after="96", id=1,
    ),
    Change(at=NOW - 800, subject="decode-0", kind="restart", id=2),
    Change(
        at=NOW - 700, subject="decode-0", kind="env", what="SGLANG_X", before="0", after="1", id=3
    ),
)  # fmt: skip


def judged(number, verdict):
    """A change's verdict."""
    return ChangeVerdict(
        change=number, subject="decode-0", what="", at=0.0, verdict=verdict, because=""
    )


class TestKeptAndCosts:
    def test_what_is_not_implicated_is_kept_and_the_rest_gets_its_exact_edit(self):
        """Improvements stay; an implicated setting comes with the edit that reverts it."""
        diagnosis = diagnosed(
            changes=(judged(1, "exonerated"), judged(2, "implicated"), judged(3, "implicated"))
        )

        plan = plan_repair(diagnosis, found(), facts(changes=CHANGES), Policy())

        assert plan.kept == ("decode-0: --cuda-graph-max-bs absent -> 96",)
        assert plan.config_edit == "decode-0: set SGLANG_X back from 1 to 0"

    def test_a_configuration_cause_is_never_applied_alone(self):
        """Scope config: the edit is shown, nothing is restarted, a person must approve."""
        diagnosis = diagnosed(
            leading=mode("flag-deadlock", "config"), changes=(judged(3, "implicated"),)
        )

        plan = plan_repair(
            diagnosis, found(), facts(changes=CHANGES), Policy(mode="auto", auto_scopes=("config",))
        )

        assert (plan.scope, plan.steps, plan.needs_approval) == ("config", (), True)

    def test_start_times_are_learned_only_from_starts_that_were_watched(self):
        """A first answer counts when somebody was already looking at the start."""
        known = facts(
            seen("decode-0", v.STARTED_AT, NOW - 100, at=NOW - 90, incarnation="d1"),
            seen("decode-0", v.HEALTH_STATUS, None, at=NOW - 101, missing="refused"),
            seen("decode-0", v.HEALTH_STATUS, 200, at=NOW - 93),
            seen("prefill-0", v.STARTED_AT, NOW - 9000, at=NOW - 90, incarnation="p1"),
            seen("prefill-0", v.HEALTH_STATUS, 200, at=NOW - 90),
        )

        plan = plan_repair(diagnosed(), found(), known, Policy())

        assert plan.costs[:2] == (
            "prefill-0: start time not yet known.",
            "decode-0: ready 7.0 s after its start, as last seen.",
        )
        assert "Outage: about 13 s plus the start of prefill-0 and router." in plan.costs

    def test_lost_requests_come_from_the_router(self):
        """What the router counts as active is what a co-restart loses."""
        known = facts(seen("router", v.ROUTER_ACTIVE_REQS, 11, number=5))

        plan = plan_repair(diagnosed(), found(), known, Policy())

        assert (
            "Requests lost: up to 11, those in flight; the router counts 11 active [e5]."
            in plan.costs
        )

    def test_without_a_router_count_the_queues_are_read_once(self):
        """Both sides hold the same request: it is not counted twice."""
        known = facts(
            seen("prefill-0", v.INFLIGHT_QUEUE_REQS, 8, number=5),
            seen("decode-0", v.TRANSFER_QUEUE_REQS, 8, number=6),
        )

        plan = plan_repair(diagnosed(), found(), known, Policy())

        assert any(cost.startswith("Requests lost: up to 8,") for cost in plan.costs)


class TestApproval:
    def test_auto_acts_alone_within_its_scopes(self):
        """Mode auto with the scope allowed needs nobody."""
        assert plan_repair(diagnosed(), found(), facts(), AUTO).needs_approval is False

    @pytest.mark.parametrize(
        ("policy", "scope", "why"),
        [
            (Policy(), "pair", "the policy is advise"),
            (Policy(mode="approve"), "pair", "the policy is approve"),
            (Policy(mode="auto"), "pair", "scope pair is not in auto_scopes"),
            (Policy(mode="auto", auto_scopes=("role",)), "role:decode", "never repaired without"),
            (Policy(mode="auto", auto_scopes=("all",)), "all", "never repaired without"),
        ],
    )
    def test_everything_else_needs_a_person(self, policy, scope, why):
        """Advice, foreign scopes, role and all always wait for approval and say why."""
        plan = plan_repair(diagnosed(leading=mode(scope=scope)), found(), facts(), policy)

        assert plan.needs_approval is True
        assert why in plan.because

    def test_a_loading_member_holds_the_repair(self):
        """Started seconds ago and not yet answering: a person decides."""
        loading = seen("decode-0", v.STARTED_AT, NOW - 12, incarnation="d9")
        answered = seen("decode-0", v.HEALTH_STATUS, 200, at=NOW - 2)

        held = plan_repair(diagnosed(), found(), facts(loading), AUTO)
        free = plan_repair(diagnosed(), found(), facts(loading, answered), AUTO)

        assert held.needs_approval is True
        assert "decode-0 is still loading, started 12 s ago" in held.because
        assert free.needs_approval is False

    def test_members_nobody_supervises_need_a_person(self):
        """Tandem says which steps are yours."""
        plan = plan_repair(
            diagnosed(), found(), facts(deployed=deployment(supervisor="none")), AUTO
        )

        assert plan.needs_approval is True
        assert any("these steps are yours" in cost for cost in plan.costs)


def test_the_same_facts_give_the_same_plan():
    """A plan is a function of what it is given."""
    known = facts(seen(CELL, v.PROBE, "late"), changes=CHANGES, traits=(HURTS,))

    assert plan_repair(diagnosed(), found(), known, AUTO) == plan_repair(
        diagnosed(), found(), known, AUTO
    )


def test_an_empty_deployment_has_nothing_to_start():
    """No members, no steps."""
    assert bring_up(Deployment(name="empty", members=()), Policy()).steps == ()

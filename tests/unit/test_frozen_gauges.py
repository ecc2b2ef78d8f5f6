"""A gauge that may have frozen is neither a zero nor a queue: judged as if it had not been seen."""

import msgspec
import pytest

import faults
from repairs import POLICY
from scenes import DECODE, PREFILL
from tandem import signs
from tandem.detect import detect
from tandem.diagnose import diagnose
from tandem.facts import Facts
from tandem.failures import discover
from tandem.lost import lost_requests
from tandem.plan import plan_repair
from tandem.records import Observation, Thresholds
from tandem.records import vocabulary as v

TIMELINES = (
    *("serving", "idle", "burst", "long_prefill", "overload", "cold_start", "decode_hangs"),
    *("stale_peers", "orphaned_transfers", "near_miss", "stall_without_restart", "ranks_apart"),
    *("abort_wedge", "router_diverges", "failing_handoffs", "dead_decode"),
)


def queues(seen: Observation) -> bool:
    """Whether it is a queue count of a live endpoint."""
    return seen.source == signs.LIVE


def painted(scene, change):
    """The facts of a scene, each live queue count changed."""
    before = scene.facts()
    rows = [
        change(one) if queues(one) else one
        for one in (before.observation(number) for number in range(1, len(scene.observations) + 1))
        if one is not None
    ]
    return Facts(
        scene.deployment, rows, now=scene.now, changes=before.changes, traits=before.traits
    )


def frozen(value):
    """The same count as a gauge of the metrics page that stands still."""
    return lambda seen: msgspec.structs.replace(seen, source="metrics", value=value)


def unseen(seen):
    """Nothing was to be had of it."""
    return msgspec.structs.replace(seen, value=None, missing="/v1/loads: answered HTTP 500")


def judged(facts):
    """Everything that judgement says, as one comparable value; texts of evidence ids apart."""
    findings = detect(facts, (), Thresholds())
    said = [(one.kind, one.subject, one.summary, one.onset_at) for one in findings]
    verdicts = []
    for finding in findings[:1]:
        diagnosis = diagnose(facts, findings, discover(), None)
        plan = plan_repair(diagnosis, finding, facts, POLICY)
        verdicts = [
            [(mode.mode, mode.standing) for mode in diagnosis.modes],
            [(step.verb, step.target) for step in plan.steps],
            lost_requests(facts, plan),
            plan.costs,
        ]
    return said, verdicts


@pytest.mark.parametrize("value", [0, 7])
@pytest.mark.parametrize("name", TIMELINES)
def test_a_frozen_gauge_is_judged_as_if_it_was_not_seen(name, value):
    """Whatever number it froze at, findings, verdicts, plan and losses are those without it."""
    scene = getattr(faults, name)()

    assert judged(painted(scene, unseen)) == judged(painted(scene, frozen(value)))


class TestChanged:
    """Since when a gauge reads as it does."""

    def test_it_is_the_look_at_which_the_present_value_came(self):
        """A queue that rose and stayed has stood since it rose."""
        scene = faults.serving()
        for value in (0, 3, 3, 3):
            scene.now += 1.0
            scene.see("metrics", PREFILL, v.TOKEN_USAGE, value)
        since = scene.facts().changed(PREFILL, v.TOKEN_USAGE, source="metrics")

        assert since is not None
        assert (since.at, since.value) == (scene.now - 2.0, 3.0)

    def test_what_never_changed_stands_since_it_was_first_seen(self):
        """And what was never seen since never."""
        scene = faults.serving()
        scene.see("metrics", DECODE, "other", 1)
        first = scene.now
        scene.now += 1.0
        scene.see("metrics", DECODE, "other", 1)
        facts = scene.facts()

        assert facts.changed(DECODE, "other").at == first
        assert facts.changed(DECODE, "nothing") is None

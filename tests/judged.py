"""Detect and diagnose a painted scene at its end; every scene with its right answer."""

from collections.abc import Callable
from functools import cache

import faults
from scenes import Scene
from tandem.detect import detect
from tandem.diagnose import diagnose
from tandem.facts import Facts
from tandem.failures import discover
from tandem.records import Diagnosis, Thresholds

DEGRADED = "degraded-pair-after-decode-restarts"

ANSWERS: dict[Callable[[], Scene], tuple[str, str | None, str | None]] = {
    faults.stale_peers: ("best_supported", DEGRADED, "stale-peer"),
    faults.orphaned_transfers: ("best_supported", DEGRADED, "orphaned-transfer"),
    faults.near_miss: ("none", None, None),
    faults.serving: ("none", None, None),
    faults.idle: ("none", None, None),
    faults.burst: ("none", None, None),
    faults.cold_start: ("none", None, None),
    faults.lost_response: ("none", None, None),
    faults.overload: ("best_supported", "overload-not-stall", None),
    faults.ranks_apart: ("confirmed", "collective-desync", None),
    faults.abort_wedge: ("confirmed", "abort-cascade-wedge", None),
    faults.router_diverges: ("best_supported", "router-state-divergence", None),
    faults.dead_decode: ("confirmed", "dead-worker", None),
    # Faults that no mode describes: the only right answer is that it is not known.
    faults.stall_without_restart: ("undetermined", None, None),
    faults.stall_long_after_a_restart: ("undetermined", None, None),
    faults.stall_before_a_restart: ("undetermined", None, None),
    faults.decode_hangs: ("undetermined", None, None),
    faults.failing_handoffs: ("undetermined", None, None),
}
"""Every scene that is judged at its end: verdict, cause, mechanism."""


@cache
def facts_of(paint: Callable[[], Scene]) -> Facts:
    """A scene's facts, painted once."""
    return paint().facts()


def judge(facts: Facts, hunch: str | None = None) -> Diagnosis:
    """What the whole of judgement says of some facts."""
    return diagnose(facts, detect(facts, (), Thresholds()), discover(), hunch)


def judged(scene: Scene, hunch: str | None = None) -> Diagnosis:
    """What the whole of judgement says of a scene."""
    return judge(scene.facts(), hunch)

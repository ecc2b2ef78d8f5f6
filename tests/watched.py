"""Detect run every second over a painted scene, as the loop runs it."""

from scenes import T0, Scene
from tandem.detect import detect
from tandem.records import Finding, Thresholds

THRESHOLDS = Thresholds()


def watched(
    scene: Scene, *, since_s: float = 5.0, without: tuple[str, ...] = ()
) -> list[tuple[float, Finding]]:
    """Each opening and closing of a finding, with its moment in seconds since the scene began."""
    facts = scene.facts(without=without)
    told: list[tuple[float, Finding]] = []
    standing: tuple[Finding, ...] = ()
    moment = T0 + since_s
    while moment <= scene.now:
        found = detect(facts.at(moment), standing, THRESHOLDS)
        known = {one.id for one in standing}
        told += [(moment - T0, one) for one in found if one.closed_at or one.id not in known]
        standing = tuple(one for one in found if one.closed_at is None)
        moment += 1.0
    return told


def opened(scene: Scene, *, since_s: float = 5.0) -> list[tuple[str, float]]:
    """The kind and the moment of each finding that opened."""
    return [(one.kind, at) for at, one in watched(scene, since_s=since_s) if one.closed_at is None]

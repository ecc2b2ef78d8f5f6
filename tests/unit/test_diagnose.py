"""Diagnose over painted timelines: the verdict, its reasons and its honesty."""

import msgspec

from faults import near_miss, orphaned_transfers, stale_peers
from scenes import Scene
from tandem.detect import detect
from tandem.diagnose import diagnose
from tandem.failures import discover
from tandem.records import Diagnosis, Thresholds

MODE = "degraded-pair-after-decode-restarts"


def judged(scene: Scene, hunch: str | None = None, **cut: tuple[str, ...]) -> Diagnosis:
    """Detect and diagnose a scene at its end, as `investigate` does."""
    facts = scene.facts(**cut)
    return diagnose(facts, detect(facts, (), Thresholds()), discover(), hunch)


class TestIncident:
    """The incident of the acceptance story, by both mechanisms."""

    def test_stale_peers_are_named(self):
        """A floor that rises between restarts names the family and the stale peer."""
        said = judged(stale_peers())

        assert (said.verdict, said.cause, said.mechanism) == ("best_supported", MODE, "stale-peer")

    def test_orphaned_transfers_are_named(self):
        """A floor that rises only at restarts names the family and the orphaned transfer."""
        said = judged(orphaned_transfers())

        assert (said.verdict, said.cause) == ("best_supported", MODE)
        assert said.mechanism == "orphaned-transfer"

    def test_the_near_miss_accuses_nothing(self):
        """The same restarts with leases have no cause."""
        said = judged(near_miss())

        assert (said.verdict, said.cause) == ("none", None)

    def test_the_same_facts_give_the_same_bytes(self):
        """Two diagnoses of one scene are equal to the byte."""
        scene = stale_peers()

        assert msgspec.json.encode(judged(scene)) == msgspec.json.encode(judged(scene))

"""Detect over painted timelines: what is found, when, and what is left alone."""

from scenes import CELL, T0, Scene, near_miss, orphaned_transfers, stale_peers
from tandem.detect import detect
from tandem.records import Finding, Thresholds

THRESHOLDS = Thresholds()


def watched(scene: Scene, *, since: float = T0 + 5.0) -> list[tuple[float, Finding]]:
    """Run detect every second as the loop does: each opening and closing, with its moment."""
    facts = scene.facts()
    told: list[tuple[float, Finding]] = []
    standing: tuple[Finding, ...] = ()
    moment = since
    while moment <= scene.now:
        found = detect(facts.at(moment), standing, THRESHOLDS)
        known = {one.id for one in standing}
        told += [(moment, one) for one in found if one.closed_at or one.id not in known]
        standing = tuple(one for one in found if one.closed_at is None)
        moment += 1.0
    return told


class TestIncident:
    """The pair that goes silent after decode-only restarts."""

    def test_total_silence_is_found_within_ten_seconds(self):
        """A silent stall is found at most 10 s after the last hand-off completed."""
        scene = stale_peers()
        silent_since = scene.now - 15.0
        [(found_at, finding)] = [
            (at, one)
            for at, one in watched(scene)
            if one.kind == "silent-stall" and one.closed_at is None
        ]

        assert finding.subject == CELL
        assert found_at - silent_since <= 6.0
        assert {witness.side for witness in finding.witnesses} == {"client", "server"}

    def test_a_partial_stall_hands_its_onset_to_the_silent_one(self):
        """The silent stall carries the onset of the partial one, which closes in that turn."""
        told = watched(stale_peers())
        [opened] = [one for _, one in told if one.kind == "silent-stall"]
        [closed] = [
            one
            for _, one in told
            if one.kind == "partial-stall" and one.closed_at == opened.found_at
        ]

        assert opened.onset_at == closed.onset_at
        assert opened.subject == closed.subject

    def test_orphans_are_found_when_the_pair_goes_silent(self):
        """Orphaned transfers fill the slots; the silence that follows is found."""
        kinds = [one.kind for _, one in watched(orphaned_transfers())]

        assert kinds == ["silent-stall"]

    def test_restarts_with_healthy_leases_are_no_finding(self):
        """The same restarts with queues that drain again raise nothing."""
        assert watched(near_miss()) == []

"""What a watch counts of itself, and that the page stays small."""

import msgspec
import pytest

from stores import FINDING
from tandem.parts import Turn
from tandem.ports import Harvest
from tandem.records import Observation
from tandem.records import vocabulary as v
from tandem.service.counts import KINDS_MAX, Counts
from tandem.service.exposition import page

T = 1_764_500_000.0


def seen(name, value=None, **fields):
    """One observation."""
    return Observation(source="x", subject="p", name=name, at=T, value=value, **fields)


def turn(number=1, *, seconds=0.2, looked=True, findings=()):
    """One turn that ended."""
    return Turn(number, T + number, seconds, looked, findings)


def shown(counts):
    """Give the page as a dict of its lines."""
    text = page(counts.families(store_bytes=4096, incidents={"closed": 2}), openmetrics=False)
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


@pytest.fixture
def counts():
    """Give the counts of a watch that has just begun."""
    return Counts("laptop", T)


class TestCounts:
    """One number each."""

    def test_before_anything_happened_the_known_words_are_zero(self, counts):
        """A rule can see the first finding rise from zero; the last turn is at 0, not absent."""
        lines = shown(counts)

        assert lines['tandem_watch_findings_open{kind="silent-stall"}'] == 0
        assert lines['tandem_watch_incidents{state="failed"}'] == 0
        assert lines['tandem_watch_probe_looks_total{result="late"}'] == 0
        assert lines["tandem_watch_last_turn_timestamp_seconds"] == 0

    def test_turns_are_counted_with_their_length(self, counts):
        """Total, histogram and the moment of the last."""
        counts.turned(turn(1, seconds=0.05))
        counts.turned(turn(2, seconds=0.7))
        counts.turned(turn(3, seconds=99.0))
        lines = shown(counts)

        assert lines["tandem_watch_turns_total"] == 3
        assert lines['tandem_watch_turn_seconds_bucket{le="0.05"}'] == 1
        assert lines['tandem_watch_turn_seconds_bucket{le="1.0"}'] == 2
        assert lines['tandem_watch_turn_seconds_bucket{le="30.0"}'] == 2
        assert lines['tandem_watch_turn_seconds_bucket{le="+Inf"}'] == 3
        assert lines["tandem_watch_turn_seconds_sum"] == pytest.approx(99.75)
        assert lines["tandem_watch_last_turn_timestamp_seconds"] == T + 3

    def test_a_turn_that_broke_is_no_sign_of_life(self, counts):
        """It counts as a turn and as broken; the dead man's rule does not see it."""
        counts.turned(turn(1))
        counts.turned(turn(2, looked=False))
        lines = shown(counts)

        assert lines["tandem_watch_turns_broken_total"] == 1
        assert lines["tandem_watch_last_turn_timestamp_seconds"] == T + 1

    def test_what_was_seen_and_missed_is_counted(self, counts):
        """Observations, those that are missing, probes with their tokens, sources that broke."""
        counts.looked(
            Harvest(
                (
                    seen(v.PROBE, "completed"),
                    seen(v.PROBES_SENT_TOTAL, 7),
                    seen(v.PROBE_TOKENS_TOTAL, 182),
                    seen(v.PROBES_SENT_TOTAL, 8),
                    seen(v.PROBE_TOKENS_TOTAL, 208),
                    seen(v.PROBE, "late"),
                    seen(v.HEALTH_STATUS, missing="connection refused"),
                    seen(v.SOURCE_FAILED, label="engine:decode-0", missing="it broke"),
                    seen(v.SOURCE_FAILED, label="engine:prefill-0", missing="it broke"),
                )
            )
        )
        lines = shown(counts)

        assert lines["tandem_watch_observations_total"] == 9
        assert lines["tandem_watch_observations_missing_total"] == 3
        assert lines['tandem_watch_probe_looks_total{result="completed"}'] == 1
        assert lines['tandem_watch_probe_looks_total{result="late"}'] == 1
        assert lines["tandem_watch_probes_total"] == 8
        assert lines["tandem_watch_probe_tokens_total"] == 208
        assert lines['tandem_watch_sources_failed_total{source="engine"}'] == 2

    def test_findings_are_those_that_stand_now(self, counts):
        """What has closed is not counted any more."""
        counts.turned(turn(1, findings=(FINDING,)))
        stood = shown(counts)
        told = msgspec.structs.replace(FINDING, actionable=False)
        counts.turned(turn(2, findings=(told,)))
        only_told = shown(counts)
        counts.turned(turn(3))
        kinds = [
            f'tandem_watch_findings_{of}{{kind="silent-stall"}}' for of in ("open", "actionable")
        ]

        assert [stood[kind] for kind in kinds] == [1, 1]
        assert [only_told[kind] for kind in kinds] == [1, 0]
        assert [shown(counts)[kind] for kind in kinds] == [0, 0]

    def test_what_was_looked_up_is_shown(self, counts):
        """Store, incidents, and the process's own use."""
        lines = shown(counts)

        assert lines["tandem_watch_store_bytes"] == 4096
        assert lines['tandem_watch_incidents{state="closed"}'] == 2
        assert lines["process_resident_memory_bytes"] > 1e6
        assert lines["process_cpu_seconds_total"] > 0

    def test_the_page_stays_small(self, counts):
        """Ten thousand members with hostile names add no line beyond a bound."""
        for number in range(10_000):
            counts.looked(
                Harvest(
                    (
                        seen(v.SOURCE_FAILED, label=f"s{number}:x", missing="it broke"),
                        seen(v.PROBE, f"result {number}"),
                    )
                )
            )
        lines = shown(counts)

        assert len(lines) < 3 * KINDS_MAX + 50
        assert lines['tandem_watch_sources_failed_total{source="other"}'] == 10_000 - KINDS_MAX

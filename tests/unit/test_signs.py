"""Readings of facts that detect and the failure modes share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults import flow, near_miss, serving, silence, stale_peers
from scenes import CELL, DECODE, PREFILL, ROUTER, T0, Scene, deployment
from tandem import signs
from tandem.facts import Facts, Sample
from tandem.records import Change, Observation
from tandem.records import vocabulary as v


class TestViews:
    """`Facts.at`: the same facts at an earlier moment."""

    def test_a_view_sees_nothing_later(self):
        """Rows, numbers and changes after the moment are hidden, those before are all there."""
        scene = stale_peers()
        facts = scene.facts()
        moment = T0 + 70.0
        view = facts.at(moment)

        rows = facts.rows(PREFILL, v.INFLIGHT_QUEUE_REQS)
        assert view.rows(PREFILL, v.INFLIGHT_QUEUE_REQS) == [r for r in rows if r.at <= moment]
        assert [c for c in facts.changes if c.at <= moment] == list(view.changes)
        assert view.now == moment
        assert view.numbers(DECODE, v.REQUESTS_TOTAL)[-1].at == moment

    def test_a_source_can_be_asked_for_alone(self):
        """Numbers of one source leave out the same name from another."""
        scene = serving()
        scene.see("metrics", PREFILL, v.INFLIGHT_QUEUE_REQS, 7)
        facts = scene.facts()

        assert facts.numbers(PREFILL, v.INFLIGHT_QUEUE_REQS)[-1].value == 7
        assert facts.numbers(PREFILL, v.INFLIGHT_QUEUE_REQS, source="loads")[-1].value == 0


class TestCovering:
    """A gap is never read as silence."""

    def test_a_covered_window_has_the_sample_before_it(self):
        """The last sample before the window and all inside speak of it."""
        samples = [Sample(float(at), float(at), at) for at in range(10)]

        assert signs.covering(samples, 5.5, 9.0) == samples[5:]

    @pytest.mark.parametrize(
        "times",
        [(), (1.0, 2.0), (6.0, 7.0, 8.0, 9.0), (1.0, 9.0), (1.0, 6.0, 6.5)],
        ids=["nothing", "stopped", "no-past", "one-look", "stale"],
    )
    def test_what_is_not_covered_is_unknown(self, times):
        """Without a past, with one look, or with old looks only, nothing is said of the window."""
        samples = [Sample(at, 1.0, 0) for at in times]

        assert signs.covering(samples, 5.0, 9.0) is None


class TestProgress:
    """What counts as work."""

    def test_health_checks_are_no_progress(self):
        """Tokens of health checks alone are nothing beyond health."""
        facts = silence(serving()).run(10).facts()
        beyond = signs.beyond_health(facts, PREFILL, 4.0)
        made = signs.grown(facts, PREFILL, v.PROGRESS_TOKENS_TOTAL, 4.0)

        assert beyond is not None
        assert made is not None
        assert beyond.value == 0.0
        assert made.value > 0

    def test_tokens_of_a_running_decode_are_progress(self):
        """While a request runs on a decode no token is taken for a health check's."""
        scene = silence(serving())
        scene.decode.queues = {"running": 1.0}
        facts = scene.run(10).facts()
        beyond = signs.beyond_health(facts, DECODE, 4.0)

        assert beyond is not None
        assert beyond.value > 0

    def test_aborted_requests_are_no_completions(self):
        """Requests that ended by an abort complete nothing."""
        scene = silence(serving())
        scene.decode.aborts = 2.0
        facts = scene.run(10).facts()
        done = signs.completed(facts, DECODE, 4.0)
        moved = signs.last_moved(facts, DECODE)

        assert done is not None
        assert done.value == 0.0
        assert moved is not None
        assert moved.at == T0 + 60.0

    def test_a_reset_counts_from_zero(self):
        """A counter that falls was restarted: only what it counted since is growth."""
        samples = [Sample(0.0, 10.0, 1), Sample(1.0, 12.0, 2), Sample(2.0, 3.0, 3)]

        assert signs.growth(samples).value == 5.0


class TestLives:
    """Incarnations from processes and from the ledger."""

    def test_one_restart_seen_both_ways_is_one_life(self):
        """The ledger's row and the process's start time are the same life."""
        lives = signs.lives(near_miss().facts(), DECODE)

        assert len(lives) == 4

    def test_the_ledger_reaches_further_than_the_processes(self):
        """A restart that only the ledger knows is a life."""
        scene = serving()
        scene.changes.append(Change(at=T0 - 500.0, subject=DECODE, kind="restart"))
        lives = signs.lives(scene.facts(), DECODE)

        assert [life.started_at for life in lives] == [T0 - 3600.0, T0 - 500.0]


class TestEnds:
    """Which prefill and decode a subject speaks of."""

    @pytest.mark.parametrize(
        ("subject", "expected"),
        [
            (CELL, (PREFILL, DECODE)),
            (f"{ROUTER}>{CELL}", (PREFILL, DECODE)),
            (PREFILL, (PREFILL, DECODE)),
            (ROUTER, (PREFILL, DECODE)),
        ],
    )
    def test_one_pair_is_always_both_ends(self, subject, expected):
        """In a deployment of one pair every subject means that pair."""
        assert signs.ends(Scene().facts(), subject) == expected

    def test_a_matrix_leaves_open_what_is_not_named(self):
        """With two decodes a prefill names itself and no decode."""
        assert signs.ends(Scene(1, 2).facts(), PREFILL) == (PREFILL, None)


class TestLittle:
    """What traffic explains of a queue."""

    def test_the_mean_in_flight_is_rate_times_duration(self):
        """Two hand-offs a second of half a second each keep one in flight."""
        scene = serving(2.0)
        scene.prefill.seconds_each = 0.5
        facts = flow(scene).run(20).facts()

        assert signs.explained(facts, PREFILL, 10.0) == pytest.approx(1.0, abs=0.15)

    @given(st.integers(1, 30), st.floats(0.0, 30.0), st.integers(1, 60))
    def test_chance_is_the_poisson_tail_to_the_power_of_looks(self, held, mean, looks):
        """The chance equals the tail of the Poisson distribution, for every look anew."""
        below = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(held))

        assert signs.chance(held, mean, 1) == pytest.approx(max(0.0, 1 - below), abs=1e-9)
        assert 0.0 <= signs.chance(held, mean, looks) <= 1.0

    def test_durations_unknown_are_taken_generously(self):
        """Without durations a hand-off counts as one second in flight."""
        facts = serving(2.0).facts(without=(v.TRANSFER_SECONDS_TOTAL,))

        assert signs.explained(facts, PREFILL, 10.0) == pytest.approx(2.0, abs=0.3)
        assert signs.transfer_s(facts, PREFILL) == 0.0


def test_frozen_gauges_are_not_live():
    """A queue known from the metrics page alone has no floor."""
    scene = Scene()
    for second in range(20):
        scene.now += 1.0
        scene.observations.append(
            Observation(
                source="metrics",
                subject=PREFILL,
                name=v.INFLIGHT_QUEUE_REQS,
                at=scene.now,
                value=8,
                id=second,
            )
        )

    assert signs.floor(scene.facts(), PREFILL, v.INFLIGHT_QUEUE_REQS, 5.0) is None
    assert signs.risen(scene.facts(), PREFILL, v.INFLIGHT_QUEUE_REQS) is None


class TestCompleted:
    """Completions: counted, unknown, or never counted yet."""

    @staticmethod
    def decode_page(*, reads: int, counter: str | None) -> Facts:
        """A decode whose page was read once a second; its request counter absent, or unseen."""
        rows = []
        for at in range(10):
            tokens = float(at) if at < reads else None
            rows.append((v.PROGRESS_TOKENS_TOTAL, at, tokens, None if at < reads else "refused"))
            if counter is not None:
                rows.append((v.REQUESTS_TOTAL, at, None, counter))
        observations = [
            Observation(
                source="metrics",
                subject=DECODE,
                name=name,
                at=T0 + at,
                value=value,
                missing=missing,
                id=number,
            )
            for number, (name, at, value, missing) in enumerate(rows, start=1)
        ]
        return Facts(deployment(), observations, now=T0 + 9.0)

    def test_a_page_that_never_counted_a_request_says_none_completed(self):
        """A labelled counter appears with its first count: absent from a read page is zero."""
        facts = self.decode_page(reads=10, counter="not on the metrics page")

        reading = signs.completed(facts, DECODE, 4.0)

        assert reading is not None
        assert reading.value == 0.0

    @pytest.mark.parametrize(("reads", "counter"), [(3, "refused"), (10, None)])
    def test_a_page_that_was_not_read_says_nothing(self, reads, counter):
        """No page, or nobody who looked for the counter: what completed is unknown."""
        facts = self.decode_page(reads=reads, counter=counter)

        assert signs.completed(facts, DECODE, 4.0) is None

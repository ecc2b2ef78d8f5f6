"""Sampling: greedy, temperature, top-p, top-k, seeds, and log-probabilities that add up."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tandem_engine.sampling import (
    SamplingParams,
    gap_of,
    logprob_of,
    rng_of,
    sample,
    top_logprobs,
)

ROWS = arrays(np.float32, st.integers(2, 60), elements=st.floats(-30, 30, width=32))


def row(*values):
    """Logits of a small vocabulary."""
    return np.array(values, dtype=np.float32)


class TestSample:
    """Which token comes out."""

    @given(ROWS)
    def test_greedy_takes_the_best(self, logits):
        """Temperature 0 takes the first of the best tokens, and so does top_k 1."""
        expected = int(np.flatnonzero(logits == logits.max())[0])

        assert expected == sample(logits, SamplingParams(temperature=0.0), rng_of(SamplingParams()))
        assert expected == sample(logits, SamplingParams(top_k=1), rng_of(SamplingParams()))

    @given(ROWS, st.integers(1, 10), st.integers(0, 2**32))
    def test_top_k_bounds_the_choice(self, logits, k, seed):
        """No token outside the k best is ever chosen."""
        params = SamplingParams(top_k=k, temperature=5.0, seed=seed)

        assert sample(logits, params, rng_of(params)) in {t for _, t in top_logprobs(logits, k)}

    def test_top_p_keeps_the_smallest_head(self):
        """Tokens beyond the mass asked for are never chosen; the best one always may be."""
        logits = row(math.log(0.6), math.log(0.3), math.log(0.1))
        params = SamplingParams(top_p=0.7, seed=1)
        rng = rng_of(params)

        assert {sample(logits, params, rng) for _ in range(200)} == {0, 1}
        assert sample(logits, SamplingParams(top_p=1e-9), rng) == 0

    def test_frequencies_follow_the_chances(self):
        """Over many draws each token comes as often as its probability says."""
        logits = row(math.log(0.5), math.log(0.3), math.log(0.2))
        params = SamplingParams(seed=3)
        rng = rng_of(params)
        counts = np.bincount([sample(logits, params, rng) for _ in range(4000)], minlength=3)

        assert np.abs(counts / 4000 - [0.5, 0.3, 0.2]).max() < 0.04

    def test_temperature_flattens(self):
        """A high temperature chooses what a low one would not."""
        logits = row(5.0, 0.0)
        cold, hot = SamplingParams(temperature=0.1, seed=0), SamplingParams(temperature=50, seed=0)

        assert {sample(logits, cold, rng_of(cold)) for _ in range(50)} == {0}
        rng = rng_of(hot)
        assert {sample(logits, hot, rng) for _ in range(50)} == {0, 1}

    def test_a_seed_repeats(self):
        """Two generators of one seed choose the same tokens."""
        logits = np.random.default_rng(0).standard_normal(100, dtype=np.float32)
        params = SamplingParams(seed=42)
        first, second = rng_of(params), rng_of(params)

        assert [sample(logits, params, first) for _ in range(20)] == [
            sample(logits, params, second) for _ in range(20)
        ]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.1),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("top_p", math.nan),
            ("top_k", 0),
            ("top_k", -2),
        ],
    )
    def test_nonsense_is_refused_by_name(self, field, value):
        """A parameter out of range names itself."""
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


class TestLogprobs:
    """Log-probabilities and the oracle's gap."""

    @given(ROWS)
    def test_probabilities_sum_to_one(self, logits):
        """The log-probabilities of the whole vocabulary are a distribution."""
        total = sum(math.exp(logprob_of(logits, token)) for token in range(logits.size))

        assert total == pytest.approx(1.0, abs=1e-4)

    @given(ROWS, st.integers(0, 80))
    def test_top_is_sorted_and_agrees(self, logits, k):
        """The k best are in order, distinct, and carry their own log-probabilities."""
        top = top_logprobs(logits, k)

        assert len(top) == min(k, logits.size)
        order = sorted(range(logits.size), key=lambda token: (-logits[token], token))
        assert [token for _, token in top] == order[:k]
        assert all(logprob == logprob_of(logits, token) for logprob, token in top)

    @given(ROWS, st.data())
    def test_gap_is_zero_for_the_best_alone(self, logits, data):
        """The gap is the distance to the best logit and never negative."""
        token = data.draw(st.integers(0, logits.size - 1))

        assert gap_of(logits, int(np.argmax(logits))) == 0.0
        assert gap_of(logits, token) == pytest.approx(float(logits.max() - logits[token]), abs=1e-3)
        assert gap_of(logits, token) >= 0.0

    def test_large_logits_do_not_overflow(self):
        """Logits of any size give finite log-probabilities."""
        assert logprob_of(row(3e4, 0.0), 1) == pytest.approx(-3e4)

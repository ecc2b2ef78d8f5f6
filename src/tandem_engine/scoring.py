"""Log-probabilities on their way: from logits, through a hand-off, to what SGLang shows.

For: input and output log-probabilities, and the seeded generators that let both sides of a pair
draw one reproducible sequence. Not for: choosing tokens (`sampling.py`).
"""

from collections.abc import Callable

import msgspec
import numpy as np

from tandem_engine.model import Logits
from tandem_engine.request import Score
from tandem_engine.sampling import SamplingParams, logprob_of, top_logprobs

Shown = tuple[float | None, int, str | None]
Names = Callable[[int], str | None]
"""The text of a token, or None where nobody asked for it."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[float, int, list[tuple[float, int]]]] = (
    msgspec.msgpack.Decoder(tuple[float, int, list[tuple[float, int]]])
)


def score(logits: Logits, token: int, top: int) -> Score:
    """The log-probability of a token under one row of logits, and the best `top` of the row."""
    return Score(logprob_of(logits, token), token, tuple(top_logprobs(logits, top)))


def unscored(token: int) -> Score:
    """The first scored position has no log-probability: nothing came before it."""
    return Score(None, token)


def packed(first: Score | None) -> bytes:
    """The first token's score for the hand-off's header; empty for none."""
    return b"" if first is None else _encoder.encode((first.logprob, first.token, first.top))


def unpacked(extra: bytes) -> Score | None:
    """What `packed` packed; raises `msgspec.MsgspecError` when it is something else."""
    if not extra:
        return None
    logprob, token, top = _decoder.decode(extra)
    return Score(logprob, token, tuple(top))


def rng_of(params: SamplingParams, position: int) -> np.random.Generator:
    """A generator for one output position: with a seed, the same on whichever side draws it."""
    if params.seed is None or params.greedy:
        return _free
    return np.random.default_rng([params.seed, position])


_free = np.random.default_rng()


def shown(score: Score, text: Names) -> Shown:
    """SGLang's `[log-probability, token id, text]`."""
    return (score.logprob, score.token, text(score.token))


def shown_top(score: Score, text: Names) -> list[Shown] | None:
    """SGLang's list of the best tokens at one position; null where nothing was scored."""
    if score.logprob is None:
        return None
    return [(logprob, token, text(token)) for logprob, token in score.top]

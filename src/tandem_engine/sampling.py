"""From logits to tokens and log-probabilities: pure functions over one row of logits.

For: the prefill's first token, every decode step, input log-probabilities, and the corruption
oracle (`gap_of`).
Not for: penalties, grammars or beams; the embedded engine refuses these.
"""

from dataclasses import dataclass

import numpy as np

from tandem_engine.model import Logits

TEMPERATURE_MIN = 1e-6
"""Below this SGLang is greedy; logits divided by less may be no numbers any more."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the names and defaults are SGLang's `sampling_params`."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is all tokens."""
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range with the field's name; raises `ValueError`."""
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; give 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; give more than 0 and at most 1")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; give -1 for all tokens, or at least 1")

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature < TEMPERATURE_MIN or self.top_k == 1


def rng_of(params: SamplingParams) -> np.random.Generator:
    """A generator for one request: reproducible when it names a seed."""
    return np.random.default_rng(params.seed)


def sample(logits: Logits, params: SamplingParams, rng: np.random.Generator) -> int:
    """Choose a token from one row of logits, shape (vocabulary,); ties go to the lowest id."""
    if params.greedy:
        return int(np.argmax(logits))
    order = _best_first(logits, params.top_k)
    chances = np.exp(_log_softmax(logits[order].astype(np.float64) / params.temperature))
    if params.top_p < 1.0:
        # Keep the smallest head whose mass reaches top_p; the first token always stays.
        keep = int(np.searchsorted(np.cumsum(chances), params.top_p)) + 1
        order, chances = order[:keep], chances[:keep]
    return int(rng.choice(order, p=chances / chances.sum()))


def logprob_of(logits: Logits, token: int) -> float:
    """The natural log-probability of `token` at temperature 1."""
    best = float(logits.max())
    return float(logits[token]) - best - _log_mass(logits, best)


def top_logprobs(logits: Logits, k: int) -> list[tuple[float, int]]:
    """The `k` best tokens as (log-probability, token), best first; ties by lowest id."""
    if k < 1:
        return []
    best = float(logits.max())
    mass = _log_mass(logits, best)
    return [(float(logits[token]) - best - mass, int(token)) for token in _best_first(logits, k)]


def gap_of(logits: Logits, token: int) -> float:
    """How far `token` is below the best one, in logits: 0 for a greedy choice.

    Under a clean prefill of the same text a greedy answer keeps this near zero at every token;
    KV of another request does not.
    """
    return float(logits.max()) - float(logits[token])


def _best_first(logits: Logits, k: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    if k == -1 or k >= logits.size:
        return np.argsort(-logits, kind="stable")
    # Everything at least as good as the k-th best, so that ties are cut by id and not by chance.
    floor = np.partition(logits, logits.size - k)[logits.size - k]
    candidates = np.flatnonzero(logits >= floor)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:k]


def _log_mass(logits: Logits, best: float) -> float:
    return float(np.log(np.exp(logits - np.float32(best)).sum(dtype=np.float64)))


def _log_softmax(
    scaled: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    shifted: np.ndarray[tuple[int], np.dtype[np.float64]] = scaled - scaled.max()
    return shifted - float(np.log(np.exp(shifted).sum()))

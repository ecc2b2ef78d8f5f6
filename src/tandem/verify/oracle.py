"""The corruption oracle: what an answer must not contain, and whether a clean prefill agrees.

For: session markers, the search for foreign ones, and the judgement of re-scored tokens.
Not for: sending requests (`sequential.py`, `sessions.py`).

Measured on SmolLM2-135M (64 answers of 24 tokens each, batch 16): the gap of clean answers is 0.000
throughout, KV cross-wired with another request gives a median of 8.8; near-ties that flip with the
batch keep small gaps above zero, so the profile's `gap_max` stands well above them.
"""

import secrets
from collections.abc import Iterable, Sequence

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = 5
"""70^5 = 1.7e9 words: a model does not say one of them by chance."""


def draw_markers(count: int) -> tuple[str, ...]:
    """That many different words that nobody has said before, from the system's randomness."""
    drawn: set[str] = set()
    while len(drawn) < count:
        drawn.add(
            "".join(secrets.choice(CONSONANTS) + secrets.choice(VOWELS) for _ in range(SYLLABLES))
        )
    return tuple(drawn)


def leaked(text: str, own: str, markers: Iterable[str]) -> str | None:
    """The marker of another session in this text, or None."""
    said = text.lower()
    return next((marker for marker in markers if marker != own and marker in said), None)


def sampled(count: int, most: int) -> tuple[int, ...]:
    """`most` of the numbers below `count`, drawn anew each run, ascending."""
    return tuple(sorted(secrets.SystemRandom().sample(range(count), min(count, most))))


def worst_gap(gaps: Sequence[float]) -> float:
    """The largest gap of an answer: 0 when every token is what a clean prefill would choose."""
    return max(gaps, default=0.0)

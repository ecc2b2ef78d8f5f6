"""The known prompt: one that a path is asked now and then, to see whether it answers as before.

For: noticing answers that change while nothing else does, the cheapest sign of corruption.
Not for: judging them (`detect`), or proof (`verify`): a greedy answer may differ by a near tie.
"""

PATTERN = ("one", "two", "three", "four", "five", "six", "seven", "eight")
"""Repeated: what follows is so likely that a near tie is not."""
IDLE_EVERY_S = 60.0
BUSY_EVERY_S = 300.0
"""While real traffic stands in for probes: tokens are dear then."""


def known_text(words: int) -> str:
    """That many words of the pattern, always the same."""
    return " ".join(PATTERN[number % len(PATTERN)] for number in range(words))


class Answers:
    """When the known prompt is due, and what it was answered in the present lives of the path."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._asked_at: float | None = None
        self._lives: tuple[str | None, ...] = ()
        self._first = ""
        self._newest: tuple[str, ...] = ()

    def due(self, now: float, *, busy: bool) -> bool:
        """Whether to ask it now; a source that just began asks it first when it is idle."""
        if self._asked_at is None:
            return not busy
        return now - self._asked_at >= (BUSY_EVERY_S if busy else IDLE_EVERY_S)

    def asked(self, now: float) -> None:
        """It is being asked."""
        self._asked_at = now

    def told(
        self, token_ids: tuple[int, ...], lives: tuple[str | None, ...]
    ) -> tuple[str, ...] | None:
        """First, last but one, last answer of these lives; None until there are as many."""
        said = " ".join(map(str, token_ids))
        if lives != self._lives:
            self._lives, self._first, self._newest = lives, said, ()
        self._newest = (*self._newest, said)[-2:]
        return (self._first, *self._newest) if len(self._newest) == 2 else None

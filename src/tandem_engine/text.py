"""From tokens to text, a piece at a time.

For: half UTF-8 characters across tokens, and stop strings that may span tokens.
Not for: token ids that end a request (`request.py`).
"""

import codecs


class TextStream:
    """The text of one request; what might still become a stop string is held back."""

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        """`stops` end the text; the stop string itself is not part of it, as in SGLang."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, piece: bytes, *, last: bool = False) -> str:
        """Add the bytes of a token; the text that is certain now.

        `last` gives out what was held back. After a stop string nothing more comes.
        """
        if self.stopped_by is not None:
            return ""
        self._held += self._decoder.decode(piece, last)
        # The one that is complete first counts, however many tokens arrive at a time.
        complete = [
            (at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        _, cut, found = min(complete, default=(0, len(self._held), None))
        if found is not None:
            self.stopped_by = found
        elif not last:
            cut -= self._overlap()
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def _overlap(self) -> int:
        """The longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

"""One thing wrong with one key of `tandem.toml`, said so that it can be put right.

For: the sentence. Not for: finding what is wrong (`tables.py`, `topology.py`).
"""

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

VALUE_SHOWN = 60
"""Characters of a refused value that are shown."""

_SECRET = re.compile(r"key|token|secret|pass", re.IGNORECASE)


class Fault(NamedTuple):
    """One thing wrong with one key: `wrong` is a clause, `fix` an imperative one."""

    key: str
    value: object
    wrong: str
    fix: str

    def __str__(self) -> str:
        """`member.decode-0.bootstrap_port = 8998: a decode has none; remove the key`."""
        shown = "" if self.value is None else f" = {_shown(self.key, self.value)}"
        return f"{self.key}{shown}: {self.wrong}; {self.fix}"


def instead(name: str, known: Iterable[str]) -> str:
    """What to write in place of a name nobody knows: the nearest one, else all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"remove it, or use one of {', '.join(known)}"


def _shown(key: str, value: object) -> str:
    if isinstance(value, str) and (".env." in key or _SECRET.search(key)):
        return "..."
    text = repr(value)
    return text if len(text) <= VALUE_SHOWN else text[: VALUE_SHOWN - 3] + "..."

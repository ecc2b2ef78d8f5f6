"""Text as a terminal may be given it: nothing in it moves, colours or hides.

For: whatever came from outside (a log, a flag, a hunch, a stranger's folder) on its way to a person
or into the store. Not for: Markdown and HTML (`report`), secrets (`store.redact`).
"""

import re

_COMMAND = (
    r"\x1b\[[0-?]{0,64}[ -/]{0,16}[@-~]"  # colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)"  # titles, links, device strings
)
"""What terminals obey (ECMA-48), each whole, so that its letters do not stay behind."""
_UNSEEN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
"""Control characters but tab and newline, and what hides or turns the text around it."""
_NOT_SHOWN = re.compile(f"{_COMMAND}|{_UNSEEN}")
_HALF = re.compile(r"[\ud800-\udfff]")
"""Bytes of an argument that are no UTF-8 arrive as these, and nothing can write them."""


def visible(text: str) -> str:
    """The text without what is not shown; half characters become U+FFFD."""
    return _HALF.sub("\ufffd", _NOT_SHOWN.sub("", text))


def one_line(text: str) -> str:
    """The same on one line, with single blanks."""
    return " ".join(visible(text).split())


__all__ = ["one_line", "visible"]

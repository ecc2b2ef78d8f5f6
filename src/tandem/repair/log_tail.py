"""The last lines of a dead member's log, short enough for a sentence.

For: saying why a member died at its start. Not for: reading logs as evidence (the collectors do).
"""

import re
from pathlib import Path

from tandem.visible import one_line

TAIL_BYTES = 4096
TAIL_LINES = 3
LINE_CHARACTERS = 200

# A start that fails often prints its command line: blank what looks like a secret before it can
# reach a report. The names are those of common flags and headers.
SECRET = re.compile(
    r"(?i)((?:authorization|bearer|api[-_]?key|secret|password|passwd)[\w-]*[\"']?\s*[=: ]\s*"
    # A token with a number is a count, and `token usage` is one too.
    r"|token[\w-]*[\"']?\s*[=:]\s*(?!\d+\b)|-token[\w-]*\s+)(?:bearer\s+)?[\"']?[^\s\"',]+"
)


def end_of(log: str | None) -> int:
    """The size of a log now, in bytes: where the lines of the next life begin."""
    try:
        return Path(log).stat().st_size if log else 0
    except OSError:
        return 0


def tail(log: str | None, begins_at: int = 0) -> str:
    """`; its log PATH ends: “...”`, as far as there is a readable file.

    Lines before `begins_at` are of an earlier life and say nothing of this end.
    """
    if log is None:
        return "; it has no log file here"
    try:
        with Path(log).open("rb") as file:
            size_bytes = file.seek(0, 2)
            begins_at = begins_at if begins_at <= size_bytes else 0  # a log set aside meanwhile
            file.seek(max(size_bytes - TAIL_BYTES, begins_at))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError as problem:
        return f"; its log {log} cannot be read: {problem.strerror or problem}"
    lines = [line for line in map(one_line, text.splitlines()) if line]
    if not lines:
        return f"; it wrote nothing to its log {log}"
    said = " | ".join(SECRET.sub(r"\1***", line[:LINE_CHARACTERS]) for line in lines[-TAIL_LINES:])
    return f"; its log {log} ends: “{said}”"

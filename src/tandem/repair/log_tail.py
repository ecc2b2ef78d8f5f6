"""The last lines of a dead member's log, short enough for a sentence.

For: saying why a member died at its start. Not for: reading logs as evidence (the collectors do).
"""

import re
from pathlib import Path

TAIL_BYTES = 4096
TAIL_LINES = 3
LINE_CHARACTERS = 200

# A start that fails often prints its command line: blank what looks like a secret before it can
# reach a report. The names are those of common flags and headers.
SECRET = re.compile(
    r"(?i)((?:authorization|bearer|api[-_]?key|token|secret|password|passwd)[\w-]*"
    r"[\"']?\s*[=: ]\s*)(?:bearer\s+)?[\"']?[^\s\"',]+"
)


def tail(log: str | None) -> str:
    """`; its log (PATH) ends: "..."`, as far as there is a readable file."""
    if log is None:
        return "; it has no log file here"
    try:
        with Path(log).open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(max(size_bytes - TAIL_BYTES, 0))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError as problem:
        return f"; its log {log} cannot be read: {problem.strerror or problem}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return f"; its log {log} is empty"
    said = " | ".join(SECRET.sub(r"\1***", line[:LINE_CHARACTERS]) for line in lines[-TAIL_LINES:])
    return f'; its log {log} ends: "{said}"'

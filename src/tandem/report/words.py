"""How times, lengths, standings and values are written in a report.

For: one spelling of each. Not for: sentences.
"""

from datetime import UTC, datetime

from tandem.records import Change, Value, life_name
from tandem.report.blocks import one_line

LIVED = {"start": "started", "restart": "restarted", "stop": "stopped"}
"""Changes that are an event in a member's life, not a setting."""
VALUE_CHARACTERS = 160
SENTENCE_CHARACTERS = 600
"""Longer ones are cut: a report is read at night, the folder keeps the whole."""


def moment(at: float) -> str:
    """`2025-11-29 21:00:06 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def clock(at: float, day: float) -> str:
    """`21:00:06` on the UTC day of `day`, another day's with its date."""
    then = datetime.fromtimestamp(at, UTC)
    same = then.date() == datetime.fromtimestamp(day, UTC).date()
    return f"{then:%H:%M:%S}" if same else f"{then:%Y-%m-%d %H:%M:%S}"


def length(seconds: float) -> str:
    """`0.59 s`, `9.8 s`, `2 min 5 s`, `17 h 4 min`."""
    if seconds < 1.0:
        return f"{max(seconds, 0.0):.2f} s"
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def plain(word: str) -> str:
    """`best_supported`, `silent-stall` as people say them."""
    return word.replace("_", " ").replace("-", " ")


def cut(text: str, most: int = SENTENCE_CHARACTERS) -> str:
    """One line of at most that many characters."""
    line = one_line(text)
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def ended(text: str, most: int = SENTENCE_CHARACTERS) -> str:
    """A clause of a record with its full stop."""
    line = cut(text, most)
    return line if not line or line[-1] in ".!?…:]" else f"{line}."


def sentence(text: str, most: int = SENTENCE_CHARACTERS) -> str:
    """A clause of a record as a sentence: a capital where a plain word begins it, a full stop."""
    line = ended(text, most)
    first = line.split(" ", 1)[0].rstrip(".,:;")
    return line[:1].upper() + line[1:] if first.isalpha() and first.islower() else line


def shown(value: Value) -> str:
    """A value of an observation, on one line."""
    said = " ".join(value) if isinstance(value, tuple) else str(value)
    return cut(said, VALUE_CHARACTERS) or "(empty)"


def observed(name: str, value: Value) -> str:
    """The value of an observation of that name: a time as a moment, the rest as it is."""
    if name.endswith("_at") and isinstance(value, int | float) and 0 < value < 1e11:
        return moment(value)
    return shown(value)


def changed(change: Change) -> str:
    """`--cuda-graph-max-bs absent -> 96`; of a life, `restarted (pid 4711, now pid 4802)`."""
    if change.kind in LIVED and not change.what:
        lives = [life_name(one) for one in (change.before, change.after) if one]
        named = f" ({', now '.join(lives)})" if lives else ""
        return cut(f"{LIVED[change.kind]}{named}", VALUE_CHARACTERS)
    before = "absent" if change.before is None else change.before
    after = "absent" if change.after is None else change.after
    return cut(f"{change.what or change.kind} {before} -> {after}", VALUE_CHARACTERS)

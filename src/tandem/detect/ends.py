"""How lives of a member ended: exit codes, signals and out-of-memory kills, where they are seen.

For: telling a crash from a stop, as a witness of members that are away or do not stay up.
Not for: noticing that one is away (`down`, `restarts`).
"""

from tandem import signs
from tandem.detect.candidate import server
from tandem.facts import Facts
from tandem.records import Observation, Witness
from tandem.records import vocabulary as v

ASKED_FOR = (0, 130, 143, -2, -15)
"""Exit codes of a process that was asked to go: it chose to, or ended by SIGINT or SIGTERM."""
NEAR_S = 5.0
"""An end is told by several sources, up to this long apart."""


def crashes(facts: Facts, member: str, since: float) -> list[Observation]:
    """The ends since a time that nobody asked for, oldest first; empty where none can be seen."""
    return [
        seen
        for seen in facts.rows(member, v.EXIT_CODE)
        if seen.at >= since
        and isinstance(seen.value, int | float)
        and int(seen.value) not in ASKED_FOR
    ]


def last_end(facts: Facts, member: str, since: float) -> Witness | None:
    """What the newest end at or after a time was, in words; None when nobody saw it."""
    for name in (v.UNIT_EXIT, v.CONTAINER_EXIT):
        seen = facts.latest(member, name)
        if seen is not None and seen.at >= since - NEAR_S:
            return server(f"it ended with {seen.value}{_oom(facts, member)}", (seen.id,))
    code = facts.latest(member, v.EXIT_CODE)
    if code is not None and code.at >= since - NEAR_S and isinstance(code.value, int | float):
        return server(f"it ended with {_words(int(code.value))}{_oom(facts, member)}", (code.id,))
    return None


def restarted_by(facts: Facts, member: str) -> Witness | None:
    """Who starts it again and again by itself: its unit, or its container's restart policy."""
    for name, who in (
        (v.UNIT_RESTARTS_TOTAL, "systemd"),
        (v.CONTAINER_RESTARTS_TOTAL, "its container's restart policy"),
    ):
        grown = facts.growth(member, name, since=facts.now - signs.UNWATCHED_S * 10)
        if grown is not None and grown.value > 0:
            said = f"{who} restarted it {grown.value:.0f} times by itself"
            return server(said, grown.evidence)
    return None


def _oom(facts: Facts, member: str) -> str:
    killed = facts.latest(member, v.CONTAINER_OOM_KILLED)
    result = facts.latest(member, v.UNIT_RESULT)
    if (killed is not None and killed.value is True) or (
        result is not None and result.value == "oom-kill"
    ):
        return ", out of memory"
    return ""


def _words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

"""A member that somebody holds: its process is stopped (state T) and answers nothing.

For: `member-paused`. SIGSTOP, Ctrl-Z or a debugger does that; nothing is broken, and `kill -CONT`
lets it go on. Not for: a process that is gone (`down`) or that computes in vain (`silent`).
"""

from tandem import signs
from tandem.detect.asked import asked
from tandem.detect.candidate import Candidate, server
from tandem.detect.down import unanswered
from tandem.facts import Facts
from tandem.records import Member
from tandem.records import vocabulary as v

PAUSED_S = 5.0
"""Tools that take stacks stop a process for a moment; this long nobody does without wanting to."""
STOPPED = "T"


def paused(facts: Facts) -> list[Candidate]:
    """Every member that is held at this moment."""
    return [found for one in facts.deployment.members if (found := _paused(facts, one))]


def _paused(facts: Facts, member: Member) -> Candidate | None:
    rows = facts.rows(member.name, v.PROCESS_STATE)
    if not rows or rows[-1].value != STOPPED:
        return None
    since = signs.held_since(rows, STOPPED)
    if since is None or not facts.now - since.at >= PAUSED_S:
        return None
    if facts.now - rows[-1].at > signs.LOOK_FRESH_S:
        return None
    heard = asked(facts, member)
    if not heard.refused or heard.answered_at > since.at + 1.0:
        return None
    life = facts.incarnation(member.name)
    pid = life.pid if life is not None and life.pid is not None else "PID"
    held_s = facts.now - since.at
    stopped = server(
        f"the process of {member.name} is stopped (state T) for {held_s:.0f} s: SIGSTOP or a "
        f"debugger holds it",
        (since.id, rows[-1].id),
    )
    waits = unanswered(facts, member, heard)
    return Candidate(
        kind="member-paused",
        subject=member.name,
        members=(member.name,),
        onset_at=since.at,
        summary=f"{member.name} is paused: {stopped.statement}, {waits.statement}; "
        f"`kill -CONT {pid}` lets it go on and loses nothing",
        witnesses=(waits, stopped),
    )

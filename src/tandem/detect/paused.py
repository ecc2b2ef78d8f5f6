"""A member that somebody holds: its process is stopped (state T) and answers nothing.

For: `member-paused`. SIGSTOP, Ctrl-Z, a debugger or a paused container does that; nothing is
broken, and `kill -CONT` (or unpausing) lets it go on. Not for: a process that is gone (`down`) or
that computes in vain (`silent`).
"""

from tandem import signs
from tandem.detect.asked import asked
from tandem.detect.candidate import Candidate, server
from tandem.detect.down import unanswered
from tandem.detect.headless import scheduler_states
from tandem.facts import Facts
from tandem.records import Member, Role
from tandem.records import vocabulary as v

PAUSED_S = 5.0
"""Tools that take stacks stop a process for a moment; this long nobody does without wanting to."""
STOPPED = "T"


def paused(facts: Facts) -> list[Candidate]:
    """Every member that is held at this moment."""
    return [
        found
        for one in facts.deployment.members
        if (found := _stopped(facts, one) or _frozen(facts, one) or _child(facts, one))
    ]


def _stopped(facts: Facts, member: Member) -> Candidate | None:
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


def _frozen(facts: Facts, member: Member) -> Candidate | None:
    """A container that somebody paused."""
    seen = facts.last(member.name, v.CONTAINER_STATE)
    if seen is None or seen.value != "paused" or facts.now - seen.at < PAUSED_S:
        return None
    heard = asked(facts, member)
    if not heard.refused or heard.answered_at > seen.at + 1.0:
        return None
    held = server(
        f"the container of {member.name} is paused for {facts.now - seen.at:.0f} s", (seen.id,)
    )
    waits = unanswered(facts, member, heard)
    return Candidate(
        kind="member-paused",
        subject=member.name,
        members=(member.name,),
        onset_at=seen.at,
        summary=f"{member.name} is paused: {held.statement}, {waits.statement}; unpausing the "
        "container lets it go on and loses nothing",
        witnesses=(waits, held),
    )


def _child(facts: Facts, member: Member) -> Candidate | None:
    """A scheduler that is stopped under a process which still answers."""
    if member.role is Role.ROUTER:
        return None
    for pid, rows in scheduler_states(facts, member.name).items():
        since = signs.held_since(rows, STOPPED)
        if since is None or facts.now - since.at < PAUSED_S or rows[-1].at == since.at:
            continue
        held_s = facts.now - since.at
        stopped = server(
            f"the scheduler of {member.name} (pid {pid}) is stopped (state T) for {held_s:.0f} s: "
            f"SIGSTOP or a debugger holds it",
            (since.id, rows[-1].id),
        )
        still = signs.grown(facts, member.name, v.PROGRESS_TOKENS_TOTAL, PAUSED_S)
        if still is not None and still.value > 0:
            continue
        flat = server(
            "its counter of tokens stands still" if still else "its counters are not seen",
            still.evidence if still else (),
        )
        return Candidate(
            kind="member-paused",
            subject=member.name,
            members=(member.name,),
            onset_at=since.at,
            summary=f"{member.name} is paused: {stopped.statement}, and {flat.statement}; "
            f"`kill -CONT {pid}` lets it go on and loses nothing",
            witnesses=(flat, stopped),
        )
    return None

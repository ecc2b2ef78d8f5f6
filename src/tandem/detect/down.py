"""A member that is away: its process is gone, or nothing it serves answers.

For: `member-down`. Not for: a member that is being restarted or is still starting, one that is
held (`paused`), nor one that answers but makes no progress (`silent`).
"""

from tandem import signs
from tandem.detect.asked import Asked, asked
from tandem.detect.candidate import Candidate, client, server
from tandem.detect.ends import last_end
from tandem.facts import Facts
from tandem.records import Incarnation, Member, Role, Thresholds, Witness
from tandem.records import vocabulary as v

STARTING_S = 60.0
"""A process this young may still be loading its model."""
LOADING_S = 900.0
"""So may this one, while it works: hundreds of gigabytes take minutes."""
LOADS_S = 30.0
"""It works when it computed, or came to hold more memory, within so long."""
LOADED_BYTES_MIN = 64e6
REFUSALS_MIN = 3


def away(facts: Facts, thresholds: Thresholds) -> list[Candidate]:
    """Every member that is down at this moment."""
    members = facts.deployment.members
    return [found for one in members if (found := _down(facts, one, thresholds))]


def _down(facts: Facts, member: Member, thresholds: Thresholds) -> Candidate | None:
    heard = asked(facts, member)
    gone = _gone(facts, member.name)
    if gone is None and not heard.refused:
        return None
    life = facts.incarnation(member.name)
    if not gone and (life is None or _starts(facts, member.name, life, heard.answered_at)):
        # Without a process in sight, silence over HTTP may be a wrong address or our own network.
        return None
    silent_s = max(0.0, facts.now - heard.quiet_since)
    if gone:
        gone_s = facts.now - gone[0]
        if gone_s < thresholds.down_s or heard.answered_at > gone[0]:
            return None
        onset_at = gone[0]
        statement = f"the process of {member.name} has been gone for {gone_s:.0f} s"
        witnesses = [server(statement, gone[1])]
    elif silent_s >= thresholds.down_s and len(heard.refused) >= REFUSALS_MIN:
        onset_at = heard.quiet_since
        witnesses = [_mute(facts, member)]
    else:
        return None
    if heard.refused:
        witnesses.insert(0, unanswered(facts, member, heard))
    ended = last_end(facts, member.name, onset_at) if gone else None
    if ended is not None:
        witnesses.append(ended)
    unrouted = _unrouted(facts, member)
    if unrouted is not None:
        witnesses.append(unrouted)
    return Candidate(
        kind="member-down",
        subject=member.name,
        members=(member.name,),
        onset_at=onset_at,
        summary=f"{member.name} is down: {' and '.join(one.statement for one in witnesses)}",
        witnesses=tuple(witnesses),
    )


def unanswered(facts: Facts, member: Member, heard: Asked) -> Witness:
    """The client's word on a member that does not answer."""
    silent_s = facts.now - heard.quiet_since
    said = f"{member.url} has not answered for {silent_s:.0f} s ({heard.why})"
    return client(said, (heard.refused[0].id, heard.refused[-1].id))


def _mute(facts: Facts, member: Member) -> Witness:
    alive = facts.latest(member.name, v.ALIVE)
    statement = f"the process of {member.name} lives but answers nothing"
    return server(statement, (alive.id,) if alive else ())


def _starts(facts: Facts, member: str, life: Incarnation, answered_at: float) -> bool:
    """Whether a life may still be loading: it is young or at work, and has not answered yet."""
    begun_at = signs.begun_at(facts, member) or life.started_at
    if answered_at >= begun_at:
        return False
    age_s = facts.now - begun_at
    return age_s < STARTING_S or (age_s < LOADING_S and _loads(facts, member))


def _loads(facts: Facts, member: str) -> bool:
    """Whether a process computed, or came to hold more memory, within the last `LOADS_S`."""
    used = signs.busy(facts, member, LOADS_S)
    if used is not None and used.value >= signs.BUSY_CPU:
        return True
    grown = signs.grown(facts, member, v.RSS_BYTES, LOADS_S)
    return grown is not None and grown.value > LOADED_BYTES_MIN


def _gone(facts: Facts, member: str) -> tuple[float, tuple[int, ...]] | None:
    """Since when the process collector sees no process, or a zombie; None when it lives."""
    for name, value in ((v.ALIVE, False), (v.PROCESS_STATE, "Z")):
        rows = facts.rows(member, name)
        first = signs.held_since(rows, value)
        if first is not None:
            return first.at, (first.id, rows[-1].id)
    return None


def _unrouted(facts: Facts, member: Member) -> Witness | None:
    for router in facts.deployment.of(Role.ROUTER):
        seen = facts.latest(router.name, v.WORKER_HEALTHY, member.name)
        if seen is not None and seen.value is False and facts.now - seen.at < signs.LOOK_FRESH_S:
            return client(f"{router.name} counts {member.name} as unhealthy", (seen.id,))
    return None

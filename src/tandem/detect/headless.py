"""An engine whose scheduler is gone while the process that answers HTTP lives on.

For: `health-lies` where `/health` still answers 200 (green while dead), else `member-down`: by the
children that the process collector sees. Not for: a leader that is gone (`down`).
"""

from tandem import signs
from tandem.detect.candidate import Candidate, client, server
from tandem.facts import Facts
from tandem.records import Member, Observation, Role
from tandem.records import vocabulary as v

GONE_S = 4.0
"""An engine that is being stopped loses its children a moment before itself."""
ENDED = ("gone", "Z")
SCHEDULER = "scheduler"
"""What the roles of the processes begin with that hold an engine's batch."""


def headless(facts: Facts) -> list[Candidate]:
    """Every engine that goes on without its scheduler at this moment."""
    engines = (*facts.deployment.of(Role.PREFILL), *facts.deployment.of(Role.DECODE))
    return [found for one in engines if (found := _headless(facts, one))]


def scheduler_states(facts: Facts, member: str) -> dict[str, list[Observation]]:
    """The looks at the state of each scheduler process of the present life, by its pid."""
    if facts.last(member, v.CHILDREN) is None:
        return {}
    life = facts.incarnation(member)
    if life is None:
        return {}
    found = {}
    for pid in facts.labels(member, v.CHILD_STATE):
        role = facts.latest(member, v.CHILD_ROLE, pid)
        rows = facts.rows(member, v.CHILD_STATE, pid)
        if role is None or not str(role.value).startswith(SCHEDULER) or not rows:
            continue
        if rows[-1].incarnation in (None, life.id):
            found[pid] = rows
    return found


def _headless(facts: Facts, engine: Member) -> Candidate | None:
    states = scheduler_states(facts, engine.name)
    ended = {pid: first for pid, rows in states.items() if (first := _ended(rows)) is not None}
    alive = facts.latest(engine.name, v.ALIVE) if ended else None
    if alive is None or alive.value is not True or facts.now - alive.at > signs.LOOK_FRESH_S:
        return None
    pid, first = min(ended.items(), key=lambda item: item[1].at)
    role = facts.latest(engine.name, v.CHILD_ROLE, pid)
    name = str(role.value) if role is not None else SCHEDULER
    again = [
        other
        for other in states
        if other not in ended
        and (said := facts.latest(engine.name, v.CHILD_ROLE, other)) is not None
        and said.value == name
    ]
    if again or facts.now - first.at < GONE_S:
        return None
    code = facts.latest(engine.name, v.CHILD_EXIT_CODE, pid)
    how = f" with exit code {code.value}" if code is not None else ""
    dead = server(
        f"{name} of {engine.name} (pid {pid}) ended{how} {facts.now - first.at:.0f} s ago and the "
        f"process that answers HTTP lives on",
        (first.id, alive.id),
    )
    looks = [seen for seen in facts.rows(engine.name, v.HEALTH_STATUS) if seen.at > first.at]
    green = [seen for seen in looks if seen.value == 200]
    answers = client(
        f"/health answered 200 in {len(green)} of {len(looks)} looks since",
        tuple(seen.id for seen in (green or looks)[-1:]),
    )
    lies = bool(green)
    return Candidate(
        kind="health-lies" if lies else "member-down",
        subject=engine.name,
        members=(engine.name,),
        onset_at=first.at,
        summary=f"{engine.name} is {'green and dead' if lies else 'down'}: {dead.statement}, and "
        f"{answers.statement}",
        witnesses=(answers, dead),
    )


def _ended(rows: list[Observation]) -> Observation | None:
    """The first look of the last stretch at which a process was seen to have ended."""
    first = None
    for seen in reversed(rows):
        if seen.value not in ENDED:
            break
        first = seen
    return first

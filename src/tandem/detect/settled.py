"""When a member can be judged: from the first answer of its present life on.

For: keeping restarts and starts out of every window that a stall is judged by.
Not for: members that are away (`down`).
"""

from tandem import signs
from tandem.facts import Facts, once
from tandem.records import vocabulary as v


def settled(facts: Facts, members: tuple[str, ...], window_s: float) -> bool:
    """Whether every member has answered in its present life for at least `window_s`."""
    since = [settled_at(facts, member) for member in members]
    return all(at is not None and facts.now - at >= window_s for at in since)


@once
def settled_at(facts: Facts, member: str) -> float | None:
    """When the present life of a member first answered; None when it has not yet.

    From then on it can be judged: what was seen while it was away or starting is no stall.
    """
    begun_at = signs.begun_at(facts, member)
    started_at = float("-inf") if begun_at is None else begun_at
    asked = facts.numbers(member, v.HEALTH_STATUS)
    since = facts.numbers(member, v.HEALTH_STATUS, since=started_at)
    healthy = next((look.at for look in since if look.value == 200), None)
    queues = (name for role in signs.QUEUES for name, _ in signs.QUEUES[role])
    answered = [
        samples[0].at
        for name in (*queues, v.PROGRESS_TOKENS_TOTAL)
        if (samples := facts.numbers(member, name, since=started_at))
    ]
    if not answered or (asked and healthy is None):
        return None
    return max(min(answered), healthy or float("-inf"))


def completed_nothing(facts: Facts, member: str) -> bool:
    """Whether an engine has not completed a request in its present life, as far as it counts."""
    ended = facts.last(member, v.REQUESTS_TOTAL)
    # Engines leave the counter out until the first request of a life is done.
    return ended is not None and (ended.missing is not None or ended.value == 0)

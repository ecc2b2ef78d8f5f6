"""Whether a member answers over HTTP: when it last did, and the asks that failed since.

For: the client's side of a member that is away or paused. Not for: what its answers say.
"""

from typing import NamedTuple

from tandem import signs
from tandem.facts import Facts
from tandem.records import Member, Observation, Role
from tandem.records import vocabulary as v

HTTP_NAMES = {
    Role.ROUTER: (v.ROUTER_REQUESTS_TOTAL, v.ROUTER_ACTIVE_REQS),
    Role.PREFILL: (v.HEALTH_STATUS, v.INFLIGHT_QUEUE_REQS, v.RUNNING_REQS, v.REQUESTS_TOTAL),
    Role.DECODE: (v.HEALTH_STATUS, v.TRANSFER_QUEUE_REQS, v.RUNNING_REQS, v.REQUESTS_TOTAL),
}
"""Observations that only an answer over HTTP can bring."""
HTTP_SOURCES = ("health", "loads", "metrics", "router", "server_info")


class Asked(NamedTuple):
    """What asking a member over HTTP brought."""

    answered_at: float
    """When it last answered; minus infinity when it never did."""
    refused: list[Observation]
    """The asks that failed since, oldest first, no long gap between them."""

    @property
    def why(self) -> str:
        """The reason of the newest that failed."""
        return (self.refused[-1].missing or "") if self.refused else ""

    @property
    def quiet_since(self) -> float:
        """Since when it is known to be silent; plus infinity when the newest ask was answered."""
        return max(self.answered_at, self.refused[0].at) if self.refused else float("inf")


def asked(facts: Facts, member: Member) -> Asked:
    """Look through everything that only an answer of this member can bring."""
    things = [(name, "") for name in HTTP_NAMES[member.role]]
    if member.role is Role.ROUTER:
        workers = [one.name for one in facts.deployment.members if one.role is not Role.ROUTER]
        things += [(v.WORKER_HEALTHY, name) for name in ("", *workers)]
    newest = [facts.last(member.name, name, label) for name, label in things]
    seen_last = [seen for seen in newest if seen is not None]
    if seen_last and all(seen.missing is None for seen in seen_last):
        return Asked(max(seen.at for seen in seen_last), [])
    series = [facts.rows(member.name, name, label) for name, label in things]
    answered_at = max((_answered_at(rows) for rows in series), default=float("-inf"))
    failed: list[Observation] = []
    for rows in series:
        for seen in reversed(rows):
            if seen.at <= answered_at:
                break
            if seen.missing is not None and seen.source in HTTP_SOURCES:
                failed.append(seen)
    failed.sort(key=lambda seen: (seen.at, seen.id))
    for place in range(len(failed) - 1, 0, -1):
        if failed[place].at - failed[place - 1].at > signs.UNWATCHED_S:
            failed = failed[place:]
            break
    return Asked(answered_at, failed)


def _answered_at(rows: list[Observation]) -> float:
    for seen in reversed(rows):
        if seen.missing is None and seen.source in HTTP_SOURCES:
            return seen.at
    return float("-inf")

"""Since when somebody has been looking without a gap.

For: not taking a collector that was paused for a deployment that recovered, or that went silent.
Not for: one member that does not answer; a look that failed is a look.
"""

from bisect import bisect_left

from tandem.facts import Facts
from tandem.records import vocabulary as v

GAP_S = 6.0
"""Looks of all members further apart than this are a gap in watching."""
NAMES = (v.ALIVE, v.PROGRESS_TOKENS_TOTAL, v.ROUTER_REQUESTS_TOTAL)
"""What is looked at every second, of whichever member."""
LOOKS_MAX = 120
"""How far back is enough: longer than any time in which a finding clears."""


def watched_since(facts: Facts) -> float:
    """When the present unbroken stretch of looks began; `facts.now` when nobody looks now."""
    looks: set[float] = set()
    for member in facts.deployment.members:
        for name in NAMES:
            rows = facts.rows(member.name, name)[-LOOKS_MAX:]
            looks.update(seen.at for seen in rows)
    times = sorted(looks)
    times = times[bisect_left(times, facts.now - LOOKS_MAX) :]
    if not times or facts.now - times[-1] > GAP_S:
        return facts.now
    since = times[-1]
    for at in reversed(times):
        if since - at > GAP_S:
            break
        since = at
    return since

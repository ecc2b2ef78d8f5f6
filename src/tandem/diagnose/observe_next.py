"""The one observation to take next: computed from the unknowns, never canned.

For: an undetermined (or merely best supported) diagnosis, so that a person knows what would
settle it. Not for: taking it.
"""

from collections import defaultdict
from collections.abc import Sequence

from tandem.diagnose.weigh import WEIGHTS
from tandem.facts import Facts
from tandem.records import ModeVerdict
from tandem.records import vocabulary as v

SOURCES = (
    (v.STACK, "stacks of every thread"),
    (v.PROBE, "a direct probe of every path"),
    (v.LOG_LINES_TOTAL, "the logs"),
    (v.RUNNING_REQS, "the live queue state (/v1/loads)"),
    (v.PROGRESS_TOKENS_TOTAL, "the progress counters (/metrics)"),
    (v.ALIVE, "the processes: start times, state, CPU time"),
)
"""What a mode nobody has written yet would be told by: asked for when every known mode is out."""


def splits(modes: Sequence[ModeVerdict]) -> str | None:
    """The unknown whose answer would move the two leading modes apart the most.

    An unknown of one leader moves the gap by its weight; one that several leaders wait for by the
    sum, since what supports the one contradicts the other. Equal ones: the first by name.
    """
    leaders = [one for one in modes if one.standing != "ruled_out"][:2]
    gain: dict[str, float] = defaultdict(float)
    for leader in leaders:
        for test in leader.tests:
            if test.answer == "unknown" and test.collect:
                gain[test.collect] += WEIGHTS[test.strength]
    if not gain:
        return None
    return min(gain, key=lambda collect: (-gain[collect], collect))


WORDS = (
    ("stack", (v.STACK,)),
    ("probe", (v.PROBE,)),
    ("log", (v.LOG_LINES_TOTAL, v.LOG_SIGNATURE)),
    ("queue", (v.RUNNING_REQS,)),
    ("counter", (v.PROGRESS_TOKENS_TOTAL,)),
    ("progress", (v.PROGRESS_TOKENS_TOTAL,)),
    ("breaker", (v.WORKER_BREAKER_OPEN, v.WORKER_HEALTHY)),
    ("process", (v.ALIVE,)),
    ("answers http", (v.HEALTH_STATUS,)),
)
"""What a request for an observation speaks of, by the names under which it comes."""


def asked_for(following: str) -> tuple[str, ...]:
    """The names of the observations that a diagnosis's next observation is about."""
    said = following.lower()
    found = [name for word, names in WORDS if word in said for name in names]
    return tuple(dict.fromkeys(found))


def unseen(facts: Facts) -> str:
    """What to look at when no known mode is left: the first source that brought nothing."""
    for name, what in SOURCES:
        if not facts.subjects(name):
            return f"{what}: none was collected, and no known failure mode fits what was"
    return (
        "stacks of every thread twice, ten seconds apart: no known failure mode fits, and what "
        "does not move between the two is where it hangs"
    )

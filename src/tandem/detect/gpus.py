"""What the GPUs of a member do meanwhile: a further witness of a stall, never one of the two.

For: a word on utilisation beside a stall that stands already. Not for: finding one: an idle GPU
never proves a stall, a busy one never disproves it, and under MIG or MPS nothing is known.
"""

from tandem import signs
from tandem.detect.candidate import server
from tandem.facts import Facts
from tandem.records import Witness
from tandem.records import vocabulary as v

IDLE_RATIO = 0.02


def gpus(facts: Facts, members: tuple[str, ...]) -> Witness | None:
    """How busy the GPUs of these members are now; None where that is not known of any."""
    said: list[str] = []
    cited: list[int] = []
    for member in members:
        levels: list[float] = []
        for label in facts.labels(member, v.GPU_UTILIZATION):
            seen = facts.last(member, v.GPU_UTILIZATION, label)
            fresh = seen is not None and facts.now - seen.at <= signs.LOOK_FRESH_S
            if seen is not None and fresh and isinstance(seen.value, int | float):
                levels.append(float(seen.value))
                cited.append(seen.id)
        if levels:
            most = max(levels)
            word = "idle" if most <= IDLE_RATIO else f"up to {most:.0%} busy"
            said.append(f"the {_count(len(levels))} of {member} {_are(len(levels))} {word}")
    return server(" and ".join(said), tuple(cited)) if said else None


def _count(number: int) -> str:
    return "GPU" if number == 1 else f"{number} GPUs"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"

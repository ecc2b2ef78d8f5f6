"""Which life of each member is seen now: learned from the process source, used by the others.

For: naming the incarnation in every observation of a member. Not for: finding processes.
"""

from collections.abc import Iterable

import msgspec

from tandem.ports import Harvest
from tandem.records import Incarnation, Observation


class Incarnations:
    """The present life of each member, as last seen; shared by the sources."""

    def __init__(self) -> None:
        """Nobody is known yet."""
        self._present: dict[str, Incarnation] = {}

    def saw(self, member: str, life: Incarnation | None) -> None:
        """Remember the life a member has now; None when it has none."""
        if life is None:
            self._present.pop(member, None)
        else:
            self._present[member] = life

    def of(self, member: str) -> str | None:
        """The incarnation id of a member, None when nobody can tell."""
        life = self._present.get(member)
        return None if life is None else life.id

    def pid(self, member: str) -> int | None:
        """The process id of a member's present life, None when there is none to tell."""
        life = self._present.get(member)
        return None if life is None else life.pid

    def stamped(self, harvest: Harvest) -> Harvest:
        """The same harvest, each observation naming the life of the member it speaks of."""
        return Harvest(self._named(harvest.observations), harvest.traits, harvest.changes)

    def _named(self, observations: Iterable[Observation]) -> tuple[Observation, ...]:
        return tuple(
            seen
            if seen.incarnation is not None or self.of(seen.subject) is None
            else msgspec.structs.replace(seen, incarnation=self.of(seen.subject))
            for seen in observations
        )

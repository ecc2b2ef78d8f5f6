"""What the health endpoints say: status, latency, and a prefill's bootstrap readiness.

For: having their word on record beside the truth. Not for: believing it.
"""

from tandem.collect.incarnations import Incarnations
from tandem.ports import Engine, Harvest
from tandem.records import Member

TIMEOUT_S = 5.0
"""A healthy busy server answers within its next batch; SGLang itself gives up after 20 s."""


class HealthSource:
    """One engine member's health; each look makes the engine compute about one token."""

    def __init__(
        self,
        engine: Engine,
        member: Member,
        incarnations: Incarnations,
        *,
        interval_s: float = 2.0,
    ) -> None:
        """`interval_s` bounds the cost: one fake forward each time."""
        self.name = f"health:{member.name}"
        self.interval_s = interval_s
        self.timeout_s = TIMEOUT_S + 2.0
        self._engine = engine
        self._member = member
        self._incarnations = incarnations

    async def collect(self) -> Harvest:
        """Look once."""
        return self._incarnations.stamped(await self._engine.health(self._member, TIMEOUT_S))

"""An engine's own word: metrics, live loads and server information, once a second.

For: asking through `ports.Engine`. Not for: what an engine calls things (`engines/`).
"""

from tandem.collect.incarnations import Incarnations
from tandem.ports import Engine, Harvest
from tandem.records import Member

TIMEOUT_S = 2.0


class EngineSource:
    """One engine member; one source each, so that a slow member delays no other."""

    def __init__(
        self,
        engine: Engine,
        member: Member,
        incarnations: Incarnations,
        *,
        interval_s: float = 1.0,
    ) -> None:
        """`interval_s` is `[watch] interval_s`."""
        self.name = f"engine:{member.name}"
        self.interval_s = interval_s
        self.timeout_s = TIMEOUT_S + 2.0
        self._engine = engine
        self._member = member
        self._incarnations = incarnations

    async def collect(self) -> Harvest:
        """Look once."""
        return self._incarnations.stamped(await self._engine.observe(self._member, TIMEOUT_S))

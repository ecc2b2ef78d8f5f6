"""What only the member itself can say, where its metrics come from elsewhere: live queues, workers.

For: asking through `ports.ReadsPages`. Not for: metrics (`prometheus.py`).
"""

from tandem.collect.incarnations import Incarnations
from tandem.ports import Harvest, ReadsPages
from tandem.records import Member

TIMEOUT_S = 2.0


class LiveSource:
    """One member's live state."""

    def __init__(
        self,
        adapter: ReadsPages,
        member: Member,
        incarnations: Incarnations,
        *,
        interval_s: float = 1.0,
    ) -> None:
        """`interval_s` grows with the deployment, so that all of it costs a bounded rate."""
        self.name = f"live:{member.name}"
        self.interval_s = interval_s
        self.timeout_s = TIMEOUT_S + 2.0
        self._adapter = adapter
        self._member = member
        self._incarnations = incarnations

    async def collect(self) -> Harvest:
        """Look once."""
        return self._incarnations.stamped(await self._adapter.observe_live(self._member, TIMEOUT_S))

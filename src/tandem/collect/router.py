"""The router's own word: its workers, breakers, requests and responses, once a second.

For: asking through `ports.Router`. Not for: what a router calls things (`routers/`).
"""

from tandem.collect.incarnations import Incarnations
from tandem.ports import Harvest, Router
from tandem.records import Member

TIMEOUT_S = 2.0


class RouterSource:
    """One router member."""

    def __init__(
        self,
        router: Router,
        member: Member,
        incarnations: Incarnations,
        *,
        interval_s: float = 1.0,
    ) -> None:
        """`interval_s` is `[watch] interval_s`."""
        self.name = f"router:{member.name}"
        self.interval_s = interval_s
        self.timeout_s = TIMEOUT_S + 2.0
        self._router = router
        self._member = member
        self._incarnations = incarnations

    async def collect(self) -> Harvest:
        """Look once."""
        return self._incarnations.stamped(await self._router.observe(self._member, TIMEOUT_S))

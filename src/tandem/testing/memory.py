"""A store that keeps the detect window in memory and nothing else, for days of watching.

For: the harvests of one watch as facts, at the cost of a look. Not for: anything that must last,
nor redaction: what a simulated fleet shows is no secret.
"""

import msgspec

from tandem.facts import Facts
from tandem.ports import Harvest
from tandem.records import Change, Deployment, Observation, Trait
from tandem.store.state import SLOW
from tandem.store.window import Window

LEDGER_S = 48 * 3600.0


class Memory:
    """What one watch remembers."""

    def __init__(self, deployment: Deployment, now: float) -> None:
        """Nothing has been seen."""
        self._deployment = deployment
        self._window = Window(now, ())
        self._traits: dict[tuple[str, str, str], Trait] = {}
        self._changes: list[Change] = []
        self._last = 0

    def append(self, harvest: Harvest) -> None:
        """Number and remember."""
        number = self._last
        rows: list[Observation] = []
        for seen in harvest.observations:
            number += 1
            msgspec.structs.force_setattr(seen, "id", number)
            rows.append(seen)
        self._last = number
        self._window.add(rows)
        for trait in harvest.traits:
            self._traits[trait.subject, trait.name, trait.label] = trait
        if harvest.changes:
            self._changes += harvest.changes
            oldest = max(one.at for one in self._changes) - LEDGER_S
            self._changes = [one for one in self._changes if one.at >= oldest]

    def forget_later(self, now: float) -> None:
        """Answer with nothing that a clock, set back since, calls later than now (`Store`)."""
        known = [
            msgspec.structs.replace(series.rows[-1], at=min(series.rows[-1].at, now))
            for (_, name, _), series in self._window.columns.series.items()
            if name in SLOW
        ]
        self._window = Window(now, known)

    def facts(self, *, now: float, window_s: float) -> Facts:
        """What was seen in the `window_s` seconds before `now`."""
        return Facts.over(
            self._deployment,
            self._window.columns,
            now=now,
            since=now - window_s,
            newest_id=self._last,
            lasting=SLOW,
            changes=self._changes,
            traits=self._traits.values(),
        )


__all__ = ["Memory"]

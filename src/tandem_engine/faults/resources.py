"""Faults of what is held: exhausted or leaked cells, slots, rooms, memory.

For: the switches, their texts, and what the mechanisms remember.
Not for: accounting (`sequences.py`, `handoffs.py`).
"""

from tandem_engine.faults.family import Family, Switches


class ResourceSwitches(Switches, frozen=True):
    """The switches of this family."""


class ResourceFaults(Family[ResourceSwitches]):
    """The family in one worker."""

    name = "resources"
    kind = ResourceSwitches
    catalogue = {}

"""Faults of a step: ranks that leave the collective or spin, compute that never returns.

For: the switches, their texts, and what the mechanisms remember.
Not for: the step loop (`scheduler.py`).
"""

from tandem_engine.faults.family import Family, Switches


class ComputeSwitches(Switches, frozen=True):
    """The switches of this family."""


class ComputeFaults(Family[ComputeSwitches]):
    """The family in one worker."""

    name = "compute"
    kind = ComputeSwitches
    catalogue = {}

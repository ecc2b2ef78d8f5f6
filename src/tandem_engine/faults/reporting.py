"""Faults of what a worker says of itself: health, gauges, counters, replies.

For: the switches, their texts, and what the mechanisms remember.
Not for: the numbers (`metrics.py`, `info.py`).
"""

from tandem_engine.faults.family import Family, Switches


class ReportingSwitches(Switches, frozen=True):
    """The switches of this family."""


class ReportingFaults(Family[ReportingSwitches]):
    """The family in one worker."""

    name = "reporting"
    kind = ReportingSwitches
    catalogue = {}

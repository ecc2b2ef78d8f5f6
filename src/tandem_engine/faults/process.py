"""Faults of a process: slow starts, crashes, an API whose worker is dead.

For: the switches, their texts, and what the mechanisms remember.
Not for: the life of a worker (`worker.py`).
"""

from tandem_engine.faults.family import Family, Switches


class ProcessSwitches(Switches, frozen=True):
    """The switches of this family."""


class ProcessFaults(Family[ProcessSwitches]):
    """The family in one worker."""

    name = "process"
    kind = ProcessSwitches
    catalogue = {}

"""Faults that give a client the wrong tokens with HTTP 200.

For: the switches, their texts, and what the mechanisms remember.
Not for: the model or the transports.
"""

from tandem_engine.faults.family import Family, Switches


class CorruptionSwitches(Switches, frozen=True):
    """The switches of this family."""


class CorruptionFaults(Family[CorruptionSwitches]):
    """The family in one worker."""

    name = "corruption"
    kind = CorruptionSwitches
    catalogue = {}

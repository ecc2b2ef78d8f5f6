"""Faults of KV on its way from a prefill to a decode.

For: the switches, their texts, and what the mechanisms remember.
Not for: the transports (`tandem_engine.handoff`) or rooms (`handoffs.py`).
"""

from tandem_engine.faults.family import Family, Switches


class HandoffSwitches(Switches, frozen=True):
    """The switches of this family."""


class HandoffFaults(Family[HandoffSwitches]):
    """The family in one worker."""

    name = "handoff"
    kind = HandoffSwitches
    catalogue = {}

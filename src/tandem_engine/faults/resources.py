"""Faults of what is held: exhausted or leaked cells, slots, rooms, memory.

For: the switches, their texts, and what the mechanisms remember.
Not for: accounting (`sequences.py`, `handoffs.py`, `arrivals.py`).
"""

import mmap
from typing import Annotated, Literal

import msgspec

from tandem_engine.faults.family import Family, Switches, Text

MEGABYTE = b"\x01" * (1 << 20)
LEAKED_MB_MAX = 4096
"""A leak stops here: the machine belongs to others too."""
Every = Annotated[int, msgspec.Meta(ge=0)]
"""0 is never, 1 is each, n is the n-th of every n."""


class ResourceSwitches(Switches, frozen=True):
    """The switches of this family."""

    kv_exhaustion: Literal["resolves", "deadlocks"] = "resolves"
    """What retracted requests do to hand-offs that already hold cells."""
    leaked_slot_every: Every = 0
    leaked_room_every: Every = 0
    leaked_mb_per_request: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


class ResourceFaults(Family[ResourceSwitches]):
    """The family in one worker."""

    name = "resources"
    kind = ResourceSwitches
    catalogue = {
        "kv_exhaustion=deadlocks": Text(
            "On a decode whose cells run out ('KV cache pool is full. Retract requests.'): while "
            "any request is retracted no KV that arrived is taken over, though its cells are held, "
            "and the retracted one waits for these cells. decode_retracted_queue_reqs stays above "
            "0 in /v1/loads with nothing running, the prefill's inflight queue is pinned by rooms "
            "that nobody acknowledges, new requests wait in the prealloc queue; /health is 200. "
            "Needs demand beyond --max-total-tokens and a small --num-reserved-decode-tokens.",
            "Aborting the held requests (the largest is enough), admitting less; a restart of the "
            "decode.",
        ),
        "leaked_slot_every": Text(
            "Every n-th hand-off that ended well keeps its slot: a prefill's of "
            "--disaggregation-max-inflight, a decode's landing slot. Everything flows until none "
            "is left; then the prefill's bootstrap queue (the decode's prealloc queue) grows while "
            "its inflight (transfer) queue is 0, and nothing is computed. /health is 200.",
            "Restarting the leaking worker.",
        ),
        "leaked_room_every": Text(
            "Every n-th room that ended stays in the prefill's inflight queue as a name: "
            "num_prefill_inflight_queue_reqs has a floor that only rises, with idle traffic too, "
            "while every request completes and no slot is held. The room cannot be used again.",
            "Restarting the prefill; nothing is broken until then.",
        ),
        "leaked_mb_per_request": Text(
            f"Resident memory grows by so many MB with every request, up to {LEAKED_MB_MAX} MB, "
            "and never falls at zero traffic; latency and results are as before.",
            "Restarting the worker.",
        ),
    }

    def __init__(self) -> None:
        """Everything off."""
        super().__init__()
        self._slots = 0
        self._rooms = 0
        self._memory: list[mmap.mmap] = []

    def turn(self, switches: ResourceSwitches) -> None:
        """Count anew, and give memory back when it leaks no more; slots and rooms follow."""
        self._slots = self._rooms = 0
        if not switches.leaked_mb_per_request:
            self._memory = []
        super().turn(switches)

    def ended(self) -> None:
        """A client's request holds nothing any more."""
        size_mb = self.switches.leaked_mb_per_request
        if size_mb and (len(self._memory) + 1) * size_mb <= LEAKED_MB_MAX:
            # Pages of its own, so that they really go back.
            pages = mmap.mmap(-1, size_mb << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for _ in range(size_mb):
                pages.write(MEGABYTE)
            if self.switches.leaked_mb_per_request:
                self._memory.append(pages)

    def leaks_slot(self) -> bool:
        """Whether the slot of a hand-off that ended well is not freed."""
        every = self.switches.leaked_slot_every
        if not every:
            return False
        self._slots += 1
        return self._slots % every == 0

    def leaks_room(self) -> bool:
        """Whether a room that ended stays in its queue."""
        every = self.switches.leaked_room_every
        if not every:
            return False
        self._rooms += 1
        return self._rooms % every == 0

    @property
    def frees_slots(self) -> bool:
        """Whether slots that leaked earlier go back now."""
        return not self.switches.leaked_slot_every

    @property
    def frees_rooms(self) -> bool:
        """Whether rooms that leaked earlier are forgotten now."""
        return not self.switches.leaked_room_every

    def blocks_arrivals(self, retracted: int) -> bool:
        """Whether KV that arrived is not taken over because of so many retracted requests."""
        return retracted > 0 and self.switches.kv_exhaustion == "deadlocks"

"""Faults of a step: ranks that leave the collective or spin, compute that never returns.

For: the switches, their texts, and what the mechanisms remember.
Not for: the step loop (`scheduler.py`) or the group of ranks (`lockstep.py`).
"""

from collections.abc import Sequence
from typing import Literal

from tandem_engine.collective import Apart
from tandem_engine.faults.family import Family, Switches, Text
from tandem_engine.model import Feed

Held = Literal["", "blocks", "spins"]
"""What a step does that does not return."""


class ComputeSwitches(Switches, frozen=True):
    """The switches of this family."""

    rank_at_abort: Literal["joins", "leaves", "spins"] = "joins"
    """What the last rank does with the first batch after a client gave a request up."""
    forward: Literal["returns", "blocks", "spins"] = "returns"
    """What becomes of a step with a sequence of `forward_from_tokens` or more."""
    forward_from_tokens: int = 1


class ComputeFaults(Family[ComputeSwitches]):
    """The family in one worker."""

    name = "compute"
    kind = ComputeSwitches
    catalogue = {
        "rank_at_abort=leaves": Text(
            "Needs --ranks 2 or more. After an abort the last rank takes the next batch for over "
            "and goes back to waiting for one (frame `broadcast`), the others wait for it in "
            "`all_gather`: no CPU is used anywhere, the frames differ. Running requests and new "
            "ones hang, num_running_reqs stays, no batch line comes, /v1/loads answers, /health is "
            "503 after 20 s; after --watchdog-timeout the worker ends. The other role is idle and "
            "healthy.",
            "Restarting the whole engine, until the next abort.",
        ),
        "rank_at_abort=spins": Text(
            "Needs --ranks 2 or more. As when it leaves, but the last rank is busy in the batch "
            "itself (frame `forward`, one core at 100 %) and never joins the others.",
            "Restarting the whole engine, until the next abort.",
        ),
        "forward=blocks": Text(
            "A step that contains a sequence of forward_from_tokens tokens or more never returns "
            "and uses no CPU: its requests and all later ones hang, the stack of the compute "
            "thread stays in `_forward`; /health is 503 after 20 s, /v1/loads answers, gauges "
            "freeze; after --watchdog-timeout the worker ends. Shorter requests flow until then.",
            "Restarting the engine, until the next such request.",
        ),
        "forward=spins": Text(
            "As forward=blocks, but the compute thread uses a whole core: busy without progress.",
            "Restarting the engine, until the next such request.",
        ),
        "forward_from_tokens": Text(
            "How long a sequence has to be for `forward` to act on its step: short requests pass, "
            "and every retry of a long one stalls again.",
            "Keeping longer prompts away.",
        ),
    }

    def __init__(self) -> None:
        """Everything off."""
        super().__init__()
        self._aborted = False

    def turn(self, switches: ComputeSwitches) -> None:
        """A step that is held returns when its switch is off."""
        self._aborted = False
        super().turn(switches)

    def aborted(self) -> None:
        """A client gave a request up."""
        self._aborted = self.switches.rank_at_abort != "joins"

    def apart(self, ranks: int) -> tuple[int, Apart]:
        """Which of so many ranks does not join the present batch, and what it does instead."""
        if not self._aborted:
            return (0, "")
        self._aborted = False
        what = self.switches.rank_at_abort
        return (ranks - 1, what) if what != "joins" else (0, "")

    def held(self, feeds: Sequence[Feed]) -> Held:
        """Whether a step must not return now, and what it does meanwhile."""
        if self.switches.forward == "returns":
            return ""
        longest = max(feed.position + len(feed.tokens) for feed in feeds)
        return self.switches.forward if longest >= self.switches.forward_from_tokens else ""

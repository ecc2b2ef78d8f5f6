"""Faults of a process: slow starts, crashes, an API whose worker is dead, requests that get lost.

For: the switches, their texts, and what the mechanisms remember.
Not for: the life of a worker (`worker.py`).
"""

import os
import signal
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from tandem_engine.faults.family import Family, Switches, Text
from tandem_engine.request import Request

Count = Annotated[int, msgspec.Meta(ge=1)]
Every = Annotated[int, msgspec.Meta(ge=0)]
"""0 is never, 1 is each, n is the n-th of every n."""


class ProcessSwitches(Switches, frozen=True):
    """The switches of this family."""

    start_delay_s: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0
    """How long the worker takes to become ready, beyond loading."""
    crash: Literal["never", "killed", "exits_0", "worker_only"] = "never"
    """What ends after `crash_after_requests` requests, counted from the start or the switch."""
    crash_after_requests: Count = 1
    lost_reply_every: Every = 0
    duplicate_room: Literal["refused", "crashes"] = "refused"
    health_probes: Literal["aborted", "pile_up"] = "aborted"
    """What becomes of a probe of `/health` that got no answer in time."""


class ProcessFaults(Family[ProcessSwitches]):
    """The family in one worker."""

    name = "process"
    kind = ProcessSwitches
    catalogue = {
        "start_delay_s": Text(
            "After every start the ports are open and /health, /ready and /generate answer 503 for "
            "so long before 'The server is fired up'; then all is well. Nothing else is wrong.",
            "Waiting.",
        ),
        "crash=killed": Text(
            "The process ends by SIGKILL, as under the OOM killer, when so many requests ended: no "
            "log line, connections reset, requests on both sides fail. Started again it lives for "
            "as many requests again: exits follow the load.",
            "A restart, for as long as the count lasts.",
        ),
        "crash=exits_0": Text(
            "As crash=killed, but with status 0: a supervisor that restarts on failure only leaves "
            "it down, and nothing says that anything failed.",
            "Starting it again.",
        ),
        "crash=worker_only": Text(
            "When so many requests ended, the scheduler's thread is gone without a word while the "
            "API lives on: requests hang, /v1/loads and /server_info answer with the last numbers, "
            "/health is 503 after 20 s with SGLang's line, CPU time stands still. The other side's "
            "rooms time out; its heartbeats are still answered.",
            "Restarting this worker.",
        ),
        "crash_after_requests": Text(
            "How many requests end, probes of /health not counted, before `crash` acts.",
            "As `crash`.",
        ),
        "lost_reply_every": Text(
            "Every n-th generation is finished and its reply never sent (a stream gets its tokens "
            "but no end): that client waits on an open connection while #running-req and all "
            "queues are 0, the other side has answered, and others are served. "
            "num_requests_total does not count it.",
            "Nothing in the engine: the client's own deadline; a restart drops the connections.",
        ),
        "duplicate_room=crashes": Text(
            "A second request for a room that is in use reaches the scheduler: 'Scheduler hit an "
            "exception' with its stack, and the worker ends with status 1; all its requests fail.",
            "Restarting it, and finding who repeats rooms (a client that retries).",
        ),
        "health_probes=pile_up": Text(
            "A probe of /health that got no answer within 20 s stays queued for ever: during a "
            "stall num_waiting_reqs of /v1/loads (on a decode also the prealloc queue) grows by "
            "one a probe, and after it the floor stays above zero without any client.",
            "Restarting it; probing less often than the probe's own timeout.",
        ),
    }

    def __init__(self) -> None:
        """Everything off."""
        super().__init__()
        self._ended = 0
        self._finished = 0
        self.orphans: set[Request] = set()
        """Probes that nobody waits for and nothing ends."""

    def turn(self, switches: ProcessSwitches) -> None:
        """Count anew; let orphans go."""
        self._ended = self._finished = 0
        if switches.health_probes == "aborted":
            self.orphans = set()
        super().turn(switches)

    def ended(self, end_worker: Callable[[], None]) -> None:
        """A client's request holds nothing any more. `end_worker` ends the scheduler's loop."""
        if self.switches.crash == "never":
            return
        self._ended += 1
        if self._ended < self.switches.crash_after_requests:
            return
        match self.switches.crash:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exits_0":
                os._exit(0)
            case "worker_only":
                end_worker()

    def loses_reply(self) -> bool:
        """Whether the end of a generation that just finished does not reach its client."""
        every = self.switches.lost_reply_every
        if not every:
            return False
        self._finished += 1
        return self._finished % every == 0

    @property
    def refuses_duplicates(self) -> bool:
        """Whether a room in use is refused before it reaches the scheduler."""
        return self.switches.duplicate_room == "refused"

    @property
    def piles_probes(self) -> bool:
        """Whether probes are queued without a look at what runs, and left there."""
        return self.switches.health_probes == "pile_up"

    def orphaned(self, probe: Request) -> bool:
        """Whether a probe that timed out is left where it is instead of being aborted."""
        if self.piles_probes:
            self.orphans.add(probe)
        return self.piles_probes

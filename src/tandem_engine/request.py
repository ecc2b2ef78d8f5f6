"""One request inside a worker, and what comes back for it.

For: what `prefill.py`, `decode.py` and the HTTP routes agree on: where a request is, what it holds,
what it produced. Not for: the JSON a client sends (`wire.py`) or gets (`generate.py`, `openai.py`).
"""

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.sampling import SamplingParams
from tandem_engine.text import TextStream
from tandem_engine.wire import FAKE_BOOTSTRAP_HOST

HEALTH_RID_PREFIX = "HEALTH_CHECK"


class Phase(enum.Enum):
    """Where a request is; the names are those of SGLang's PD queues."""

    NEW = "new"
    BOOTSTRAP = "prefill bootstrap queue"
    PREFILL_WAITING = "prefill waiting queue"
    PREFILLING = "prefill running"
    INFLIGHT = "prefill inflight queue"
    PREALLOC = "decode prealloc queue"
    TRANSFER = "decode transfer queue"
    RUNNING = "decode running"
    RETRACTED = "decode retracted queue"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of a token, and the best (log-probability, token) at its place."""

    logprob: float | None
    token: int
    top: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ScoresWanted:
    """Which log-probabilities a client asked for."""

    start: int
    """First prompt position to score; the prompt's length when only the output is asked for."""
    top: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended: SGLang's `finish_reason`."""

    kind: str
    """`stop`, `length` or `abort`."""
    matched: str | int | None = None
    message: str = ""
    status: int = 500


@dataclass(frozen=True, slots=True)
class Output:
    """What one step adds to a request; the last one carries `finish`."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    scores: tuple[Score, ...] = ()
    finish: Finish | None = None
    made_s: float = 0.0
    """Monotonic time the tokens were sampled."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request; after `submit` only the scheduler's thread writes to it."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    text: TextStream
    stop_ids: frozenset[int]
    room: int
    bootstrap: str
    """`host:port` of the bootstrap server where the two sides meet."""
    arrived_s: float
    streaming: bool = False
    scores: ScoresWanted | None = None
    deliver: "Callable[[Output], None]"
    """Called on the event loop's thread, in order."""

    phase: Phase = Phase.NEW
    phase_since_s: float = 0.0
    sequence: int = -1
    computed: int = 0
    """Prompt tokens whose KV is there."""
    cached: int = 0
    """Prompt tokens that were not computed anew."""
    output: list[int] = field(default_factory=list)
    input_scores: list[Score] = field(default_factory=list)
    first_score: Score | None = None
    finish: Finish | None = None
    """Why it ends, as soon as that is known; its client hears of it a moment later."""
    answered: bool = False
    """The client got its last output; in the historical modes a room may outlive that."""

    @property
    def fake(self) -> bool:
        """No KV moves for this request."""
        return self.bootstrap.rpartition(":")[0] == FAKE_BOOTSTRAP_HOST

    @property
    def health(self) -> bool:
        """A probe of `/health`: not a client's request, left out of its metrics."""
        return self.rid.startswith(HEALTH_RID_PREFIX)

    @property
    def live(self) -> bool:
        """Whether anybody still waits for it."""
        return self.phase is not Phase.ENDED

    def enter(self, phase: Phase, now_s: float) -> None:
        """Move to a phase."""
        self.phase, self.phase_since_s = phase, now_s

    def finish_at(self, token: int) -> Finish | None:
        """Whether the request ends with this token, by token id or length alone."""
        if token in self.stop_ids:
            return Finish("stop", matched=token)
        if len(self.output) >= self.max_new_tokens:
            return Finish("length")
        return None


class Outbox:
    """Outputs on their way from the scheduler's thread to the event loop, one wake-up per step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver on `loop`."""
        self._loop = loop
        self._waiting: list[tuple[Request, Output]] = []

    def put(self, request: Request, output: Output) -> None:
        """Add one output; it leaves with the next `flush`. Nothing follows a last one."""
        if request.answered:
            return
        request.answered = output.finish is not None
        self._waiting.append((request, output))

    def flush(self) -> None:
        """Hand everything over; outputs for a loop that is closed are dropped with it."""
        if not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


def _deliver(batch: list[tuple[Request, Output]]) -> None:
    for request, output in batch:
        request.deliver(output)

"""What the HTTP routes and the roles see of a worker.

For: everything that `worker.py` builds and that speaks back to it, so that no import goes round in
a circle. Not for: what a worker does (`worker.py`).
"""

from typing import Literal, Protocol

from tandem_engine.config import Settings, Timeouts
from tandem_engine.faults import Switchboard
from tandem_engine.metrics import Gauges, Metrics
from tandem_engine.model import Model
from tandem_engine.request import Request
from tandem_engine.wire import Bootstrapped, DisaggregationLoad

State = Literal["starting", "ready", "draining", "dead"]


class Readings(Protocol):
    """The live numbers of a role; read from any thread."""

    def gauges(self) -> Gauges:
        """The present numbers."""
        ...

    def disaggregation(self) -> DisaggregationLoad:
        """The `disaggregation` section of `/v1/loads`."""
        ...

    def pending_tokens(self) -> int:
        """Prompt tokens that wait."""
        ...


class Host(Protocol):
    """A worker, from inside."""

    settings: Settings
    timeouts: Timeouts
    switchboard: Switchboard
    metrics: Metrics
    state: State
    version: str
    started_s: float
    rooms: dict[int, Request]

    @property
    def context_length(self) -> int:
        """The longest sequence, tokens."""
        ...

    @property
    def model(self) -> Model:
        """The model; raises `RequestError` (503) while starting."""
        ...

    @property
    def readings(self) -> Readings:
        """The live numbers; raises as `model` does."""
        ...

    def check_open(self) -> None:
        """Raise `RequestError` (503) unless requests are admitted now."""
        ...

    def submit(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        ...

    def refused(self, body: Bootstrapped, reason: str) -> None:
        """A request was refused: the other side must not wait for its room."""
        ...

    def done(self, request: Request) -> None:
        """The connection of a request is served or gone."""
        ...

    def room_ended(self, request: Request) -> None:
        """Nothing is held for this request any more; called on the scheduler's thread."""
        ...

    def abort(self, rid: str, *, everything: bool) -> None:
        """Abort requests by (the beginning of) their id, or all."""
        ...

    def flush_cache(self) -> None:
        """Drop the prefixes kept for reuse."""
        ...

    async def healthy(self) -> bool:
        """SGLang's health: some output of the scheduler in time."""
        ...

    def exposed_metrics(self) -> str:
        """The page of `/metrics`."""
        ...

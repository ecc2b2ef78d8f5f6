"""Running requests that have to make room: their KV waits in ordinary memory and comes back.

Admission promises cells for the prompt and up to `--num-reserved-decode-tokens` more; whoever runs
beyond that competes, and the newest request gives way (SGLang's retraction with a `cpu_tensor`
backup).

For: `decode.py`, on the model's thread while the model is idle.
Not for: admission of new requests, which waits while anything is retracted.
"""

import logging
import time
from collections import deque

from tandem_engine.metrics import Metrics
from tandem_engine.model import Model
from tandem_engine.request import Phase, Request
from tandem_engine.sequences import Sequences

log = logging.getLogger(__name__)


class Retraction:
    """The retracted queue of one decode."""

    def __init__(
        self, model: Model, sequences: Sequences, metrics: Metrics, reserved_tokens: int
    ) -> None:
        """`reserved_tokens` bounds what is promised beyond what a sequence holds."""
        self._model = model
        self._sequences = sequences
        self._metrics = metrics
        self._reserved_tokens = reserved_tokens
        self._waiting: deque[tuple[Request, bytes]] = deque()

    def __len__(self) -> int:
        """Requests retracted and not back yet."""
        return len(self._waiting)

    def requests(self) -> list[Request]:
        """Who they are."""
        return [request for request, _ in self._waiting]

    def secure(self, running: list[Request]) -> None:
        """Promise every running request its next token, retracting the newest while that fails."""
        for request in list(running):
            while request.phase is Phase.RUNNING and not self._promised(request):
                self.retract(running)

    def _promised(self, request: Request) -> bool:
        """Probes are promised nothing and take what is there."""
        length = self._model.length(request.sequence)
        return request.fake or self._sequences.promise(request.sequence, length + 1)

    def retract(self, running: list[Request]) -> None:
        """Take the newest running request out."""
        request = next(r for r in reversed(running) if not r.fake)
        blob = bytearray(self._model.kv_size(request.sequence))
        size = self._model.export_kv(request.sequence, memoryview(blob))
        self._sequences.release(request.sequence)
        request.sequence = -1
        request.enter(Phase.RETRACTED, time.monotonic())
        running.remove(request)
        self._waiting.append((request, bytes(blob[:size])))
        self._metrics.retracted.add()
        self._metrics.retracted_input.add(len(request.prompt))
        self._metrics.retracted_output.add(len(request.output))
        log.warning("KV cache pool is full. Retract requests. #retracted_reqs: 1")

    def resume(self, running: list[Request], running_max: int) -> None:
        """Bring retracted requests back, oldest first, as far as their cells are free again."""
        while self._waiting and len(running) < running_max:
            request, blob = self._waiting[0]
            if request.live:
                left = request.max_new_tokens - len(request.output)
                tokens = len(request.prompt) + len(request.output)
                held = self._sequences.acquire((), tokens + min(left, self._reserved_tokens))
                if held is None:
                    return
                self._model.import_kv(held.sequence, memoryview(blob))
                request.sequence = held.sequence
                request.enter(Phase.RUNNING, time.monotonic())
                running.append(request)
            self._waiting.popleft()

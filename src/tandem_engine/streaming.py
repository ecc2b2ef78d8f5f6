"""What comes of a decode's tokens: text, stop strings, streams, counters, gauges, the log line.

All of it may run while the next step computes.

For: `decode.py`.
Not for: which tokens there are.
"""

import logging
from collections.abc import Sequence, Sized
from typing import Protocol

from tandem_engine.arrivals import Arrivals
from tandem_engine.config import Settings
from tandem_engine.logs import DecodeLine
from tandem_engine.metrics import IDLE_GAUGES_EVERY_S, Gauges, Metrics
from tandem_engine.model import Model
from tandem_engine.request import Finish, Outbox, Output, Request, Score
from tandem_engine.scheduler import Step
from tandem_engine.wire import DisaggregationLoad

log = logging.getLogger(__name__)


class Queues(Protocol):
    """The queues of a decode, as the gauges count them, and where finished requests go."""

    arrivals: Arrivals
    running: list[Request]

    @property
    def prealloc(self) -> Sequence[Request]:
        """Requests whose KV has no place yet."""
        ...

    @property
    def retraction(self) -> Sized:
        """Requests taken out for room."""
        ...

    def finished(self, request: Request) -> None:
        """A request gave its last output."""
        ...


class Streaming:
    """The output side of one decode."""

    def __init__(
        self, decode: Queues, model: Model, settings: Settings, metrics: Metrics, outbox: Outbox
    ) -> None:
        """Reads the queues of `decode` for the gauges."""
        self._decode = decode
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._outbox = outbox
        self._steps = 0
        self._tokens = 0
        self._since_s = 0.0
        self._throughput = 0.0
        self._gauges_s = 0.0

    def emit(self, request: Request, scored: Score | None, made_s: float) -> None:
        """Give out the newest token of a request, and its end if it ends with it."""
        token, finish = request.output[-1], request.finish
        ends = finish is not None and finish.kind == "stop"
        piece = b"" if ends else self._model.piece(token)
        text = request.text.push(piece, last=finish is not None)
        if request.text.stopped_by is not None:
            finish = Finish("stop", matched=request.text.stopped_by)
        scores = (scored,) if scored is not None else ()
        self._outbox.put(request, Output((token,), text, scores, finish, made_s))
        if finish is not None:
            self._decode.finished(request)

    def count(self, step: Step) -> None:
        """Count one step; log and refresh the gauges every `decode_log_interval` steps."""
        size = len(step.requests)
        metrics = self._metrics
        metrics.passes.add(mode="decode_none")
        metrics.forward_seconds.add(step.ended_s - step.begun_s, category="decode")
        metrics.realtime_tokens.add(size, mode="decode")
        if self._steps == 0:
            self._since_s = step.begun_s
        self._steps += 1
        self._tokens += size
        if self._steps % self._settings.decode_log_steps:
            return
        self._throughput = self._tokens / max(step.ended_s - self._since_s, 1e-9)
        self._tokens, self._since_s = 0, step.ended_s
        gauges = self._write_gauges(step.ended_s)
        line = DecodeLine(
            running=gauges.num_running_reqs,
            tokens=gauges.num_used_tokens,
            token_usage=gauges.token_usage,
            preallocated_usage=gauges.prealloc_full_token_usage,
            prealloc=gauges.num_decode_prealloc_queue_reqs,
            transfer=gauges.num_decode_transfer_queue_reqs,
            retracted=gauges.num_retracted_reqs,
            throughput=self._throughput,
            queued=gauges.num_queue_reqs,
        )
        log.info("%s", line.text(self._settings.metrics_era))

    def idle(self, now_s: float, *, queued: bool) -> None:
        """Nothing to compute: refresh the gauges when fully idle, and only then."""
        self._tokens, self._since_s = 0, now_s
        if not queued and now_s - self._gauges_s > IDLE_GAUGES_EVERY_S:
            self._throughput = 0.0
            self._write_gauges(now_s)

    def _write_gauges(self, now_s: float) -> Gauges:
        self._gauges_s = now_s
        gauges = self.gauges()
        self._metrics.write_gauges(gauges)
        return gauges

    def pending_tokens(self) -> int:
        """Prompt tokens whose KV is still to come."""
        decode = self._decode
        waiting = [*decode.prealloc, *(w.request for w in list(decode.arrivals.awaited.values()))]
        return sum(len(request.prompt) for request in waiting)

    def gauges(self) -> Gauges:
        """The present numbers; read from any thread."""
        decode, cells = self._decode, self._model.cells
        used = self._model.cells_used()
        awaited = [waiting.request for waiting in list(decode.arrivals.awaited.values())]
        pending = sum(len(request.prompt) for request in list(decode.prealloc))
        return Gauges(
            num_running_reqs=len(decode.running),
            num_queue_reqs=0,
            num_retracted_reqs=len(decode.retraction),
            num_decode_prealloc_queue_reqs=len(decode.prealloc),
            num_decode_transfer_queue_reqs=len(awaited),
            gen_throughput=self._throughput,
            token_usage=used / cells,
            full_token_usage=used / cells,
            num_used_tokens=used,
            kv_used_tokens=used,
            kv_available_tokens=cells - used,
            decode_sum_seq_lens=used,
            pending_prealloc_token_usage=pending / cells,
            prealloc_full_token_usage=sum(len(request.prompt) for request in awaited) / cells,
            max_total_num_tokens=cells,
        )

    def disaggregation(self) -> DisaggregationLoad:
        """The `disaggregation` section of `/v1/loads`, live."""
        decode = self._decode
        return DisaggregationLoad(
            mode="decode",
            decode_prealloc_queue_reqs=len(decode.prealloc),
            decode_transfer_queue_reqs=len(decode.arrivals.awaited),
            decode_retracted_queue_reqs=len(decode.retraction),
        )

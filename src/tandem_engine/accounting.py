"""What a prefill's steps leave behind: input log-probabilities, counters, gauges, the log line.

All of it may run while the next step computes.

For: `prefill.py`.
Not for: what is computed when.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from tandem_engine import scoring
from tandem_engine.config import Settings
from tandem_engine.handoffs import Settled
from tandem_engine.logs import PrefillLine
from tandem_engine.metrics import IDLE_GAUGES_EVERY_S, Gauges, Metrics
from tandem_engine.model import Feed, Logits, Model
from tandem_engine.request import Request
from tandem_engine.scheduler import Step
from tandem_engine.sequences import Sequences
from tandem_engine.wire import DisaggregationLoad

log = logging.getLogger(__name__)
BATCHES_REMEMBERED = 64
"""How many batches the cache hit rate is taken over."""


class Queues(Protocol):
    """The queues of a prefill, as the gauges count them."""

    running: list[Request]
    sequences: Sequences

    @property
    def bootstrap(self) -> Mapping[int, Request]:
        """Rooms without metadata or slot."""
        ...

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that wait for a sequence."""
        ...

    @property
    def inflight(self) -> Mapping[int, Request]:
        """Rooms that wait for their acknowledgement."""
        ...


class Accounting:
    """The output side of one prefill."""

    def __init__(self, queues: Queues, model: Model, settings: Settings, metrics: Metrics) -> None:
        """Reads the `queues` for the gauges."""
        self._queues = queues
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._batch = 0
        self._throughput = 0.0
        self._hits = deque[tuple[int, int]](maxlen=BATCHES_REMEMBERED)
        self._transfer = (0.0, 0.0)
        self._gauges_s = 0.0

    def process(self, step: Step) -> None:
        """Score prompts, count, log, refresh the gauges."""
        for request, feed, rows in zip(step.requests, step.feeds, step.rows or (), strict=True):
            if feed.logits == "all" and request.live:
                score_prompt(request, feed, rows)
        begun = [
            request
            for request, feed in zip(step.requests, step.feeds, strict=True)
            if feed.position == request.cached
        ]
        tokens = sum(len(feed.tokens) for feed in step.feeds)
        cached = sum(request.cached for request in begun)
        took_s = max(step.ended_s - step.begun_s, 1e-9)
        self._batch = len(step.requests)
        self._throughput = tokens / took_s
        self._hits.append((cached, tokens))
        metrics = self._metrics
        metrics.passes.add(mode="prefill_none")
        metrics.forward_seconds.add(took_s, category="extend")
        metrics.realtime_tokens.add(tokens, mode="prefill_compute")
        if cached:
            metrics.realtime_tokens.add(cached, mode="prefill_cache")
        self._write_gauges(step.ended_s)
        if not all(request.health for request in step.requests):
            self._log(len(begun), tokens, cached)

    def _log(self, begun: int, tokens: int, cached: int) -> None:
        gauges = self.gauges()
        line = PrefillLine(
            new_seqs=begun,
            new_tokens=tokens,
            cached_tokens=cached,
            token_usage=gauges.token_usage,
            running=len(self._queues.running),
            queued=gauges.num_queue_reqs,
            pending_tokens=self.pending_tokens(),
            bootstrap=gauges.num_prefill_bootstrap_queue_reqs,
            inflight=gauges.num_prefill_inflight_queue_reqs,
            throughput=self._throughput,
        )
        log.info("%s", line.text(self._settings.metrics_era))

    def transferred(self, settled: Settled) -> None:
        """Observe one acknowledged hand-off; SGLang observes successes only."""
        took_ms, size_mb = settled.took_s * 1e3, settled.size_bytes / 1e6
        self._transfer = (size_mb / max(took_ms, 1e-6), took_ms)
        self._metrics.transfer_ms.observe(took_ms)
        self._metrics.transfer_mb.observe(size_mb)
        self._metrics.transfer_speed.observe(self._transfer[0])
        self._metrics.stage.observe(settled.took_s, stage="prefill_transfer_kv_cache")

    def idle(self, now_s: float, *, queued: bool) -> None:
        """Nothing to compute: refresh the gauges when fully idle, and only then."""
        if not queued and now_s - self._gauges_s > IDLE_GAUGES_EVERY_S:
            self._batch, self._throughput = 0, 0.0
            self._write_gauges(now_s)

    def _write_gauges(self, now_s: float) -> None:
        self._gauges_s = now_s
        cached, computed = self._hits[-1] if self._hits else (0, 0)
        gauges = self.gauges()
        # The page has the last batch's, `/v1/loads` that of the last few.
        gauges.cache_hit_rate = cached / (cached + computed) if cached else 0.0
        self._metrics.write_gauges(gauges)

    def pending_tokens(self) -> int:
        """Prompt tokens waiting to be computed."""
        queues = self._queues
        requests = [*queues.bootstrap.values(), *queues.waiting, *queues.running]
        return sum(len(request.prompt) - request.computed for request in requests)

    def gauges(self) -> Gauges:
        """The present numbers; read from any thread."""
        queues, cells = self._queues, self._model.cells
        # What is kept for reuse is evictable, and SGLang calls that not used.
        used = queues.sequences.cells_in_use
        kept = max(0, self._model.cells_used() - used)
        hits = list(self._hits)
        total = sum(cached + computed for cached, computed in hits)
        return Gauges(
            num_running_reqs=self._batch,
            num_queue_reqs=len(queues.waiting),
            num_prefill_bootstrap_queue_reqs=len(queues.bootstrap),
            num_prefill_inflight_queue_reqs=len(queues.inflight),
            cache_hit_rate=sum(cached for cached, _ in hits) / total if total else 0.0,
            token_usage=used / cells,
            full_token_usage=used / cells,
            num_used_tokens=used,
            kv_used_tokens=used,
            kv_available_tokens=cells - used - kept,
            kv_evictable_tokens=kept,
            utilization=-1.0,
            max_total_num_tokens=cells,
        )

    def disaggregation(self) -> DisaggregationLoad:
        """The `disaggregation` section of `/v1/loads`, live."""
        return DisaggregationLoad(
            mode="prefill",
            prefill_bootstrap_queue_reqs=len(self._queues.bootstrap),
            prefill_inflight_queue_reqs=len(self._queues.inflight),
            kv_transfer_speed_gb_s=self._transfer[0],
            kv_transfer_latency_ms=self._transfer[1],
        )


def score_prompt(request: Request, feed: Feed, rows: Logits) -> None:
    """Score the prompt tokens that one chunk's logits speak of: row i scores the token after it.

    SGLang gives the first scored position no log-probability.
    """
    wanted = request.scores
    if wanted is None:
        return
    if not request.input_scores:
        request.input_scores.append(scoring.unscored(request.prompt[wanted.start]))
    begin = max(feed.position, wanted.start)
    end = min(feed.position + len(feed.tokens), len(request.prompt) - 1)
    for position in range(begin, end):
        row = rows[position - feed.position]
        request.input_scores.append(scoring.score(row, request.prompt[position + 1], wanted.top))

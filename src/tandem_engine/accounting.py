"""What a prefill's steps leave behind: input log-probabilities, counters, gauges, the log line.

All of it may run while the next step computes.

For: `prefill.py`.
Not for: what is computed when.
"""

import logging
from collections import deque
from typing import TYPE_CHECKING

from tandem_engine import scoring
from tandem_engine.config import Settings
from tandem_engine.handoffs import Settled
from tandem_engine.logs import batch_line
from tandem_engine.metrics import IDLE_GAUGES_EVERY_S, Gauges, Metrics
from tandem_engine.model import Feed, Logits, Model
from tandem_engine.request import Request
from tandem_engine.scheduler import Step
from tandem_engine.wire import DisaggregationLoad

if TYPE_CHECKING:
    from tandem_engine.prefill import Prefill

log = logging.getLogger(__name__)
BATCHES_REMEMBERED = 64
"""How many batches the cache hit rate is taken over."""


class Accounting:
    """The output side of one prefill."""

    def __init__(
        self, prefill: "Prefill", model: Model, settings: Settings, metrics: Metrics
    ) -> None:
        """Reads the queues of `prefill` for the gauges."""
        self._prefill = prefill
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
        fields = {
            "#new-seq": begun,
            "#new-token": tokens,
            "#cached-token": cached,
            "token usage": round(gauges.token_usage, 2),
            "#running-req": len(self._prefill.running),
            "#queue-req": gauges.num_queue_reqs,
            "#pending-token": self.pending_tokens(),
            "#bootstrap-req": gauges.num_prefill_bootstrap_queue_reqs,
            "#inflight-req": gauges.num_prefill_inflight_queue_reqs,
            "cuda graph": False,
            "input throughput (token/s)": round(self._throughput, 2),
        }
        log.info("%s", batch_line("Prefill batch", fields))

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
        self._metrics.write_gauges(self.gauges())

    def pending_tokens(self) -> int:
        """Prompt tokens waiting to be computed."""
        prefill = self._prefill
        requests = [*prefill.bootstrap.values(), *prefill.waiting, *prefill.running]
        return sum(len(request.prompt) - request.computed for request in requests)

    def gauges(self) -> Gauges:
        """The present numbers; read from any thread."""
        prefill, cells = self._prefill, self._model.cells
        # What is kept for reuse is evictable, and SGLang calls that not used.
        used = prefill.sequences.cells_in_use
        kept = max(0, self._model.cells_used() - used)
        hits = list(self._hits)
        total = sum(cached + computed for cached, computed in hits)
        return Gauges(
            num_running_reqs=self._batch,
            num_queue_reqs=len(prefill.waiting),
            num_prefill_bootstrap_queue_reqs=len(prefill.bootstrap),
            num_prefill_inflight_queue_reqs=len(prefill.inflight),
            cache_hit_rate=sum(cached for cached, _ in hits) / total if total else 0.0,
            token_usage=used / cells,
            full_token_usage=used / cells,
            num_used_tokens=used,
            kv_used_tokens=used,
            kv_available_tokens=cells - used - kept,
            kv_evictable_tokens=kept,
            utilization=len(prefill.running) / self._settings.max_running_requests,
            max_total_num_tokens=cells,
        )

    def disaggregation(self) -> DisaggregationLoad:
        """The `disaggregation` section of `/v1/loads`, live."""
        return DisaggregationLoad(
            mode="prefill",
            prefill_bootstrap_queue_reqs=len(self._prefill.bootstrap),
            prefill_inflight_queue_reqs=len(self._prefill.inflight),
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

"""What `/metrics` shows: SGLang's names, types and labels, as far as we can fill them.

Two generations of names (`--metrics-era`): 0.5.23 and 0.5.6, read in SGLang's
`srt/observability/metrics_collector.py` and `srt/metrics/collector.py`.

Freshness is SGLang's (protocol reference section 4): counters move at once, those of the tokenizer
when a request has finished; gauges are written after a prefill batch, every `decode_log_interval`
decode steps, and when fully idle, at most every 30 s. So a decode's gauges freeze in a total stall,
and `/v1/loads` does not. A family without a sample is not on the page, as in SGLang. One difference
is kept on purpose: failure counters begin at zero, where SGLang writes no line until they count.

Not for: the numbers of `/v1/loads` (`info.py`).
"""

import time
from dataclasses import dataclass, fields

from tandem_engine.config import Era
from tandem_engine.exposition import Registry

PREFIX = "sglang:"
IDLE_GAUGES_EVERY_S = 30.0

_TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E_S = (*_TTFT_S, 600, 1200, 1800, 2400)
_GAP_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1,
          0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8)  # fmt: skip
_QUEUE_S = (0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300,
            400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500,
            3000)  # fmt: skip
_STAGE_S = tuple(0.001 * 1.62**step for step in range(30))
_LATENCY_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)
_BOOTSTRAP_MS = _LATENCY_MS[:-1]
_MB = (1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
_GB_S = (0.1, 0.5, 1, 5, 10, 25, 50, 100, 200, 400)

_RENAMED = {"num_prefill_bootstrap_queue_reqs": "num_prefill_prealloc_queue_reqs"}
"""Name of 0.5.23: name in 0.5.6."""

_NOT_YET = frozenset({
    "full_token_usage", "kv_used_tokens", "kv_available_tokens", "kv_evictable_tokens", "page_size",
    "decode_sum_seq_lens", "prealloc_full_token_usage", "num_retracted_requests_total",
    "num_retracted_input_tokens_total", "num_retracted_output_tokens_total",
    "realtime_tokens_total", "forward_execution_seconds_total", "scheduler_idle_seconds_total",
    "scheduler_process_cpu_seconds_total", "cuda_graph_passes_total", "kv_transfer_total_mb",
    "kv_transfer_speed_gb_s", "kv_transfer_latency_ms", "kv_transfer_bootstrap_ms",
    "kv_transfer_alloc_ms",
})  # fmt: skip
"""What 0.5.6 does not have (of the transfers' histograms it has gauges of the same name)."""

_ZERO = (
    "num_grammar_queue_reqs", "num_paused_reqs", "swa_token_usage", "mamba_usage",
    "spec_accept_length", "spec_accept_rate", "is_cuda_graph",
)  # fmt: skip
_ZERO_NEW = (
    "swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens", "mamba_available_tokens",
    "mamba_evictable_tokens", "mamba_used_tokens", "num_decode_host_receive_queue_reqs",
    "num_decode_deferred_kv_release_reqs", "prealloc_swa_token_usage", "fwd_occupancy",
)  # fmt: skip
_ZERO_OLD = (
    "num_running_reqs_offline_batch", "kv_transfer_speed_gb_s", "kv_transfer_latency_ms",
    "kv_transfer_bootstrap_ms", "kv_transfer_alloc_ms",
)  # fmt: skip
"""Gauges that are written and never anything but 0 here; 0.5.6 never wired those of transfers."""


@dataclass(slots=True)
class Gauges:
    """One writing of the scheduler's gauges; the field names are the metric names of 0.5.23."""

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_retracted_reqs: int = 0
    num_prefill_bootstrap_queue_reqs: int = 0
    num_prefill_inflight_queue_reqs: int = 0
    num_decode_prealloc_queue_reqs: int = 0
    num_decode_transfer_queue_reqs: int = 0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    token_usage: float = 0.0
    full_token_usage: float = 0.0
    num_used_tokens: int = 0
    kv_used_tokens: int = 0
    kv_available_tokens: int = 0
    kv_evictable_tokens: int = 0
    decode_sum_seq_lens: int = 0
    pending_prealloc_token_usage: float = 0.0
    prealloc_full_token_usage: float = 0.0
    new_token_ratio: float = 1.0
    utilization: float = 0.0
    """-1 on a prefill; on a decode SGLang never sets it (both eras)."""
    max_total_num_tokens: int = 0
    page_size: int = 1


class Metrics(Registry):
    """Every metric of one worker."""

    def __init__(self, model_name: str, engine_type: str, era: Era = "0.5.23") -> None:
        """No gauge is written yet; `engine_type` is `prefill` or `decode`."""
        self._old = era == "0.5.6"
        super().__init__(
            PREFIX,
            hidden=_NOT_YET if self._old else frozenset(),
            unlabelled=frozenset({"is_streaming", "cache_source"} if self._old else ()),
        )
        self._prefill = engine_type == "prefill"
        tokenizer = {"model_name": model_name}
        scheduler = tokenizer | {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        if not self._old:
            tokenizer |= {"engine_type": engine_type}
            scheduler = tokenizer | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self.frozen = False
        """No gauge is written."""
        self._gauges = {
            field.name: self.gauge(
                _RENAMED.get(field.name, field.name) if self._old else field.name,
                f"The scheduler's {field.name}.",
                scheduler,
            )
            for field in fields(Gauges)
        }
        self._of_the_scheduler(scheduler)
        self._of_the_transfers(scheduler)
        self._of_the_tokenizer(tokenizer)
        # After the histograms of the same names: those are hidden where these are shown.
        self._zeros = [
            self.gauge(name, f"The scheduler's {name}.", scheduler, always=True)
            for name in (*_ZERO, *(_ZERO_OLD if self._old else _ZERO_NEW))
        ]

    def _of_the_scheduler(self, labels: dict[str, str]) -> None:
        self.bootstrap_failed = self.counter(
            "num_bootstrap_failed_reqs_total", "Rooms that failed before their hand-off.", labels
        )
        self.transfer_failed = self.counter(
            "num_transfer_failed_reqs_total", "Rooms whose hand-off failed.", labels
        )
        self.retracted = self.counter(
            "num_retracted_requests_total", "Requests taken out of decode for room.", labels
        )
        self.retracted_input = self.counter(
            "num_retracted_input_tokens_total", "Their prompt tokens.", labels, zero=False
        )
        self.retracted_output = self.counter(
            "num_retracted_output_tokens_total", "Their output tokens.", labels, zero=False
        )
        self.realtime_tokens = self.counter(
            "realtime_tokens_total", "Tokens of every batch, by mode.", labels, zero=False
        )
        self.forward_seconds = self.counter(
            "forward_execution_seconds_total", "Time in forward passes.", labels, zero=False
        )
        self.idle_seconds = self.counter(
            "scheduler_idle_seconds_total", "Time the scheduler had nothing to do.", labels
        )
        self.cpu_seconds = self.counter(
            "scheduler_process_cpu_seconds_total", "CPU time of the process.", labels
        )
        self.passes = self.counter(
            "cuda_graph_passes_total", "Forward passes, by mode.", labels, zero=False
        )
        shortest_s = (0.0,) if self._old else (0.0, 0.001, 0.005, 0.01, 0.05)
        self.queue_time = self.histogram(
            "queue_time_seconds", "Time in the waiting queue.", labels, (*shortest_s, *_QUEUE_S)
        )
        self.stage = self.histogram(
            "per_stage_req_latency_seconds", "Time per stage.", labels, _STAGE_S
        )

    def _of_the_transfers(self, labels: dict[str, str]) -> None:
        self.transfer_ms = self.histogram(
            "kv_transfer_latency_ms", "Write to acknowledgement.", labels, _LATENCY_MS
        )
        self.transfer_mb = self.histogram(
            "kv_transfer_total_mb", "Size of a hand-off.", labels, _MB
        )
        self.transfer_speed = self.histogram(
            "kv_transfer_speed_gb_s", "Speed of a hand-off.", labels, _GB_S
        )
        self.transfer_bootstrap_ms = self.histogram(
            "kv_transfer_bootstrap_ms", "Arrival to metadata.", labels, _BOOTSTRAP_MS
        )
        self.transfer_alloc_ms = self.histogram(
            "kv_transfer_alloc_ms", "Metadata to a place in the batch.", labels, _BOOTSTRAP_MS
        )

    def _of_the_tokenizer(self, labels: dict[str, str]) -> None:
        self.prompt_tokens = self.counter(
            "prompt_tokens_total", "Prompt tokens of finished requests.", labels, zero=False
        )
        self.generated_tokens = self.counter(
            "generation_tokens_total", "Tokens of finished requests.", labels, zero=False
        )
        self.requests = self.counter("num_requests_total", "Finished requests.", labels, zero=False)
        self.cached_tokens = self.counter(
            "cached_tokens_total", "Prompt tokens not computed anew.", labels, zero=False
        )
        self.aborted = self.counter(
            "num_aborted_requests_total", "Requests given up by the client.", labels
        )
        self.ttft = self.histogram(
            "time_to_first_token_seconds", "Arrival to first token.", labels, _TTFT_S
        )
        self.e2e = self.histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", labels, _E2E_S
        )
        self.gap = self.histogram(
            "inter_token_latency_seconds", "Between two tokens.", labels, _GAP_S
        )

    def write_gauges(self, gauges: Gauges) -> None:
        """Refresh every gauge of the scheduler."""
        if self.frozen:
            return
        for name, family in self._gauges.items():
            family.value = float(getattr(gauges, name))
        if self._old and self._prefill:
            # 0.5.6 counts `running_batch`, which a PD prefill never fills.
            self._gauges["num_running_reqs"].value = 0.0
        for family in self._zeros:
            family.value = 0.0

    def exposed(self) -> str:
        """The whole page."""
        self.cpu_seconds.add(max(0.0, time.process_time() - self.cpu_seconds.value()))
        return "".join(family.exposed() for family in self.families)

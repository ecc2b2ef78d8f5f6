"""What `/metrics` shows: SGLang 0.5.23's names, types and labels, as far as we can fill them.

Freshness is SGLang's (protocol reference section 4): counters move at once; gauges are written
after a prefill batch, every `decode_log_interval` decode steps, and when fully idle, at most every
30 s. So a decode's gauges freeze in a total stall, and `/v1/loads` does not.

Not for: the numbers of `/v1/loads` (`worker.py`).
"""

import os
import time
from dataclasses import dataclass, fields

from tandem_engine.exposition import Gauge, Registry

PREFIX = "sglang:"
IDLE_GAUGES_EVERY_S = 30.0

_TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E_S = (*_TTFT_S, 600, 1200, 1800, 2400)
_GAP_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1,
          0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8)  # fmt: skip
_STAGE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300)
_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_MB = (0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_GB_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


@dataclass(slots=True)
class Gauges:
    """One writing of the scheduler's gauges; the field names are the metric names."""

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
    utilization: float = 0.0
    max_total_num_tokens: int = 0
    page_size: int = 1


class Metrics(Registry):
    """Every metric of one worker."""

    def __init__(self, model_name: str, engine_type: str) -> None:
        """All zero; `engine_type` is `prefill` or `decode`."""
        super().__init__(PREFIX)
        self._started_s = _process_start_s()
        tokenizer = {"model_name": model_name, "engine_type": engine_type}
        scheduler = tokenizer | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._gauges = {
            field.name: self.gauge(field.name, f"The scheduler's {field.name}.", scheduler)
            for field in fields(Gauges)
        }
        self._of_the_scheduler(scheduler)
        self._of_the_tokenizer(tokenizer)

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
        self.queue_time = self.histogram(
            "queue_time_seconds", "Time in the waiting queue.", labels, _STAGE_S
        )
        self.stage = self.histogram(
            "per_stage_req_latency_seconds", "Time per stage.", labels, _STAGE_S, zero=False
        )
        self.transfer_ms = self.histogram(
            "kv_transfer_latency_ms", "Write to acknowledgement.", labels, _MS, zero=False
        )
        self.transfer_mb = self.histogram(
            "kv_transfer_total_mb", "Size of a hand-off.", labels, _MB, zero=False
        )
        self.transfer_speed = self.histogram(
            "kv_transfer_speed_gb_s", "Speed of a hand-off.", labels, _GB_S, zero=False
        )
        self.transfer_bootstrap_ms = self.histogram(
            "kv_transfer_bootstrap_ms", "Arrival to metadata.", labels, _MS, zero=False
        )

    def _of_the_tokenizer(self, labels: dict[str, str]) -> None:
        self.prompt_tokens = self.counter(
            "prompt_tokens_total", "Prompt tokens of finished requests.", labels, zero=False
        )
        self.generated_tokens = self.counter(
            "generation_tokens_total", "Tokens that reached a client.", labels, zero=False
        )
        self.requests = self.counter(
            "num_requests_total", "Requests that reached a client.", labels, zero=False
        )
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
        for name, family in self._gauges.items():
            family.value = float(getattr(gauges, name))

    def exposed(self) -> str:
        """The whole page."""
        self.cpu_seconds.add(max(0.0, time.process_time() - self.cpu_seconds.value()))
        start = Gauge("process_start_time_seconds", "Start of the process, Unix time.", {})
        start.value = self._started_s
        cpu = Gauge("process_cpu_seconds_total", "CPU time of the process.", {})
        cpu.kind, cpu.value = "counter", time.process_time()
        return "".join(family.exposed() for family in (*self.families, start, cpu))


def _process_start_s() -> float:
    """Unix time at which this process began, from the kernel's clock ticks since boot."""
    with open("/proc/self/stat", encoding="ascii") as stat:  # noqa: PTH123 - a pseudo file
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot_s + ticks / os.sysconf("SC_CLK_TCK")

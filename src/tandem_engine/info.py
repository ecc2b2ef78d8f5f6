"""What the routes that only look show of a worker: load, server arguments, model.

For: `http.py`.
Not for: `/metrics` (`metrics.py`), or anything that changes the worker.
"""

from typing import Any

from tandem_engine.host import Host
from tandem_engine.wire import Load, MemoryLoad, QueueLoad


def load_of(worker: Host) -> Load:
    """The present load, computed now: `/v1/loads` never freezes. 503 while starting."""
    readings = worker.readings
    gauges, pending = readings.gauges(), readings.pending_tokens()
    waiting = gauges.num_queue_reqs + gauges.num_decode_prealloc_queue_reqs
    return Load(
        num_running_reqs=gauges.num_running_reqs,
        num_waiting_reqs=waiting,
        num_waiting_uncached_tokens=pending,
        num_used_tokens=gauges.num_used_tokens,
        num_total_tokens=gauges.num_used_tokens + pending,
        max_total_num_tokens=gauges.max_total_num_tokens,
        max_running_requests=worker.settings.max_running_requests,
        token_usage=round(gauges.token_usage, 4),
        gen_throughput=round(gauges.gen_throughput, 2),
        cache_hit_rate=round(gauges.cache_hit_rate, 4),
        utilization=round(gauges.utilization, 4),
        memory=MemoryLoad(0.0, 0.0, 0.0, gauges.max_total_num_tokens),
        disaggregation=readings.disaggregation(),
        queues=QueueLoad(waiting=waiting, retracted=gauges.num_retracted_reqs),
    )


def old_load_of(worker: Host) -> list[dict[str, object]]:
    """What `/get_load` shows: every queue is waiting, and a prefill runs nothing (0.5.6)."""
    load = load_of(worker)
    queues = load.disaggregation
    waiting = (
        worker.readings.gauges().num_queue_reqs
        + queues.prefill_bootstrap_queue_reqs
        + queues.decode_prealloc_queue_reqs
        + queues.decode_transfer_queue_reqs
        + queues.decode_retracted_queue_reqs
    )
    running = 0 if queues.mode == "prefill" else load.num_running_reqs
    return [
        {
            "dp_rank": 0,
            "num_reqs": running + waiting,
            "num_waiting_reqs": waiting,
            "num_tokens": load.num_total_tokens,
        }
    ]


def server_info(worker: Host) -> dict[str, object]:
    """Server arguments, state, version: what a router and an operator ask for."""
    settings = worker.settings
    shown = settings.described()
    states: list[dict[str, Any]] = []
    if worker.state != "starting":
        identity = worker.model.identity
        shown |= {
            "kv_cache_dtype": identity.kv_dtype,
            "page_size": identity.page_size,
            "context_length": worker.model.context_length,
        }
        load = load_of(worker)
        states.append(
            {
                "last_gen_throughput": load.gen_throughput,
                "disaggregation_mode": settings.disaggregation_mode,
                "effective_max_running_requests_per_dp": settings.max_running_requests,
                "memory_usage": {"token_capacity": load.max_total_num_tokens},
            }
        )
    if settings.metrics_era != "0.5.6":
        shown["startup_time"] = worker.started_s
    return shown | {
        "version": worker.version,
        "engine": "tandem_engine",
        "status": worker.state,
        "max_total_num_tokens": settings.max_total_tokens,
        "internal_states": states,
    }


def model_info(worker: Host) -> dict[str, object]:
    """What `/model_info` shows."""
    return {
        "model_path": worker.settings.model_path,
        "tokenizer_path": worker.settings.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def models(worker: Host) -> dict[str, object]:
    """What `/v1/models` shows."""
    name = worker.settings.served_model_name
    card = {
        "id": name,
        "object": "model",
        "created": int(worker.started_s),
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": worker.context_length,
    }
    return {"object": "list", "data": [card]}

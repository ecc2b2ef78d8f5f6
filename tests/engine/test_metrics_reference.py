"""`/metrics` against SGLang's names, and the exposition against the reference parser."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tandem_engine.exposition import Counter, Gauge, Histogram
from tandem_engine.metrics import Metrics

# Names and types of 0.5.23 (protocol reference, section 4) that this engine fills.
COUNTERS = {
    "num_bootstrap_failed_reqs", "num_transfer_failed_reqs", "num_retracted_requests",
    "realtime_tokens", "forward_execution_seconds", "scheduler_idle_seconds",
    "scheduler_process_cpu_seconds", "cuda_graph_passes", "prompt_tokens", "generation_tokens",
    "num_requests", "cached_tokens", "num_aborted_requests",
}  # fmt: skip
GAUGES = {
    "num_running_reqs", "num_queue_reqs", "num_retracted_reqs", "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs", "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs", "gen_throughput", "cache_hit_rate", "token_usage",
    "full_token_usage", "num_used_tokens", "kv_used_tokens", "kv_available_tokens",
    "kv_evictable_tokens", "utilization", "max_total_num_tokens", "page_size",
}  # fmt: skip
HISTOGRAMS = {
    "queue_time_seconds", "per_stage_req_latency_seconds", "kv_transfer_latency_ms",
    "kv_transfer_total_mb", "kv_transfer_speed_gb_s", "kv_transfer_bootstrap_ms",
    "time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds",
}  # fmt: skip

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_names_and_types_are_sglangs():
    """Every family has its SGLang name and type, and there are no others."""
    page = Metrics("tiny", "decode").exposed()
    families = list(text_string_to_metric_families(page))
    ours = {f.name.removeprefix("sglang:"): f.type for f in families if ":" in f.name}

    assert ours == (
        dict.fromkeys(COUNTERS, "counter")
        | dict.fromkeys(GAUGES, "gauge")
        | dict.fromkeys(HISTOGRAMS, "histogram")
    )
    assert {f.name for f in families if ":" not in f.name} == {
        "process_start_time_seconds",
        "process_cpu_seconds",
    }


@given(text, text, st.floats(min_value=0, max_value=1e12))
def test_any_label_survives_the_exposition(name, label, amount):
    """Labels with quotes, backslashes and newlines come back as they were."""
    counter = Counter("c_total", "text", {"model_name": name})
    counter.add(amount, mode=label)
    (family,) = text_string_to_metric_families(counter.exposed())
    sample = family.samples[-1]

    assert sample.labels == {"model_name": name, "mode": label}
    assert sample.value == amount


@given(st.lists(st.floats(min_value=-10, max_value=10), max_size=30))
def test_a_histogram_counts_cumulatively(values):
    """Bucket `le` holds everything at or below it; sum and count add up."""
    histogram = Histogram("h", "text", {}, (-1, 0, 2.5))
    for value in values:
        histogram.observe(value)
    (family,) = text_string_to_metric_families(histogram.exposed())
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "h_bucket"}
    rest = {s.name: s.value for s in family.samples if s.name != "h_bucket"}

    assert buckets == {
        str(float(bound)) if bound != float("inf") else "+Inf": sum(v <= bound for v in values)
        for bound in (-1, 0, 2.5, float("inf"))
    }
    assert rest["h_count"] == len(values)
    assert abs(rest["h_sum"] - sum(values)) < 1e-6


def test_a_gauge_shows_the_last_value():
    """Nothing moves a gauge but a write."""
    gauge = Gauge("g", "text", {})
    gauge.value = 2.5

    assert gauge.exposed().splitlines()[-1] == "g 2.5"

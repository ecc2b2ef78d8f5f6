"""`/metrics` against SGLang's names, and the exposition against the reference parser."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from engine.pairs import pair, until
from tandem_engine.exposition import Counter, Gauge, Histogram

# What a page of each SGLang shows once requests went through, by (type, extra labels). Read in
# `srt/observability/metrics_collector.py` of 0.5.23 and `srt/metrics/collector.py` of 0.5.6.
GAUGES = {
    "num_running_reqs", "num_queue_reqs", "num_grammar_queue_reqs", "num_retracted_reqs",
    "num_paused_reqs", "num_prefill_inflight_queue_reqs", "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs", "gen_throughput", "cache_hit_rate", "token_usage",
    "swa_token_usage", "mamba_usage", "num_used_tokens", "pending_prealloc_token_usage",
    "spec_accept_length", "spec_accept_rate", "utilization", "new_token_ratio", "is_cuda_graph",
    "max_total_num_tokens",
}  # fmt: skip
GAUGES_OF = {
    "0.5.23": GAUGES | {
        "num_prefill_bootstrap_queue_reqs", "full_token_usage", "kv_available_tokens",
        "kv_evictable_tokens", "kv_used_tokens", "swa_available_tokens", "swa_evictable_tokens",
        "swa_used_tokens", "mamba_available_tokens", "mamba_evictable_tokens",
        "mamba_used_tokens", "decode_sum_seq_lens", "prealloc_full_token_usage",
        "prealloc_swa_token_usage", "num_decode_host_receive_queue_reqs",
        "num_decode_deferred_kv_release_reqs", "fwd_occupancy", "page_size",
    },
    "0.5.6": GAUGES | {
        "num_prefill_prealloc_queue_reqs", "num_running_reqs_offline_batch",
        "kv_transfer_speed_gb_s", "kv_transfer_latency_ms", "kv_transfer_bootstrap_ms",
        "kv_transfer_alloc_ms",
    },
}  # fmt: skip
STAGE, MODE, STREAMING, NONE = {"stage"}, {"mode"}, {"is_streaming"}, set()
SCHEDULER_OF = {
    "0.5.23": {
        "num_bootstrap_failed_reqs": ("counter", NONE),
        "num_transfer_failed_reqs": ("counter", NONE),
        "num_retracted_requests": ("counter", NONE),
        "realtime_tokens": ("counter", MODE),
        "forward_execution_seconds": ("counter", {"category"}),
        "scheduler_idle_seconds": ("counter", NONE),
        "scheduler_process_cpu_seconds": ("counter", NONE),
        "cuda_graph_passes": ("counter", MODE),
        "per_stage_req_latency_seconds": ("histogram", STAGE),
    },
    "0.5.6": {
        "num_bootstrap_failed_reqs": ("counter", NONE),
        "num_transfer_failed_reqs": ("counter", NONE),
        "per_stage_req_latency_seconds": ("histogram", STAGE),
    },
}
PREFILL_OF = {
    "0.5.23": {
        "queue_time_seconds": ("histogram", NONE),
        "kv_transfer_latency_ms": ("histogram", NONE),
        "kv_transfer_total_mb": ("histogram", NONE),
        "kv_transfer_speed_gb_s": ("histogram", NONE),
        "kv_transfer_bootstrap_ms": ("histogram", NONE),
        "kv_transfer_alloc_ms": ("histogram", NONE),
    },
    "0.5.6": {"queue_time_seconds": ("histogram", NONE)},
}
TOKENIZER_OF = {
    "0.5.23": {
        "prompt_tokens": ("counter", STREAMING),
        "generation_tokens": ("counter", STREAMING),
        "num_requests": ("counter", STREAMING),
        "num_aborted_requests": ("counter", NONE),
        "cached_tokens": ("counter", {"cache_source"}),
        "time_to_first_token_seconds": ("histogram", STREAMING),
        "e2e_request_latency_seconds": ("histogram", STREAMING),
    },
    "0.5.6": {
        "prompt_tokens": ("counter", NONE),
        "generation_tokens": ("counter", NONE),
        "num_requests": ("counter", NONE),
        "num_aborted_requests": ("counter", NONE),
        "cached_tokens": ("counter", NONE),
        "time_to_first_token_seconds": ("histogram", NONE),
        "e2e_request_latency_seconds": ("histogram", NONE),
    },
}


def fixed_labels(era, role):
    """Labels of every metric of the scheduler, and of the tokenizer."""
    if era == "0.5.6":
        tokenizer = {"model_name": "toy"}
        return tokenizer | {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}, tokenizer
    tokenizer = {"model_name": "toy", "engine_type": role}
    return tokenizer | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}, tokenizer


ERAS = ("0.5.23", "0.5.6")

BEGUN = (
    r"Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, token usage: 0\.\d\d, "
    r"#running-req: \d, #queue-req: 0, "
)
PREFILL_LINE = {
    "0.5.23": BEGUN
    + r"#pending-token: \d+, #bootstrap-req: \d, #inflight-req: \d, #optimistic-req: 0, "
    + r"cuda graph: False, input throughput \(token/s\): \d+\.\d\d",
    "0.5.6": BEGUN
    + r"#prealloc-req: 0, #inflight-req: \d, input throughput \(token/s\): \d+\.\d\d, ",
}
STEPPED = (
    r"Decode batch, #running-req: \d, #token: \d+, token usage: 0\.\d\d, "
    r"pre-allocated usage: 0\.\d\d, #prealloc-req: 0, #transfer-req: 0, #retracted-req: 0, "
    r"cuda graph: False, gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0"
)
DECODE_LINE = {"0.5.23": STEPPED, "0.5.6": STEPPED + ", "}

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def expected(era, role):
    """Name -> (type, fixed labels, names of further labels) of one worker's page."""
    scheduler, tokenizer = fixed_labels(era, role)
    table = dict.fromkeys(GAUGES_OF[era], ("gauge", scheduler, NONE))
    rows = SCHEDULER_OF[era] | (PREFILL_OF[era] if role == "prefill" else {})
    table |= {name: (kind, scheduler, extra) for name, (kind, extra) in rows.items()}
    rows = dict(TOKENIZER_OF[era])
    if role == "decode":
        rows["inter_token_latency_seconds"] = ("histogram", NONE)
    return table | {name: (kind, tokenizer, extra) for name, (kind, extra) in rows.items()}


def shown(page):
    """The same of a real page."""
    table = {}
    for family in text_string_to_metric_families(page):
        name = family.name
        assert name.startswith("sglang:")
        labels = [set(sample.labels) - {"le"} for sample in family.samples]
        table[name.removeprefix("sglang:")] = (family.type, labels[0], family.samples[0].labels)
        assert all(one == labels[0] for one in labels)
    return table


async def read(two, worker):
    """One worker's page, over HTTP."""
    return (await two.get(worker, "/metrics")).text


@pytest.mark.parametrize("era", ERAS)
async def test_a_page_is_that_sglangs_page(era):
    """Every family has its SGLang name, type and labels, and there are no others."""
    sides = {"metrics_era": era, "decode_log_steps": 2}
    async with pair(prefill=sides, decode=sides) as two:
        for _ in range(2):
            await two.generate("a prompt that is long enough to be used again", tokens=6)
        pages = {worker: await read(two, worker) for worker in (two.prefill, two.decode)}
        roles = {worker: worker.settings.disaggregation_mode for worker in pages}

    for worker, page in pages.items():
        wanted = expected(era, roles[worker])
        found = shown(page)
        assert wanted.keys() == found.keys()
        for name, (kind, fixed, extra) in wanted.items():
            assert (kind, {*fixed, *extra}) == found[name][:2], name
            assert fixed.items() <= found[name][2].items(), name


async def test_whether_a_request_streamed_is_told_from_0_5_23_on():
    """The label says `true` or `false`, and tokens count when their request has finished."""
    async with pair() as two:
        await two.generate(tokens=3)
        await two.generate(tokens=5, stream=True)
        page = await read(two, two.decode)

    assert 'sglang:generation_tokens_total{model_name="toy",engine_type="decode",' in page
    counts = {
        sample.labels["is_streaming"]: sample.value
        for family in text_string_to_metric_families(page)
        if family.name == "sglang:generation_tokens"
        for sample in family.samples
    }
    assert counts == {"false": 3, "true": 5}


@pytest.mark.parametrize("era", ERAS)
async def test_in_a_total_stall_the_gauges_of_a_decode_freeze(era):
    """What hangs in the transfer queue is in the live load and never reaches the page."""
    sides = {"metrics_era": era}
    queue = "num_decode_transfer_queue_reqs"
    async with pair(prefill=sides, decode=sides) as two:
        await two.generate(tokens=2)
        two.blind_decode()
        hanging = asyncio.create_task(two.both("/generate", {"text": "hangs"}))
        arrivals = two.decode.core.phase.arrivals
        await until(lambda: arrivals.awaited, two.decode)
        before = await read(two, two.decode)
        for _ in range(3):
            await two.get(two.decode, "/health")
        after = await read(two, two.decode)
        loads = await two.get(two.decode, "/v1/loads?include=disagg")
        old = (await two.get(two.decode, "/get_load")).json
        hanging.cancel()

    frozen = [
        [line for line in page.splitlines() if queue in line and line[0] != "#"]
        for page in (before, after)
    ]
    assert frozen[0] == frozen[1]
    assert frozen[1][0].endswith(" 0.0")
    assert old[0]["num_waiting_reqs"] == 1
    if era == "0.5.6":
        assert loads.status == 404
    else:
        assert loads.json["loads"][0]["disaggregation"]["decode_transfer_queue_reqs"] == 1


@pytest.mark.parametrize("era", ERAS)
async def test_batches_are_logged_in_that_sglangs_words(caplog, era):
    """One line per prefill batch, one per `--decode-log-interval` steps, fields in order."""
    sides = {"metrics_era": era, "decode_log_steps": 3}
    with caplog.at_level("INFO", "tandem_engine"):
        async with pair(prefill=sides, decode=sides) as two:
            await two.generate("a prompt", tokens=6)
            await two.idle()
    said = [record.getMessage() for record in caplog.records]
    batches = {
        name: [line for line in said if line.startswith(name)]
        for name in ("Prefill batch", "Decode batch")
    }

    assert len(batches["Prefill batch"]) == 1
    assert re.fullmatch(PREFILL_LINE[era], batches["Prefill batch"][0])
    assert batches["Decode batch"]
    assert all(re.fullmatch(DECODE_LINE[era], line) for line in batches["Decode batch"])


@pytest.mark.parametrize("era", ERAS)
async def test_the_version_is_that_of_the_era(era):
    """`/server_info` names the version and nothing that this SGLang would not say."""
    async with pair(prefill={"metrics_era": era}) as two:
        info = (await two.get(two.prefill, "/server_info")).json

    assert info["version"].startswith(f"{era}+tandem.")
    assert ("startup_time" in info) is (era == "0.5.23")
    assert "metrics_era" not in info


@given(text, text, st.floats(min_value=0, max_value=1e12))
def test_any_label_survives_the_exposition(name, label, amount):
    """Labels with quotes, backslashes and newlines come back as they were."""
    counter = Counter("c_total", "text", {"model_name": name})
    counter.add(amount, mode=label)
    (family,) = text_string_to_metric_families(counter.exposed())
    sample = family.samples[-1]

    assert sample.labels == {"model_name": name, "mode": label}
    assert sample.value == amount


@given(st.lists(st.floats(min_value=-10, max_value=10), min_size=1, max_size=30))
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

"""Pages and live loads that are cut, broken, slow or absent: a reason each, and no false nought."""

import pytest

from stub_engine import StubEngine, rows
from tandem import fetch
from tandem.engines.sglang import SglangEngine
from tandem.records import Role
from tandem.records import vocabulary as v

PAGE = """\
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 100
sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 20
sglang:num_requests_total{is_streaming="True"} 3
sglang:num_requests_total{is_streaming="False"} 4
sglang:kv_transfer_latency_ms_sum{tp_rank="0"} 2500
sglang:kv_transfer_latency_ms_count{tp_rank="0"} 7
sglang:num_transfer_failed_reqs_total{tp_rank="0"} 21
sglang:num_prefill_inflight_queue_reqs{tp_rank="0"} 17
sglang:num_queue_reqs{tp_rank="0"} 2
sglang:time_to_first_token_seconds_bucket{le="1.0"} 99
sglang:time_to_first_token_seconds_bucket{le="+Inf"} 100
"""

LOAD = {
    "num_running_reqs": 1,
    "num_waiting_reqs": 2,
    "token_usage": 0.25,
    "disaggregation": {
        "mode": "prefill",
        "prefill_bootstrap_queue_reqs": 3,
        "prefill_inflight_queue_reqs": 4,
        "decode_prealloc_queue_reqs": 5,
        "decode_transfer_queue_reqs": 6,
        "decode_retracted_queue_reqs": 0,
    },
}


class Now:
    """Unix seconds that stand still until told."""

    def __init__(self):
        self.at = 1000.0

    def __call__(self):
        return self.at


@pytest.fixture
async def session():
    async with fetch.session() as client:
        yield client


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def engine(session, now):
    return SglangEngine(session, now)


class TestPages:
    """Metrics pages."""

    async def test_a_page_beyond_the_bound_is_read_to_it(self, engine, monkeypatch):
        """What stands before the bound counts; what may stand beyond says so, and is no zero."""
        monkeypatch.setattr("tandem.engines.sglang.PAGE_BYTES_MAX", len(PAGE) + 100)
        beyond = 'sglang:num_aborted_requests_total{model_name="m"} 9\n'
        page = PAGE + "# HELP sglang:other Other.\n" * 100 + beyond
        async with StubEngine(Role.PREFILL, page=page, loads=[LOAD]) as prefill:
            seen = rows(await engine.observe(prefill.member, 2.0))

        assert seen[v.TRANSFERS_TOTAL, ""].value == 7
        assert f"longer than {len(PAGE) + 100} bytes" in seen[v.ABORTED_TOTAL, ""].missing

    async def test_a_page_that_ends_in_a_line_is_no_whole_page(self, engine):
        """A family that is cut short gives no sum, and what is not there may be beyond."""
        page = PAGE + 'sglang:num_aborted_requests_total{a="1"} 5\nsglang:num_aborted_requests'
        async with StubEngine(Role.PREFILL, page=page, loads=[LOAD]) as prefill:
            seen = rows(await engine.observe(prefill.member, 2.0))

        why = "the metrics page ends in the middle of a line"
        assert seen[v.ABORTED_TOTAL, ""].missing == why
        assert seen[v.BOOTSTRAP_FAILED_TOTAL, ""].missing == why
        assert seen[v.TRANSFERS_TOTAL, ""].value == 7

    @pytest.mark.parametrize(
        ("answers", "why"),
        [
            ({}, "neither /v1/loads nor /get_load is there"),
            ({"status": {"/v1/loads": 500}}, "/v1/loads: answered HTTP 500"),
            ({"status": {"/v1/loads": 404, "/get_load": 503}}, "/get_load: answered HTTP 503"),
            ({"hanging": {"/v1/loads"}}, "/v1/loads: no answer within 0.3 s"),
            ({"loads": {"no": "list"}}, "/v1/loads: Expected `array`"),
        ],
    )
    async def test_why_there_are_no_live_loads_is_told(self, engine, answers, why):
        """Absent, in error, slow, of another shape: a reason each, though gauges stand in."""
        async with StubEngine(Role.PREFILL, page=PAGE, **answers) as prefill:
            seen = rows(await engine.observe(prefill.member, 0.3))

        assert why in seen[v.LIVE_LOADS, ""].missing
        inflight = seen[v.INFLIGHT_QUEUE_REQS, ""]
        assert (inflight.value, inflight.source) == (17, "metrics")

    async def test_a_slow_answer_is_told_with_its_endpoint(self, engine, monkeypatch):
        """What was answered counts, and that it took long is a row of its own."""
        monkeypatch.setattr("tandem.engines.sglang.SLOW_S", 0.2)
        slow = {"/metrics": 0.3}
        async with StubEngine(Role.PREFILL, page=PAGE, loads=[LOAD], slow_s=slow) as prefill:
            seen = rows(await engine.observe(prefill.member, 5.0))

        assert seen[v.ANSWER_S, "/metrics"].value >= 0.3
        assert seen[v.TRANSFERS_TOTAL, ""].value == 7

    async def test_a_rank_that_keeps_silent_makes_no_smaller_sum(self, engine):
        """A queue that only some ranks gave is missing with the reason, not their sum."""
        mute = {"num_running_reqs": 1, "num_waiting_reqs": 1}
        async with StubEngine(Role.PREFILL, page="", loads=[LOAD, mute]) as prefill:
            seen = rows(await engine.observe(prefill.member, 2.0))

        assert seen[v.WAITING_REQS, ""].value == 3
        assert "only 1 of 2 ranks gave it" in seen[v.INFLIGHT_QUEUE_REQS, ""].missing
        assert seen[v.LIVE_LOADS, ""].value == "/v1/loads"

    async def test_a_look_that_failed_changes_no_trait(self, engine, now):
        """What freezes is known from the last answer; one slow answer is no other engine."""
        async with StubEngine(Role.DECODE, page=PAGE, loads=[LOAD]) as decode:
            await engine.observe(decode.member, 2.0)
            decode.status["/v1/loads"] = 500
            now.at += 1
            second = await engine.observe(decode.member, 2.0)

        assert second.traits == ()

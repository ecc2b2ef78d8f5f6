"""The SGLang adapter against stub members: what it observes, and how it speaks to a pair."""

import asyncio

import msgspec
import pytest

import stub_engine
from stub_engine import StubEngine, rows, stub_pair
from tandem import fetch
from tandem.engines.sglang import SglangEngine
from tandem.engines.sglang_pair import Ended, completion
from tandem.engines.sglang_traits import Told, probe_safety
from tandem.fetch import Fetched
from tandem.ports import Engine
from tandem.records import Member, Role
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


class TestObserve:
    """Metrics, loads and server information in our words."""

    async def test_it_is_an_engine(self, engine):
        """The adapter fits the port."""
        assert isinstance(engine, Engine)

    async def test_a_prefill_says_its_counters_and_live_queues(self, engine):
        """Counters come from the page, queues from the live loads, each under its source."""
        async with StubEngine(Role.PREFILL, page=PAGE, loads=[LOAD]) as prefill:
            seen = rows(await engine.observe(prefill.member, 2.0))

        values = {name: one.value for (name, label), one in seen.items() if not label}
        assert {
            v.PROGRESS_TOKENS_TOTAL: 120,
            v.REQUESTS_TOTAL: 7,
            v.TRANSFERS_TOTAL: 7,
            v.TRANSFER_SECONDS_TOTAL: 2.5,
            v.TRANSFER_FAILED_TOTAL: 21,
            v.INFLIGHT_QUEUE_REQS: 4,
            v.BOOTSTRAP_QUEUE_REQS: 3,
            v.WAITING_REQS: 2,
            v.TOKEN_USAGE: 0.25,
        }.items() <= values.items()
        assert v.TRANSFER_QUEUE_REQS not in values
        assert seen[v.INFLIGHT_QUEUE_REQS, ""].source == "loads"
        assert seen[v.TRANSFERS_TOTAL, ""].source == "metrics"
        assert seen[v.INFLIGHT_QUEUE_REQS, ""].at == 1000.0

    async def test_the_running_batch_of_a_prefill_is_not_called_live(self, engine):
        """There it is the last batch and stays when nothing runs, so it comes from the page."""
        page = 'sglang:num_running_reqs{tp_rank="0"} 1\n'
        async with StubEngine(Role.PREFILL, page=page, loads=[LOAD]) as prefill:
            harvest = await engine.observe(prefill.member, 2.0)

        assert rows(harvest)[v.RUNNING_REQS, ""].source == "metrics"
        freezes = [one for one in harvest.traits if one.name == v.T_FREEZES_IN_STALL]
        assert [one.label for one in freezes if one.value] == [v.RUNNING_REQS]

    async def test_several_data_parallel_ranks_add_up(self, engine):
        """Queues of all ranks are summed; usage is that of the fullest."""
        ranks = [LOAD, LOAD | {"token_usage": 0.75}]
        async with StubEngine(Role.DECODE, loads=ranks) as decode:
            seen = rows(await engine.observe(decode.member, 2.0))

        assert seen[v.TRANSFER_QUEUE_REQS, ""].value == 12
        assert seen[v.TOKEN_USAGE, ""].value == 0.75

    async def test_an_absent_counter_is_no_zero(self, engine):
        """A counter that is not on the page says so instead of claiming nought."""
        async with StubEngine(Role.DECODE, loads=[LOAD]) as decode:
            seen = rows(await engine.observe(decode.member, 2.0))

        failed = seen[v.TRANSFER_FAILED_TOTAL, ""]
        assert failed.value is None
        assert "never counted" in failed.missing

    async def test_without_live_loads_the_page_serves_and_is_said_to_freeze(self, engine):
        """Where `/v1/loads` is missing, gauges stand in and a trait says that they freeze."""
        async with StubEngine(Role.PREFILL, page=PAGE) as prefill:
            harvest = await engine.observe(prefill.member, 2.0)

        inflight = rows(harvest)[v.INFLIGHT_QUEUE_REQS, ""]
        assert (inflight.value, inflight.source) == (17, "metrics")
        freezes = {
            trait.label: trait.value
            for trait in harvest.traits
            if trait.name == v.T_FREEZES_IN_STALL
        }
        assert freezes[v.INFLIGHT_QUEUE_REQS] is True

    async def test_a_dead_member_is_a_reason_for_each_thing_not_seen(self, engine):
        """Nothing is raised: every name says that the connection was refused."""
        dead = Member(name="p", role=Role.PREFILL, url="http://127.0.0.1:9", engine="sglang")
        harvest = await engine.observe(dead, 2.0)

        seen = rows(harvest)
        assert {v.INFLIGHT_QUEUE_REQS, v.PROGRESS_TOKENS_TOTAL, v.SERVER_ARG} <= {
            name for name, _ in seen
        }
        assert all("refused" in one.missing for one in seen.values())

    async def test_a_silent_member_is_a_timeout(self, engine):
        """What does not answer in time is evidence of that, and the rest is still seen."""
        async with StubEngine(Role.PREFILL, page=PAGE, loads=[LOAD], hanging={"/metrics"}) as stub:
            seen = rows(await engine.observe(stub.member, 0.2))

        assert "no answer within 0.2 s" in seen[v.PROGRESS_TOKENS_TOTAL, ""].missing
        assert seen[v.INFLIGHT_QUEUE_REQS, ""].value == 4

    async def test_a_reply_of_another_shape_is_a_reason(self, engine):
        """Loads that make no sense are missing, with what is wrong with them."""
        async with StubEngine(Role.PREFILL, page="", loads={"no": "list"}) as prefill:
            seen = rows(await engine.observe(prefill.member, 2.0))

        assert "Expected `array`" in seen[v.INFLIGHT_QUEUE_REQS, ""].missing

    async def test_server_arguments_pass_an_allowlist(self, engine):
        """Known arguments are kept as text; a key is not."""
        info = {"api_key": "s3cret", "page_size": 64, "disable_overlap_schedule": True}
        async with StubEngine(Role.DECODE, loads=[LOAD], info=info) as decode:
            seen = rows(await engine.observe(decode.member, 2.0))

        assert seen[v.SERVER_ARG, "page_size"].value == "64"
        assert seen[v.SERVER_ARG, "disable_overlap_schedule"].value == "true"
        assert (v.SERVER_ARG, "api_key") not in seen

    @pytest.mark.parametrize(("told", "rows_of"), [(1, 0), (8, 1)])
    async def test_ranks_that_the_configuration_does_not_know_are_told(self, engine, told, rows_of):
        """A server with other data-parallel ranks than stated has paths that nobody tells apart."""
        async with StubEngine(Role.DECODE, loads=[LOAD], info={"dp_size": told}) as decode:
            harvest = await engine.observe(decode.member, 2.0)
        said = [one.value for one in harvest.observations if one.name == v.MISSTATED]

        assert len(said) == rows_of
        assert all("has 8 data-parallel ranks" in one for one in said)

    async def test_server_information_is_asked_seldom(self, engine, now):
        """It is asked at first, not each second, again after a while, and after a failed look."""
        async with StubEngine(Role.DECODE, page=PAGE, loads=[LOAD]) as decode:
            await engine.observe(decode.member, 2.0)
            now.at += 1
            await engine.observe(decode.member, 2.0)
            first = decode.asked.count("/server_info")
            now.at += 60
            await engine.observe(decode.member, 2.0)

        assert (first, decode.asked.count("/server_info")) == (1, 2)


class TestTraits:
    """What the adapter knows of a member."""

    async def test_the_flags_of_the_incident_touch_what_they_touch(self, engine):
        """The day's changes are known by component, the hunch's flag by what it switches off."""
        async with StubEngine(Role.DECODE, loads=[LOAD]) as decode:
            harvest = await engine.observe(decode.member, 2.0)

        touches = {one.label: one.value for one in harvest.traits if one.name == v.T_TOUCHES}
        assert {
            "SGLANG_SM120_MMA_TARGET_CTAS": "compute",
            "--cuda-graph-max-bs": "compute",
            "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "compute",
            "--disable-overlap-schedule": "scheduler",
            "--decode-log-interval": "logging",
            "--num-reserved-decode-tokens": "admission",
            "--max-running-requests": "admission",
            "--disaggregation-transfer-backend": "kv-transfer",
        }.items() <= touches.items()
        off = {one.label: one.value for one in harvest.traits if one.name == v.T_SWITCHES_OFF}
        assert off == {"--disable-overlap-schedule": "collective-desync"}

    async def test_traits_are_told_once_until_they_change(self, engine, now):
        """The second look tells none, a new version tells them all again."""
        async with StubEngine(Role.DECODE, loads=[LOAD], page=PAGE) as decode:
            first = await engine.observe(decode.member, 2.0)
            now.at += 1
            second = await engine.observe(decode.member, 2.0)
            decode.info = {"version": "0.5.15", "disaggregation_transfer_backend": "nixl"}
            now.at += 60
            third = await engine.observe(decode.member, 2.0)

        safe = [one.value for one in third.traits if one.name == v.T_ACTIVE_PROBE_SAFE]
        assert (bool(first.traits), bool(second.traits), safe) == (True, False, [False])

    @pytest.mark.parametrize(
        ("version", "backend", "safe"),
        [
            ("0.5.12.post1", "nixl", True),
            ("0.5.13", "nixl", False),
            ("0.5.13.post1", "nixl", False),
            ("0.5.15.post1", "nixl", False),
            ("0.5.16", "nixl", True),
            ("0.5.15", "mooncake", True),
            ("main-abc", "nixl", None),
            (None, None, None),
        ],
    )
    def test_probes_are_unsafe_where_an_abort_kills(self, version, backend, safe):
        """NIXL from 0.5.13 to 0.5.15.post1 is unsafe; what is unknown is not called safe."""
        assert safe is probe_safety(Told(version, backend))[0]


class TestHealth:
    """The health endpoint and the rendezvous."""

    async def test_a_healthy_prefill(self, engine):
        """200 with its latency, and a rendezvous that answers."""
        async with StubEngine(Role.PREFILL) as prefill:
            seen = rows(await engine.health(prefill.member, 2.0))
            ready = await engine.ready(prefill.member, 2.0)

        assert (
            seen[v.HEALTH_STATUS, ""].value,
            seen[v.BOOTSTRAP_READY, ""].value,
            ready,
        ) == (200, True, True)
        assert (v.HEALTH_LATENCY_S, "") in seen

    async def test_an_unhealthy_decode_is_a_status_not_a_reason(self, engine):
        """503 is an answer; a decode has no rendezvous to speak of."""
        async with StubEngine(Role.DECODE, status={"/health": 503}) as decode:
            seen = rows(await engine.health(decode.member, 2.0))
            ready = await engine.ready(decode.member, 2.0)

        assert (seen[v.HEALTH_STATUS, ""].value, ready) == (503, False)
        assert (v.BOOTSTRAP_READY, "") not in seen

    async def test_a_rendezvous_without_all_ranks_is_not_ready(self, engine):
        """503 on the topology query means that ranks are missing."""
        async with StubEngine(Role.PREFILL, status={"/route": 503}) as prefill:
            seen = rows(await engine.health(prefill.member, 2.0))
            ready = await engine.bootstrap_ready(prefill.member, 2.0)

        assert (seen[v.BOOTSTRAP_READY, ""].value, ready) == (False, False)


class TestCompleteDirect:
    """One request through a pair without a router."""

    async def test_both_sides_get_the_same_body_and_room(self, engine):
        """Prefill and decode are asked at once: one fresh room, the prefill's rendezvous."""
        async with stub_pair(transfers=3) as (prefill, decode):
            ended = await engine.complete_direct(
                prefill.member, decode.member, prompt="a b", output_tokens=2, timeout_s=5.0
            )
            again = await engine.complete_direct(
                prefill.member, decode.member, prompt=[1, 2, 3], output_tokens=1, timeout_s=5.0
            )

        sent = prefill.received["/generate"]
        assert decode.received["/generate"] == sent
        assert ("127.0.0.1", prefill.member.bootstrap_port) == (
            sent[0]["bootstrap_host"],
            sent[0]["bootstrap_port"],
        )
        assert sent[0]["bootstrap_room"] != sent[1]["bootstrap_room"]
        assert (sent[0]["text"], sent[1]["input_ids"]) == ("a b", [1, 2, 3])
        assert (
            ended.status,
            ended.token_ids,
            ended.kv_moved,
            ended.prompt_tokens,
        ) == ("completed", (1, 1), True, 2)
        assert again.status == "completed"

    async def test_data_parallel_ranks_are_named_to_both_sides(self, engine):
        """The room falls on the prefill's rank, each side hears its own, and the decode both."""
        async with stub_pair() as (prefill, decode):
            wide = msgspec.structs.replace(prefill.member, dp_size=4)
            for _ in range(8):
                await engine.complete_direct(
                    wide, decode.member, prompt="a", output_tokens=1, timeout_s=5.0, ranks=(3, 1)
                )

        sent, taken = prefill.received["/generate"], decode.received["/generate"]
        rooms = [body["bootstrap_room"] for body in sent]
        assert {room % 4 for room in rooms} == {3}
        assert len({*rooms}) == 8
        assert all(0 < room < 2**63 for room in rooms)
        assert (sent[0]["routed_dp_rank"], "disagg_prefill_dp_rank" in sent[0]) == (3, False)
        assert (taken[0]["routed_dp_rank"], taken[0]["disagg_prefill_dp_rank"]) == (1, 3)

    async def test_a_counter_that_stands_still_shows_no_kv(self, engine):
        """Two good replies prove nothing while the transfer counter does not move."""
        async with stub_pair(transfers=3, kv_moves=False) as (prefill, decode):
            ended = await engine.complete_direct(
                prefill.member, decode.member, prompt="a", output_tokens=1, timeout_s=5.0
            )

        assert (ended.status, ended.kv_moved) == ("completed", False)

    async def test_without_a_counter_nothing_is_claimed(self, engine):
        """When the metrics cannot be read, whether KV moved is unknown."""
        async with stub_pair(status={"/metrics": 404}) as (prefill, decode):
            ended = await engine.complete_direct(
                prefill.member, decode.member, prompt="a", output_tokens=1, timeout_s=5.0
            )

        assert (ended.status, ended.kv_moved) == ("completed", None)

    async def test_on_timeout_both_sides_are_hung_up_on(self, engine):
        """A request that is given up leaves no connection open at either side."""
        async with stub_pair(hanging={"/generate"}) as (prefill, decode):
            ended = await engine.complete_direct(
                prefill.member, decode.member, prompt="a", output_tokens=1, timeout_s=0.3
            )
            await asyncio.wait_for(asyncio.gather(prefill.left.wait(), decode.left.wait()), 5.0)

        assert ended.status == "timed_out"
        assert (prefill.hung_up, decode.hung_up) == (1, 1)

    async def test_when_one_side_fails_the_other_is_not_waited_for(self, engine):
        """A prefill's 500 ends the request at once and is named; the decode is hung up on."""
        async with (
            StubEngine(Role.PREFILL, status={"/generate": 500}) as prefill,
            StubEngine(Role.DECODE, hanging={"/generate"}) as decode,
        ):
            ended = await engine.complete_direct(
                prefill.member, decode.member, prompt="a", output_tokens=1, timeout_s=60.0
            )
            await asyncio.wait_for(decode.left.wait(), 5.0)

        assert ended.status == "failed"
        assert ended.detail == "prefill: answered HTTP 500: stub says 500"

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (b'{"object":"error","error":{"message":"Too long.","code":400}}', "Too long"),
            (b'{"message":"Too long.","type":"BadRequestError"}', "Too long"),
            (b"<html>nginx</html>", "<html>nginx</html>"),
            (b'{"error":"plain"}', '{"error":"plain"}'),
            (b"", ""),
        ],
    )
    def test_a_refusal_is_told_in_the_engines_words(self, body, said):
        """A bad request is a definite no, and its message comes without its envelope."""
        answered = Fetched(400, body, 0.1)

        ended = completion(Ended(prefill=answered, decode=None, latency_s=0.1))

        assert ended.refused
        assert ended.detail == f"prefill: answered HTTP 400: {said}".removesuffix(": ")

    async def test_an_abort_inside_a_200_is_a_failure(self, engine):
        """SGLang tells an aborted request by its finish reason."""
        finish = {"type": "abort", "message": "KVTransferError", "status_code": 500}
        async with stub_pair(finish=finish) as (prefill, decode):
            ended = await engine.complete_direct(
                prefill.member, decode.member, prompt="a", output_tokens=1, timeout_s=5.0
            )

        assert ended.status == "failed"
        assert "KVTransferError" in ended.detail

    async def test_a_cancelled_caller_leaves_nothing_open(self, engine):
        """Cancelling the request hangs up on both sides."""
        async with stub_pair(hanging={"/generate"}) as (prefill, decode):
            task = asyncio.create_task(
                engine.complete_direct(
                    prefill.member, decode.member, prompt="a", output_tokens=1, timeout_s=60.0
                )
            )
            for side in (prefill, decode):
                await asyncio.wait_for(side.reached["/generate"].wait(), 5.0)
            task.cancel()
            await asyncio.wait_for(asyncio.gather(prefill.left.wait(), decode.left.wait()), 5.0)

        assert (prefill.hung_up, decode.hung_up) == (1, 1)


class TestScore:
    """Re-scoring by a clean prefill."""

    async def test_each_output_token_has_its_gap(self, engine):
        """The gap is the best log-probability minus the token's own, prompt tokens apart."""
        async with stub_pair(gap_of={42: 2.5}) as (prefill, decode):
            gaps = await engine.score(
                prefill.member, decode.member, prompt="a b", output_ids=[42, 43], timeout_s=5.0
            )

        asked = prefill.received["/generate"][-1]
        assert gaps == [2.5, 0.0]
        assert [*stub_engine.token_ids("a b"), 42, 43] == asked["input_ids"]
        assert (asked["logprob_start_len"], asked["top_logprobs_num"]) == (0, 1)

    async def test_without_log_probabilities_there_is_no_score(self, engine):
        """An engine that cannot tell scores nothing."""
        async with stub_pair(status={"/generate": 500}) as (prefill, decode):
            gaps = await engine.score(
                prefill.member, decode.member, prompt="a", output_ids=[1], timeout_s=5.0
            )

        assert gaps is None

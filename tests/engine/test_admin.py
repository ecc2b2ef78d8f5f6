"""The routes that look and the routes that steer: what a router and an operator rely on."""

import asyncio
import json
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.pairs import FAST, held, pair, settings, start, until
from tandem_engine.info import load_of

SLOW = replace(FAST, health_s=0.5)
CORE = {
    "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens",
    "num_used_tokens", "num_total_tokens", "max_total_num_tokens", "max_running_requests",
    "token_usage", "gen_throughput", "cache_hit_rate", "utilization",
}  # fmt: skip


class TestHealth:
    @pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
    async def test_a_ready_worker_is_healthy(self, path):
        """Health runs a real step on both sides and leaves no trace in a client's metrics."""
        async with pair() as two:
            for worker in (two.prefill, two.decode):
                assert (await two.get(worker, path)).status == 200
                await until(lambda worker=worker: not held(worker), worker)
                assert two.metric(worker, "num_requests_total") == 0
                assert two.metric(worker, "num_aborted_requests_total") == 0

    async def test_a_scheduler_that_gives_nothing_is_not(self):
        """503 when no output comes within the bound; the scheduler is busy with one handler."""
        async with pair(timeouts=SLOW) as two:
            gate = asyncio.Event()
            release = asyncio.run_coroutine_threadsafe
            loop = asyncio.get_running_loop()
            two.decode.core.scheduler.post(lambda: release(gate.wait(), loop).result(20))
            status = (await two.get(two.decode, "/health")).status
            gate.set()

            assert status == 503
            assert (await two.get(two.decode, "/health")).status == 200


class TestInfo:
    async def test_server_info_shows_sglangs_arguments_and_our_version(self):
        """Names are SGLang's, and nothing of the switches but the file's path."""
        async with pair(decode={"disable_overlap_schedule": True, "cuda_graph_max_bs": 96}) as two:
            info = (await two.get(two.decode, "/server_info")).json
            alias = (await two.get(two.decode, "/get_server_info")).json

        assert info["disaggregation_mode"] == "decode"
        assert info["disable_overlap_schedule"] is True
        assert info["cuda_graph_max_bs"] == 96
        assert info["decode_log_interval"] == 40
        assert (info["tp_size"], info["dp_size"], info["page_size"]) == (1, 1, 1)
        assert info["engine"] == "tandem_engine"
        assert info["version"].startswith("0.5.23+tandem.")
        assert info["internal_states"][0]["disaggregation_mode"] == "decode"
        assert alias.keys() == info.keys()

    async def test_models_and_model_info_name_the_model(self):
        """The router reads these when a worker joins."""
        async with pair(prefill={"served_model_name": "tiny"}) as two:
            card = (await two.get(two.prefill, "/v1/models")).json["data"][0]
            info = (await two.get(two.prefill, "/model_info")).json

        assert (card["id"], card["max_model_len"]) == ("tiny", 512)
        assert info["model_path"] == "toy"

    async def test_loads_have_sglangs_sections(self):
        """`include` picks sections; core is always there; an unknown one is a 400."""
        async with pair() as two:
            everything = (await two.get(two.prefill, "/v1/loads")).json["loads"][0]
            core = (await two.get(two.prefill, "/v1/loads?include=core")).json["loads"][0]
            some = (await two.get(two.prefill, "/v1/loads?include=core,disagg")).json["loads"][0]
            wrong = await two.get(two.prefill, "/v1/loads?include=gpu")
            text = await two.get(two.prefill, "/v1/loads?format=prometheus&include=disagg")

        assert core.keys() == CORE
        assert some.keys() == CORE | {"disaggregation"}
        assert everything.keys() == CORE | {"memory", "disaggregation", "queues"}
        assert wrong.status == 400
        names = {family.name for family in text_string_to_metric_families(text.text)}
        assert "sglang_disagg_prefill_inflight_queue_reqs" in names


class TestMetrics:
    async def test_the_page_parses_and_counts_a_request(self):
        """Names, types and labels are SGLang's; a served request moves the counters."""
        async with pair() as two:
            await two.generate(tokens=5)
            await two.idle()
            pages = {
                worker.settings.disaggregation_mode: {
                    family.name: family
                    for family in text_string_to_metric_families(
                        (await two.get(worker, "/metrics")).text
                    )
                }
                for worker in (two.prefill, two.decode)
            }

        for role, page in pages.items():
            failed = page["sglang:num_transfer_failed_reqs"]
            assert failed.type == "counter"
            assert failed.samples[0].labels == {
                "model_name": "toy",
                "engine_type": role,
                "tp_rank": "0",
                "pp_rank": "0",
                "moe_ep_rank": "0",
            }
            asked = page["sglang:num_requests"].samples[0]
            assert (asked.value, asked.labels["is_streaming"]) == (1.0, "false")
        tokens = {
            s.labels["mode"]: s.value for s in pages["decode"]["sglang:realtime_tokens"].samples
        }
        assert tokens == {"decode": 4.0}
        sent = pages["prefill"]["sglang:kv_transfer_latency_ms"].samples
        assert [s.value for s in sent if s.name.endswith("_count")] == [1.0]
        assert "sglang:kv_transfer_latency_ms" not in pages["decode"]

    async def test_decode_gauges_freeze_while_loads_stay_live(self):
        """In a stall the decode's gauges keep their last value and `/v1/loads` tells the truth."""
        async with pair() as two:
            two.blind_decode()
            body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}} | two.meeting()
            asks = [
                asyncio.create_task(two.post(worker, "/generate", body))
                for worker in (two.prefill, two.decode)
            ]
            await until(
                lambda: load_of(two.decode).disaggregation.decode_transfer_queue_reqs, two.decode
            )
            gauge = two.metric(two.decode, "num_decode_transfer_queue_reqs")
            live = (await two.load(two.decode))["decode_transfer_queue_reqs"]
            for ask in asks:
                ask.cancel()

        assert (gauge, live) == (0, 1)

    async def test_metrics_can_be_turned_off(self):
        """Without metrics the route does not exist."""
        async with pair(decode={"enable_metrics": False}) as two:
            assert (await two.get(two.decode, "/metrics")).status == 404


class TestSteering:
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    async def test_an_abort_ends_the_room_on_both_sides_at_once(self, side):
        """`/abort_request` on one side fails the request there, and the other side is told."""
        async with pair() as two:
            two.blind_decode()
            body = {"text": "hello", "rid": "mine"} | two.meeting()
            asks = [
                asyncio.create_task(two.post(worker, "/generate", body))
                for worker in (two.prefill, two.decode)
            ]
            await until(
                lambda: load_of(two.prefill).disaggregation.prefill_inflight_queue_reqs, two.prefill
            )
            await two.post(getattr(two, side), "/abort_request", {"rid": "mi"})
            answers = await asyncio.gather(*asks)
            await two.idle()

        assert [answer.status for answer in answers] == [500, 500]
        assert all("KVTransferError" in answer.json["error"]["message"] for answer in answers)

    async def test_a_client_that_leaves_frees_both_sides(self):
        """A closed connection on one side is an abort."""
        async with pair() as two:
            two.blind_decode()
            body = {"text": "hello", "stream": True} | two.meeting()
            asks = [
                asyncio.create_task(two.post(worker, "/generate", body))
                for worker in (two.prefill, two.decode)
            ]
            await until(
                lambda: load_of(two.prefill).disaggregation.prefill_inflight_queue_reqs, two.prefill
            )
            asks[1].cancel()
            prefill = await asks[0]
            await two.idle()

        assert prefill.events[-1]["meta_info"]["finish_reason"]["type"] == "abort"

    async def test_a_flush_drops_the_kept_prefixes(self):
        """The next turn of a conversation computes everything anew."""
        prompt = "a conversation that is long enough to be kept"
        async with pair() as two:
            cached = []
            for flush in (False, False, True):
                if flush:
                    await two.post(two.prefill, "/flush_cache", {})
                answer = await two.generate(prompt)
                cached.append(answer.json["meta_info"]["cached_tokens"])
                await two.idle()

        assert cached == [0, len(prompt) - 1, 0]

    async def test_a_kept_prefix_is_not_load(self):
        """What is kept for the next turn is evictable: an idle prefill uses nothing."""
        async with pair() as two:
            await two.generate("a conversation that is long enough to be kept")
            await two.idle()
            load = (await two.get(two.prefill, "/v1/loads")).json["loads"][0]
            gauges = two.prefill.core.role.gauges()

        assert (load["num_used_tokens"], load["token_usage"]) == (0, 0.0)
        assert gauges.kv_evictable_tokens > 0
        assert (
            gauges.kv_evictable_tokens + gauges.kv_available_tokens == gauges.max_total_num_tokens
        )

    async def test_a_drain_finishes_what_moves_and_refuses_the_rest(self):
        """During a clean stop running requests end well and new ones get a 503."""
        async with pair() as two:
            two.decode.model._step_cost_s = 0.005
            running = asyncio.create_task(two.generate(tokens=20))
            await until(lambda: load_of(two.decode).num_running_reqs, two.decode)
            stopping = asyncio.create_task(two.decode.stop())
            await two.decode.turn()
            late = await two.post(two.decode, "/generate", {"text": "x"} | two.meeting())
            answer = await running
            await stopping

        assert len(answer.json["output_ids"]) == 20
        assert late.status == 503


class TestFaults:
    async def test_the_route_exists_only_with_the_flag(self):
        """Without `--enable-faults` there is no switchboard."""
        async with pair() as two:
            assert (await two.get(two.prefill, "/faults")).status == 404

    async def test_a_flip_is_kept_in_the_file_and_shows_nowhere_else(self, tmp_path, caplog):
        """PUT changes and persists; `/server_info`, metrics and logs are as before."""
        path = tmp_path / "faults.json"
        async with pair(prefill={"enable_faults": str(path)}) as two:
            names = ("/server_info", "/v1/loads?include=core", "/model_info")
            before = [(await two.get(two.prefill, name)).json for name in names]
            families = two.prefill.exposed_metrics().count("# TYPE")
            url = two.prefill.url + "/faults"
            async with two.http.put(url, data=b'{"peer_memory": "stale"}') as reply:
                changed = await reply.json()
            for wrong in (b'{"peer_memory": "amnesia"}', b'{"nothing": 1}', b"[]", b"{"):
                async with two.http.put(url, data=wrong) as reply:
                    assert reply.status == 400
            after = [(await two.get(two.prefill, name)).json for name in names]
            await two.restart_prefill()
            again = (await two.get(two.prefill, "/faults")).json

        for one in (*before, *after):
            one.pop("timestamp", None)
        assert changed == again == {"peer_memory": "stale"} == json.loads(path.read_text())
        assert before == after
        assert families == two.prefill.exposed_metrics().count("# TYPE")
        assert not [
            r for r in caplog.records if "stale" in r.getMessage() or "fault" in r.getMessage()
        ]


class TestStart:
    async def test_a_worker_that_starts_answers_503(self, monkeypatch):
        """The API and the rendezvous answer before the model is there."""
        workers = []
        seen = {}

        def loading(*_args, **_sizes):
            raise AssertionError("the load is replaced")

        monkeypatch.setattr("tandem_engine.loading.load_model", loading)
        try:
            with pytest.raises(AssertionError):
                await start(settings("prefill"), FAST, workers)
            worker = workers[0]
            import aiohttp  # noqa: PLC0415 - only here

            async with aiohttp.ClientSession() as http:
                for path in ("/health", "/v1/loads", "/server_info", "/metrics"):
                    async with http.get(worker.url + path) as reply:
                        seen[path] = reply.status
                body = {"text": "x", "bootstrap_room": 1}
                async with http.post(worker.url + "/generate", json=body) as reply:
                    seen["/generate"] = reply.status
        finally:
            for worker in workers:
                await worker.kill(clean=True)

        assert seen == {
            "/health": 503,
            "/v1/loads": 503,
            "/server_info": 200,
            "/metrics": 200,
            "/generate": 503,
        }

"""Bad requests get a 4xx with a JSON error and cost the worker nothing."""

import asyncio
import io
import json
import threading

import msgspec
import pytest

from engine.pairs import DEADLINE_S, ROOMS, greedy, held, pair, until
from tandem_engine.generate import open_generate
from tandem_engine.wire import GenerateBody

MEET = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1 << 40}
GENERATE = {"text": "hello", **MEET}


def changed(**fields):
    """A good `/generate` body with some fields changed."""
    return {**GENERATE, **fields}


BAD = {
    "no room": {"text": "hello"},
    "room is text": changed(bootstrap_room="7"),
    "room is a list": changed(bootstrap_room=[1, 2]),
    "room is negative": changed(bootstrap_room=-1),
    "room is too large": changed(bootstrap_room=2**63),
    "port out of range": changed(bootstrap_port=70000),
    "host is an address with a path": changed(bootstrap_host="127.0.0.1/x"),
    "host is nothing": changed(bootstrap_host=""),
    "host is half an address": changed(bootstrap_host="[::1"),
    "host has a byte that none has": changed(bootstrap_host="a\0b"),
    "host has a label that is too long": changed(bootstrap_host="a" * 64),
    "host is no ASCII": changed(bootstrap_host="ü.example"),
    "room is a flag": changed(bootstrap_room=True),
    "text is a number": changed(text=7),
    "stream is a word": changed(stream="yes"),
    "rid is a list": changed(rid=["a"]),
    "tokens are no integers": {"input_ids": [1.5], **MEET},
    "tokens are text": {"input_ids": ["1"], **MEET},
    "seed is negative": changed(sampling_params={"seed": -1}),
    "stop is a number": changed(sampling_params={"stop": 7}),
    "sampling_params is a list": changed(sampling_params=[{}]),
    "top_logprobs_num is too large": changed(return_logprob=True, top_logprobs_num=10**9),
    "host has an empty label": changed(bootstrap_host="a..b"),
    "stop strings without end": changed(sampling_params={"stop": [f"{at}" for at in range(65)]}),
    "no text": {**MEET},
    "text and input_ids": changed(input_ids=[1]),
    "empty input_ids": {"input_ids": [], **MEET},
    "token outside the vocabulary": {"input_ids": [10**6], **MEET},
    "negative token": {"input_ids": [-1], **MEET},
    "text is a batch": changed(text=["a", "b"]),
    "prompt too long": changed(text="x" * 600),
    "prompt too long by far": changed(text="x" * 900_000),
    "too many tokens by far": {"input_ids": [1] * 300_000, **MEET},
    "temperature below 0": changed(sampling_params={"temperature": -1}),
    "temperature beyond a float": changed(sampling_params={"temperature": "nan"}),
    "top_p is 0": changed(sampling_params={"top_p": 0}),
    "top_k is -2": changed(sampling_params={"top_k": -2}),
    "top_k is 0": changed(sampling_params={"top_k": 0, "temperature": 1}),
    "no tokens wanted": changed(sampling_params={"max_new_tokens": 0}),
    "more than one answer": changed(sampling_params={"n": 2}),
    "logprobs from beyond the prompt": changed(return_logprob=True, logprob_start_len=99),
}
RAW = {
    "not JSON": b"{",
    "a list": b"[1]",
    "a float beyond all": b'{"text": "x", "sampling_params": {"temperature": 1e999}}',
    "half a surrogate pair": b'{"text": "\\ud800"}',
    "NaN": b'{"text": "x", "sampling_params": {"temperature": NaN}}',
    "invalid UTF-8": b'{"text": "\xff\xfe"}',
    "nothing": b"",
}


class TestGenerate:
    async def test_a_bad_body_is_a_400_that_says_why(self):
        """Every bad body is refused by both sides in JSON, and nothing is held."""
        async with pair() as two:
            for name, body in BAD.items():
                for worker in (two.prefill, two.decode):
                    answer = await two.post(worker, "/generate", body)

                    assert (name, 400) == (name, answer.status)
                    assert answer.json["error"]["message"], name
                    assert answer.json["error"]["code"] == 400
            for name, raw in RAW.items():
                async with two.http.post(two.prefill.url + "/generate", data=raw) as reply:
                    assert (name, 400) == (name, reply.status)
                    assert (await reply.json())["error"]["message"], name
            assert not held(two.prefill)
            assert not held(two.decode)
            assert (await two.generate()).status == 200

    async def test_megabytes_of_text_are_not_tokenized(self, monkeypatch):
        """What is too long by far is refused before any work is done on it."""
        async with pair() as two:
            monkeypatch.setattr(two.prefill.model, "tokenize", None)
            body = json.dumps(changed(text="x" * (7 << 20))).encode()
            url = two.prefill.url + "/generate"
            async with two.http.post(url, data=io.BytesIO(body)) as reply:
                status, said = reply.status, (await reply.json())["error"]["message"]

        assert status == 400
        assert "longer than the model's context length" in said

    @pytest.mark.parametrize("temperature", [1e-7, 1e-320, 5e-324])
    async def test_a_temperature_near_zero_is_greedy(self, temperature):
        """SGLang's rule; divided by so little the logits would be no numbers."""
        params = {"temperature": temperature, "max_new_tokens": 4, "ignore_eos": True}
        async with pair() as two:
            answer = await two.generate("hello", sampling_params=params)

        assert answer.json["output_ids"] == greedy("hello", 4)

    async def test_a_body_beyond_the_bound_is_a_413(self):
        """100 MB are refused before they are read, whether their length is announced or not."""
        chunk = b" " * (1 << 20)

        async def chunks():
            for _ in range(100):
                yield chunk

        async with pair() as two:
            url = two.prefill.url + "/generate"
            async with two.http.post(url, data=io.BytesIO(b" " * (9 << 20))) as reply:
                assert reply.status == 413
            try:
                async with two.http.post(url, data=chunks()) as reply:
                    assert reply.status == 413
            except OSError:
                pass  # the connection was closed on the sender, which is a refusal too
            assert (await two.generate()).status == 200

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/generate", {"text": "<|im_end|>" * 6_000}),
            ("/v1/completions", {"prompt": "<|im_end|>" * 6_000}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "<|im_end|>" * 6_000}]},
            ),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ],
    )
    async def test_a_text_too_long_is_refused_by_its_beginning(self, path, body, monkeypatch):
        """What cannot fit is never tokenized as a whole: it takes a real model minutes."""
        seen = [0]
        async with pair() as two:
            for worker in (two.prefill, two.decode):
                model = worker.model
                tokenize = model.tokenize

                def watched(text, *, special, tokenize=tokenize):
                    seen.append(len(text))
                    return tokenize(text, special=special)

                monkeypatch.setattr(model, "tokenize", watched)
                answer = await two.post(worker, path, body | MEET)

                assert answer.status == 400
                assert "512 tokens" in answer.json["error"]["message"]
            assert max(seen) <= 64 * model.context_length

    async def test_a_long_text_that_fits_is_served(self):
        """A text whose characters are many and whose tokens are few is no long prompt."""
        text = "<|im_start|>" * 400
        async with pair() as two:
            answer = await two.generate(text)

        assert answer.status == 200
        assert answer.json["meta_info"]["prompt_tokens"] == 400

    async def test_bad_requests_cost_no_threads(self):
        """No refusal starts a thread of its own, whatever it is that was refused."""
        async with pair() as two:
            for worker in (two.prefill, two.decode):
                for path in ("/generate", "/nothing", "/v1/chat/completions"):
                    await asyncio.gather(*(two.post(worker, path, {"text": 1}) for _ in range(8)))

        assert not [one.name for one in threading.enumerate() if "AnyIO" in one.name]

    async def test_two_requests_let_in_for_one_room_are_one_too_many(self):
        """The second is refused on its way in, and neither the first nor the worker feels it."""
        async with pair() as two:
            body = msgspec.convert(GENERATE | two.meeting(), GenerateBody)
            first, second = (open_generate(two.prefill, body) for _ in range(2))
            two.prefill.submit(first.request)
            two.prefill.submit(second.request)
            finish = (await second._queue.get()).finish
            two.prefill.done(second.request)
            await two.prefill.turn()

            assert (finish.kind, finish.status) == ("abort", 400)
            assert first.request.live
            two.prefill.done(first.request)
            await two.idle()
            assert (await two.generate()).status == 200

    async def test_only_the_very_host_of_fake_transfers_is_fake(self):
        """A name that begins like SGLang's fake host is a name like any other."""
        async with pair() as two:
            hosts = ("2.2.2.2", "2.2.2.2.example", "2.2.2.20")
            bodies = [msgspec.convert(changed(bootstrap_host=host), GenerateBody) for host in hosts]
            fake = [open_generate(two.decode, body).request.fake for body in bodies]

        assert fake == [True, False, False]

    async def test_a_live_room_is_not_given_twice(self):
        """A room that is in use is refused, and the first request is served all the same."""
        async with pair() as two:
            room = next(ROOMS)
            body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}} | two.meeting(room)
            first = asyncio.create_task(two.post(two.prefill, "/generate", body))
            while not two.prefill.rooms:
                await two.prefill.turn()
            second = await two.post(two.prefill, "/generate", body)
            decode = await two.post(two.decode, "/generate", body)

            assert second.status == 400
            assert (decode.status, (await first).status) == (200, 200)


class TestOther:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": [], **MEET}),
            ("/v1/chat/completions", {"messages": [{"content": "x"}], **MEET}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}], **MEET}),
            ("/v1/chat/completions", {"messages": "hello", **MEET}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": ["a", "b"], **MEET}),
            ("/v1/completions", {"prompt": "", **MEET}),
            ("/abort_request", {}),
        ],
    )
    async def test_the_other_routes_refuse_too(self, path, body):
        """A bad body on any route is a 400 in JSON."""
        async with pair() as two:
            answer = await two.post(two.prefill, path, body)

            assert answer.status == 400
            assert answer.json["error"]["message"]

    @pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/abort_request"])
    async def test_a_body_nested_without_end_is_refused(self, path):
        """Tens of thousands of brackets are a bad request, not an error of ours."""
        body = b'{"other":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
        async with (
            pair() as two,
            two.http.post(two.prefill.url + path, data=body) as reply,
        ):
            assert reply.status == 400
            assert (await reply.json())["error"]["message"]

    async def test_a_client_that_leaves_in_its_body_is_no_error(self, caplog):
        """Half a body and a closed connection leave no traceback, and nothing held."""
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        async with pair() as two:
            settings = two.prefill.settings
            for _ in range(3):
                _, writer = await asyncio.open_connection(settings.host, settings.port)
                writer.write(head)
                await writer.drain()
                await two.prefill.turn()
                writer.transport.abort()
            assert (await two.generate()).status == 200
            assert not held(two.prefill)

        assert "Traceback" not in caplog.text
        assert "Exception" not in caplog.text

    @pytest.mark.parametrize("path", ["/route", "/register_dp_rank", "/query_dp_ranks"])
    async def test_the_rendezvous_refuses_as_the_api_does(self, path, caplog):
        """A bad, nested, huge or half body at the bootstrap port is a JSON error or nothing."""
        method = "PUT" if path == "/route" else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{"
        nested = b'{"other":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
        async with pair() as two:
            port = two.prefill.settings.disaggregation_bootstrap_port
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode())
            await writer.drain()
            writer.transport.abort()
            for status, body in ((400, b"{"), (400, nested), (413, io.BytesIO(b" " * (2 << 20)))):
                url = f"http://127.0.0.1:{port}{path}"
                async with two.http.request(method, url, data=body) as reply:
                    assert reply.status == status
                    assert (await reply.json())["error"]["message"]
            async with two.http.get(f"http://127.0.0.1:{port}/nothing") as reply:
                assert (404, 404) == (reply.status, (await reply.json())["error"]["code"])
            assert (await two.generate()).status == 200

        assert "Traceback" not in caplog.text

    async def test_unknown_paths_and_methods_answer_in_json(self):
        """404 and 405 carry the same error object."""
        async with pair() as two:
            missing = await two.get(two.prefill, "/nothing")
            wrong = await two.get(two.prefill, "/generate")

        assert (404, 404) == (missing.status, missing.json["error"]["code"])
        assert (405, 405) == (wrong.status, wrong.json["error"]["code"])

    async def test_an_http2_preface_does_no_harm(self):
        """A gRPC probe on the same port is answered or closed, and the worker goes on."""
        async with pair() as two:
            settings = two.prefill.settings
            reader, writer = await asyncio.open_connection(settings.host, settings.port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(64), 5)
            writer.close()

            assert not answer or answer.startswith(b"HTTP/1.1 40")
            assert (await two.generate()).status == 200


class TestOneSide:
    @pytest.mark.parametrize("refusing", ["prefill", "decode"])
    async def test_the_other_half_of_a_refused_request_ends_at_once(self, refusing):
        """A side that is refused alone is told to the other, which does not wait for a timeout."""
        async with pair() as two:
            await two.generate()
            worker = getattr(two, refusing)
            other = two.decode if refusing == "prefill" else two.prefill
            for first in (worker, other):
                body = changed(bootstrap_room=0) | two.meeting()
                bad = {**body, "text": None, "input_ids": [1 << 20]}
                asked = {}
                for one in (first, other if first is worker else worker):
                    asked[one] = asyncio.create_task(
                        two.post(one, "/generate", bad if one is worker else body)
                    )
                    await asyncio.wait(asked.values(), timeout=0.05)
                async with asyncio.timeout(DEADLINE_S / 2):
                    refused, ended = await asked[worker], await asked[other]

                assert (refused.status, ended.status) == (400, 500)
            await two.idle()
            assert (await two.generate()).status == 200

    @pytest.mark.parametrize("aborting", ["prefill", "decode"])
    async def test_a_room_that_ends_before_it_has_a_slot_is_told(self, aborting):
        """An abort while the decode's half queues for a slot ends the other half at once."""
        async with pair(decode={"max_running_requests": 1}) as two:
            two.blind_decode()
            asked = []
            for rid in ("first", "second"):
                body = changed(rid=rid) | two.meeting()
                asked += [
                    asyncio.create_task(two.post(worker, "/generate", body))
                    for worker in (two.prefill, two.decode)
                ]
                phase = two.decode.core.role.phase
                await until(lambda: phase.arrivals.awaited, two.decode)  # noqa: B023 - in its turn
            await until(lambda: phase.prealloc, two.decode)
            await until(lambda: len(two.prefill.rooms) == 2, two.prefill)
            getattr(two, aborting).abort("second", everything=False)
            async with asyncio.timeout(DEADLINE_S / 2):
                prefill, decode = await asked[2], await asked[3]
            for one in asked[:2]:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

            assert (prefill.status, decode.status) == (500, 500)
            told = prefill if aborting == "decode" else decode
            assert {"prefill": "AbortReq", "decode": "decode-side abort"}[aborting] in told.text

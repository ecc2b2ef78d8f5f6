"""The real router, unmodified, in front of real workers: one pair, and two by two."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest

from engine.pairs import FAST, Answer, held, settings, start, until
from engine.processes import router

pytestmark = [pytest.mark.needs("router"), pytest.mark.timeout(60)]
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
PARAMS = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}


async def post(http: aiohttp.ClientSession, url: str, body: dict) -> Answer:
    """One request to the router."""
    async with http.post(url, json=body) as reply:
        return Answer(reply.status, await reply.text())


@pytest.mark.parametrize("width", [1, 2])
async def test_every_kind_of_request_goes_through(width):
    """Chat, completion and native requests, streamed or not, come back whole from every cell."""
    workers = []
    async with AsyncExitStack() as stack:
        prefills = [await start(settings("prefill"), FAST, workers) for _ in range(width)]
        decodes = [await start(settings("decode"), FAST, workers) for _ in range(width)]
        for worker in workers:
            stack.push_async_callback(worker.kill, clean=True)
        url = await stack.enter_async_context(
            router(
                [(p.url, p.settings.disaggregation_bootstrap_port) for p in prefills],
                [d.url for d in decodes],
            )
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        native = {"text": "hello", "sampling_params": PARAMS}
        plain, streamed = await asyncio.gather(
            asyncio.gather(*(post(http, url + "/generate", native) for _ in range(16))),
            asyncio.gather(
                *(post(http, url + "/generate", native | {"stream": True}) for _ in range(16))
            ),
        )
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        chat = await post(http, url + "/v1/chat/completions", CHAT | {"max_tokens": 3})
        talk = await post(http, url + "/v1/chat/completions", CHAT | {"max_tokens": 3} | usage)
        text = await post(
            http, url + "/v1/completions", {"model": "toy", "prompt": "x", "max_tokens": 3}
        )
        scored = await post(
            http, url + "/generate", native | {"return_logprob": True, "logprob_start_len": 0}
        )
        for worker in workers:
            await until(lambda worker=worker: not held(worker), worker)

    said = plain[0].json["output_ids"]
    assert [said] * 32 == [
        *(answer.json["output_ids"] for answer in plain),
        *(answer.events[-1]["output_ids"] for answer in streamed),
    ]
    assert chat.json["usage"]["completion_tokens"] == 3
    assert talk.events[-1]["usage"]["completion_tokens"] == 3
    assert chat.json["choices"][0]["message"]["content"] == "".join(
        choice["delta"].get("content", "") for event in talk.events for choice in event["choices"]
    )
    assert text.json["usage"]["completion_tokens"] == 3
    assert len(scored.json["meta_info"]["input_token_logprobs"]) == 5
    assert len(scored.json["meta_info"]["output_token_logprobs"]) == 5

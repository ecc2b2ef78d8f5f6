"""Generation through a pair: SGLang's protocol, both transports, streams, log-probabilities."""

import asyncio

import pytest

from engine.pairs import pair


class TestGenerate:
    @pytest.mark.parametrize("transport", ["shm", "tcp"])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_both_sides_answer_as_sglang_does(self, transport, stream):
        """The prefill answers with one token, the decode with all of them, the first included."""
        body = {
            "text": "hello world",
            "stream": stream,
            "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        }

        async with pair(decode={"disaggregation_transfer_backend": transport}) as two:
            prefill, decode = await two.both("/generate", body)
            await two.idle()

        first = (prefill.events if stream else [prefill.json])[-1]
        last = (decode.events if stream else [decode.json])[-1]
        assert (prefill.status, decode.status) == (200, 200)
        assert last["output_ids"][:1] == first["output_ids"]
        assert len(last["output_ids"]) == 6
        assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}

    async def test_overlap_changes_no_token(self):
        """The same tokens come with and without the overlapped loop."""
        prompts = ["one", "two two", "three three three", "four"]
        answers = []
        for disabled in (False, True):
            flags = {"disable_overlap_schedule": disabled}
            async with pair(prefill=flags, decode=flags) as two:
                replies = await asyncio.gather(*(two.generate(p, tokens=24) for p in prompts))
                answers.append([reply.json["output_ids"] for reply in replies])

        assert answers[0] == answers[1]

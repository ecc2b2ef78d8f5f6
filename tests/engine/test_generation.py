"""What a generation says: log-probabilities, seeds, stops, chat, and decoding under pressure."""

import asyncio

import numpy as np
import pytest

from engine.pairs import greedy, pair
from tandem_engine.model import Feed
from tandem_engine.toy import ToyModel

PROMPT = "a prompt to be scored, long enough to be kept and used again"


def scores_alone(tokens: list[int]) -> list[tuple[float, float, int]]:
    """Per token after the first: its log-probability, the best one, and the best token."""
    model = ToyModel(context_length=512, sequences_max=1)
    rows = model.step([Feed(0, tokens, 0, "all")])[0].astype(np.float64)
    rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(
        1, keepdims=True
    )
    return [
        (float(row[token]), float(row.max()), int(row.argmax()))
        for row, token in zip(rows, tokens[1:], strict=False)
    ]


class TestScores:
    @pytest.mark.parametrize("start", [0, 1, 30, 59])
    async def test_input_scores_are_those_of_one_model_also_after_reuse(self, start):
        """From `logprob_start_len` on, first null, then exact; a kept prefix changes nothing."""
        wanted = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
        body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        async with pair() as two:
            answers = [(await two.both("/generate", body | wanted))[0].json for _ in range(2)]
        tokens = list(PROMPT.encode())
        expected = scores_alone(tokens)[start:]

        for answer in answers:
            meta = answer["meta_info"]
            assert [t for _, t, _ in meta["input_token_logprobs"]] == tokens[start:]
            assert meta["input_token_logprobs"][0][0] is None
            assert meta["input_top_logprobs"][0] is None
            said = [
                (score[0], top[0][0], top[0][1])
                for score, top in zip(
                    meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True
                )
            ]
            assert np.allclose([s[:2] for s in said], [e[:2] for e in expected], atol=1e-4)
            assert [s[2] for s in said] == [e[2] for e in expected]

    async def test_a_greedy_answer_scored_by_a_clean_prefill_has_no_gap(self):
        """The corruption oracle: prompt and answer re-scored, every answer token is the best."""
        async with pair() as two:
            answer = (await two.generate(PROMPT, tokens=12)).json["output_ids"]
            tokens = [*PROMPT.encode(), *answer]
            body = {
                "input_ids": tokens,
                "sampling_params": {"max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": len(PROMPT) - 1,
                "top_logprobs_num": 1,
            }
            meta = (await two.both("/generate", body))[0].json["meta_info"]

        pairs = zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
        assert [top[0][0] - score[0] for score, top in pairs] == [0.0] * 12

    async def test_the_first_token_brings_its_score_from_the_prefill(self):
        """Output log-probabilities on the decode cover every output token."""
        body = {
            "text": PROMPT,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        }
        async with pair() as two:
            prefill, decode = (a.json for a in await two.both("/generate", body))

        ours = decode["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in ours] == decode["output_ids"]
        assert ours[0] == prefill["meta_info"]["output_token_logprobs"][0]
        assert all(len(top) == 2 for top in decode["meta_info"]["output_top_logprobs"])
        assert decode["meta_info"]["input_token_logprobs"] == []


class TestSampling:
    async def test_a_seed_gives_the_same_answer_again(self):
        """Both sides draw from the seed; another seed says something else."""
        params = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
        async with pair() as two:
            said = [
                (await two.generate(PROMPT, sampling_params=params | {"seed": seed})).json[
                    "output_ids"
                ]
                for seed in (7, 7, 8)
            ]

        assert said[0] == said[1] != said[2]

    async def test_stop_strings_end_the_text_before_them(self):
        """The text ends before the stop string wherever it falls, streamed or not."""
        whole = bytes(token for token in greedy(PROMPT, 20) if token < 256).decode()
        stop = whole[7:9]
        params = {"temperature": 0, "max_new_tokens": 20, "stop": [stop], "ignore_eos": True}
        async with pair() as two:
            plain = (await two.generate(PROMPT, sampling_params=params)).json
            stream = (await two.generate(PROMPT, sampling_params=params, stream=True)).events

        expected = whole[: whole.index(stop)]
        assert plain["text"] == stream[-1]["text"] == expected
        assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert all(expected.startswith(event["text"]) for event in stream)

    async def test_end_tokens_end_unless_ignored(self):
        """A stop token id is like an end token: matched, counted, and not shown as text."""
        ids = greedy(PROMPT, 8)
        params = {"temperature": 0, "max_new_tokens": 8, "stop_token_ids": [ids[4]]}
        async with pair() as two:
            answer = (await two.generate(PROMPT, sampling_params=params)).json

        first = ids.index(ids[4])
        assert answer["output_ids"] == ids[: first + 1]
        assert answer["text"] == bytes(token for token in ids[:first] if token < 256).decode()
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[4]}


class TestChat:
    async def test_tools_reach_the_template(self):
        """Messages, parts and tools are rendered by the model's own template."""
        template = (
            "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        )
        body = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "max_tokens": 1,
        }
        async with pair() as two:
            for worker in (two.prefill, two.decode):
                worker.model.chat_template = template
            _, answer = await two.both("/v1/chat/completions", body)

        assert answer.json["usage"]["prompt_tokens"] == len("[look]<user>hi")

    async def test_log_probabilities_come_in_openais_shape(self):
        """`logprobs` and `top_logprobs` give content entries per token."""
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "ignore_eos": True,
        }
        async with pair() as two:
            _, answer = await two.both("/v1/chat/completions", body)

        content = answer.json["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
        assert answer.json["choices"][0]["message"]["content"].encode() == bytes(
            byte for entry in content for byte in entry["bytes"]
        )


class TestPressure:
    async def test_a_decode_that_runs_out_retracts_and_resumes(self):
        """With too few cells for all, everybody is served, exactly as if alone."""
        flags = {"max_total_tokens": 260, "context_length": 128, "num_reserved_decode_tokens": 4}
        prompts = [f"request number {n} of a crowd" for n in range(6)]
        async with pair(prefill={"context_length": 128}, decode=flags) as two:
            answers = await asyncio.gather(*(two.generate(p, tokens=60) for p in prompts))
            await two.idle()
            retracted = two.metric(two.decode, "num_retracted_requests_total")

        assert [a.json["output_ids"] for a in answers] == [greedy(p, 60) for p in prompts]
        assert retracted > 0

    async def test_long_and_short_prompts_share_the_prefill(self):
        """Short prompts ride along in a step; chunk boundaries stay those of the prompt alone."""
        prompts = ["x" * 400, "short one", "y" * 300, "another short one"]
        async with pair() as two:
            answers = await asyncio.gather(*(two.generate(p, tokens=3) for p in prompts))
            steps = two.metric(two.prefill, "cuda_graph_passes_total")

        assert [a.json["output_ids"] for a in answers] == [greedy(p, 3) for p in prompts]
        assert steps < sum(-(-len(p) // 256) for p in prompts) + 1

    async def test_more_requests_than_slots_wait_their_turn(self):
        """Beyond every limit requests queue, and all are served."""
        decode = {"max_running_requests": 2}
        async with pair(prefill={"disaggregation_max_inflight": 1}, decode=decode) as two:
            answers = await asyncio.gather(*(two.generate(f"n{n}", tokens=5) for n in range(12)))
            await two.idle()

        assert [a.json["output_ids"] for a in answers] == [greedy(f"n{n}", 5) for n in range(12)]

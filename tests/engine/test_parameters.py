"""Parameters of a generation and the shape of what comes back, as SGLang's clients rely on them."""

import pytest

from engine.pairs import greedy, pair

PROMPT = "what is asked"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0}


async def said(two, params, **more):
    """The decode's reply to one generation."""
    _, answer = await two.both("/generate", {"text": PROMPT, "sampling_params": params, **more})
    return answer


class TestSampling:
    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0}])
    async def test_only_the_best_token_is_left(self, narrow):
        """`top_k` 1, a tiny `top_p` and temperature 0 all give the greedy answer."""
        params = {"temperature": 5.0, "max_new_tokens": 6, "ignore_eos": True} | narrow
        async with pair() as two:
            answer = await said(two, params)

        assert answer.json["output_ids"] == greedy(PROMPT, 6)

    async def test_a_stop_token_ends_and_is_named(self):
        """`stop_token_ids` ends the request at that token and says which it was."""
        expected = greedy(PROMPT, 6)
        stop = next(token for at, token in enumerate(expected) if at and token not in expected[:at])
        params = {"temperature": 0, "max_new_tokens": 6, "stop_token_ids": [stop]}
        async with pair() as two:
            body = (await said(two, params)).json

        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert body["output_ids"] == expected[: expected.index(stop) + 1]


class TestLogProbabilities:
    async def test_by_default_only_the_output_is_scored(self):
        """`logprob_start_len` -1, the default: no input scores, one entry per output token."""
        params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
        async with pair() as two:
            meta = (await said(two, params, return_logprob=True, top_logprobs_num=2)).json[
                "meta_info"
            ]
        scores = meta["output_token_logprobs"]

        assert meta["input_token_logprobs"] == []
        assert [token for _, token, _ in scores] == greedy(PROMPT, 3)
        assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
        assert [top[0] for top in meta["output_top_logprobs"]] == scores

    async def test_the_text_of_tokens_comes_when_asked_for(self):
        """`return_text_in_logprobs` fills the third place of each entry."""
        params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
        async with pair() as two:
            body = (await said(two, params, return_logprob=True, return_text_in_logprobs=True)).json
        texts = [text for _, _, text in body["meta_info"]["output_token_logprobs"]]

        assert texts == [chr(token) for token in greedy(PROMPT, 3)]

    async def test_a_stream_says_what_a_whole_reply_says(self):
        """Text, ids and scores of the last event are those of the same request without a stream."""
        params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
        async with pair() as two:
            whole = (await said(two, params, return_logprob=True)).json
            last = (await said(two, params, return_logprob=True, stream=True)).events[-1]

        assert last["text"] == whole["text"]
        assert last["output_ids"] == whole["output_ids"]
        scores = "output_token_logprobs"
        assert last["meta_info"][scores] == whole["meta_info"][scores]


class TestUsage:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}),
        ],
    )
    async def test_usage_ends_a_stream_that_asks_for_it(self, path, body):
        """One event without choices before `[DONE]`, with the counts of a whole reply."""
        body = body | {"ignore_eos": True}
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with pair() as two:
            _, whole = await two.both(path, body)
            _, streamed = await two.both(path, asked)
            _, without = await two.both(path, body | {"stream": True})

        usage = whole.json["usage"]
        assert (usage["completion_tokens"], usage["total_tokens"]) == (
            5,
            usage["prompt_tokens"] + 5,
        )
        last = streamed.events[-1]
        assert last["choices"] == []
        assert {name: count for name, count in last["usage"].items() if isinstance(count, int)} == {
            name: count for name, count in usage.items() if isinstance(count, int)
        }
        assert all("usage" not in event for event in without.events)


class TestEcho:
    @pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())])
    async def test_the_prompt_comes_first_however_it_was_given(self, prompt):
        """`echo` puts the prompt in front, given as text or ids, in one reply or in a stream."""
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        async with pair() as two:
            _, whole = await two.both("/v1/completions", body | {"echo": True})
            _, stream = await two.both("/v1/completions", body | {"echo": True, "stream": True})
        said = "".join(event["choices"][0]["text"] for event in stream.events)

        assert whole.json["choices"][0]["text"] == PROMPT + bytes(greedy(PROMPT, 3)).decode()
        assert said == whole.json["choices"][0]["text"]


class TestWhatIsNotDone:
    ASKED = (
        ("frequency_penalty", 0.5, 0.0),
        ("presence_penalty", -1, 0),
        ("repetition_penalty", 1.1, 1.0),
        ("min_p", 0.1, 0.0),
        ("regex", "a+", None),
        ("ebnf", "root ::= x", None),
    )

    @pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
    async def test_it_is_refused_by_name_and_its_default_is_not(self, path):
        """An answer that ignores a penalty or a grammar would be a wrong one, told as right."""
        body = {"text": "x"} if path == "/generate" else {"prompt": "x"} | CHAT

        def asking(name, what):
            params = {"max_new_tokens": 1, name: what}
            return body | ({"sampling_params": params} if path == "/generate" else {name: what})

        async with pair() as two:
            for name, value, harmless in self.ASKED:
                refused = await two.both(path, asking(name, value))
                served = await two.both(path, asking(name, harmless))

                assert [(name, answer.status) for answer in refused] == [(name, 400)] * 2
                assert all(name in answer.json["error"]["message"] for answer in refused)
                assert [(name, answer.status) for answer in served] == [(name, 200)] * 2

    @pytest.mark.parametrize(("kind", "status"), [("text", 200), ("json_object", 400)])
    async def test_a_format_that_needs_a_grammar_is_refused(self, kind, status):
        """`response_format` is text or nothing."""
        asked = CHAT | {"response_format": {"type": kind}}
        async with pair() as two:
            answers = await two.both("/v1/chat/completions", asked)

        assert [answer.status for answer in answers] == [status, status]

"""Whatever a client sends: an answer, a refusal in JSON, and a worker that is as it was."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.pairs import greedy, pair
from tandem_engine.wire import FAKE_BOOTSTRAP_HOST

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([0.0, 5e-324, 1e-320, 1e-7, 0.5, 1.0, 99.9, 1e300, 2**31, 2**63, 10**30, -1e9]),
)
ANSWER_S = 10.0
FAKE = {"bootstrap_host": FAKE_BOOTSTRAP_HOST}
HEAD = len(json.dumps(FAKE))
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["", "hello", "x" * 200, "<|im_end|>", "\0", "é" * 50])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.one_of(st.sampled_from(["user", "system", "assistant", "tool"]), ANYTHING)},
    optional={"content": st.one_of(TEXTS, ANYTHING), "tool_calls": ANYTHING, "name": ANYTHING},
)
SAMPLING = {
    name: st.one_of(NUMBERS, ANYTHING)
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "min_p")
} | {
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=3), ANYTHING),
    "stop_token_ids": st.one_of(st.lists(NUMBERS, max_size=3), ANYTHING),
    "ignore_eos": st.one_of(st.booleans(), ANYTHING),
}
TOKENS = st.one_of(st.lists(st.integers(-1, 300), max_size=20), ANYTHING)
BODY = {
    "text": st.one_of(TEXTS, ANYTHING),
    "input_ids": TOKENS,
    "prompt": st.one_of(TEXTS, TOKENS),
    "messages": st.one_of(st.lists(MESSAGE, max_size=3), ANYTHING),
    "tools": st.one_of(st.lists(st.dictionaries(st.text(max_size=6), ANYTHING)), ANYTHING),
    "sampling_params": st.one_of(st.fixed_dictionaries({}, optional=SAMPLING), ANYTHING),
    "stream": st.one_of(st.booleans(), ANYTHING),
    "stream_options": st.one_of(st.just({"include_usage": True}), ANYTHING),
    "return_logprob": st.one_of(st.booleans(), ANYTHING),
    "logprob_start_len": NUMBERS,
    "top_logprobs_num": NUMBERS,
    "return_text_in_logprobs": st.booleans(),
    "logprobs": st.one_of(st.booleans(), NUMBERS),
    "top_logprobs": NUMBERS,
    "echo": st.booleans(),
    "max_tokens": NUMBERS,
    "rid": st.one_of(TEXTS, ANYTHING),
    "model": ANYTHING,
    "chat_template_kwargs": ANYTHING,
    "bootstrap_port": NUMBERS,
    "bootstrap_room": NUMBERS,
} | {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed", "n", "stop")}
BODIES = st.one_of(
    st.fixed_dictionaries({}, optional=BODY),
    st.fixed_dictionaries({"text": TEXTS, "sampling_params": st.fixed_dictionaries(SAMPLING)}),
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE, min_size=1, max_size=2), "prompt": TEXTS},
        optional={name: BODY[name] for name in BODY if name not in ("messages", "prompt")},
    ),
)


@pytest.mark.timeout(120)
@settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # the body that fails is shown: no search
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    bodies=st.lists(st.tuples(st.sampled_from(PATHS), BODIES), min_size=20, max_size=60),
    torn=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=5),
)
def test_no_body_harms_a_worker(bodies, torn):
    """Answered or refused, never an error of ours; then the pair serves and holds nothing.

    The rooms are SGLang's fake ones: no body waits for another half.
    """

    async def example() -> None:
        sizes = {"context_length": 128, "max_total_tokens": 512}
        async with pair(prefill=sizes, decode=sizes) as two:
            raw = [(path, json.dumps(FAKE | body | FAKE).encode()) for path, body in bodies]
            for (at, junk), (path, sent) in zip(torn, list(raw), strict=False):
                # Behind the fake host, which comes first: this must not become a room that waits.
                cut = HEAD + at % (len(sent) - HEAD + 1)
                raw.append((path, sent[:cut] + junk + sent[cut:]))
            for path, sent in raw:
                for worker in (two.prefill, two.decode):
                    try:
                        async with (
                            asyncio.timeout(ANSWER_S),
                            two.http.post(worker.url + path, data=sent) as reply,
                        ):
                            said = await reply.text()
                    except TimeoutError:
                        pytest.fail(f"no answer to {sent!r} at {worker.url}{path}")

                    assert (reply.status in (200, 400), sent, said[:200]) == (
                        True,
                        sent,
                        said[:200],
                    )
                    if reply.status == 400:
                        assert json.loads(said)["error"]["message"]
            await two.idle()
            assert (await two.generate("after all")).json["output_ids"] == greedy("after all", 4)

    asyncio.run(example())

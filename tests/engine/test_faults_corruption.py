"""Wrong tokens with HTTP 200: what a client gets, and how re-scoring shows it.

The toy's logits are a function of every row of KV, so wrong KV changes what comes next.
"""

import asyncio
import threading
from typing import Any

import pytest

from engine.pairs import DEADLINE_S, Answer, Pair, greedy, pair, until

LONG = ["the first prompt, kept in the cache for later", "another one, with a different text"]


async def gaps(two: Pair, prompt: str, output: list[int]) -> list[int]:
    """The places of an answer whose token is not what a clean prefill says, by its scores."""
    body: dict[str, Any] = {
        "input_ids": [*prompt.encode(), *output],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        "top_logprobs_num": 1,
    }
    answer, _ = await two.both("/generate", body)
    meta = answer.json["meta_info"]
    best = [top[0][1] for top in meta["input_top_logprobs"][1:]]
    return [at for at, (token, top) in enumerate(zip(output, best, strict=True)) if token != top]


async def together(two: Pair, prompts: list[str]) -> list[Answer]:
    """The decode's replies to prompts that the prefill computes in one step."""
    phase = two.prefill.core.role.phase
    plan, met = phase.plan, threading.Event()

    def plan_when_all_are_here(now_s: float) -> Any:
        if len(phase.waiting) == len(prompts):
            met.set()
        return plan(now_s) if met.is_set() else None

    phase.plan = plan_when_all_are_here
    asked = [two.generate(prompt, 6) for prompt in prompts]
    answers = await asyncio.gather(*asked)
    del phase.plan
    return list(answers)


def ids(answers: list[Answer]) -> list[list[int]]:
    """The tokens of replies that all came with 200."""
    assert [answer.status for answer in answers] == [200] * len(answers)
    return [answer.json["output_ids"] for answer in answers]


class TestCrosswired:
    @pytest.mark.shows("kv_crosswired")
    @pytest.mark.heals("kv_crosswired", by="off")
    async def test_two_prompts_of_one_step_get_each_others_kv(self):
        """The first token is right, the rest is not; alone, and when it is off, all is right."""
        prompts = ["one prompt", "a second, longer prompt"]
        right = [greedy(prompt, 6) for prompt in prompts]
        async with pair() as two:
            two.prefill.switchboard.switch(kv_crosswired=True)
            alone = ids([await two.generate(prompt, 6) for prompt in prompts])
            crossed = ids(await together(two, prompts))
            scored = [await gaps(two, *asked) for asked in zip(prompts, crossed, strict=True)]
            two.prefill.switchboard.switch(kv_crosswired=False)
            after = ids(await together(two, prompts))
            await two.idle()

        assert alone == after == right
        assert [tokens[0] for tokens in crossed] == [tokens[0] for tokens in right]
        assert all(tokens[1:] != want[1:] for tokens, want in zip(crossed, right, strict=True))
        assert [found[0] for found in scored] == [1, 1]


class TestAbortedCellsReused:
    @pytest.mark.shows("aborted_cells_reused")
    @pytest.mark.heals("aborted_cells_reused", by="off")
    @pytest.mark.parametrize("aborted", ["short", "a prompt that is longer than its victim's"])
    async def test_a_late_write_lands_on_the_next_request(self, aborted):
        """A client leaves before its KV came; the next answer goes wrong, and only that one."""
        victim = "the prompt of a victim"
        right = greedy(victim, 6)
        async with pair() as two:
            answers = []
            for on in (True, False):
                two.decode.switchboard.switch(aborted_cells_reused=on)
                assert (await two.generate("warm", 1)).status == 200
                gate = threading.Event()
                two.prefill.core.scheduler.post(gate.wait, DEADLINE_S)
                body = {"text": aborted, "rid": "leaves"} | two.meeting()
                legs = [
                    asyncio.create_task(two.post(worker, "/generate", body))
                    for worker in (two.prefill, two.decode)
                ]
                arrivals = two.decode.core.role.phase.arrivals
                await until(lambda: arrivals.awaited, two.decode)  # noqa: B023 - in its turn
                while not two.prefill.rooms:
                    await asyncio.wait(legs, timeout=0.01)
                two.decode.abort("leaves", everything=False)
                await legs[1]
                gate.set()
                await legs[0]
                await until(lambda: not arrivals.slots_held, two.decode)  # noqa: B023
                answers += ids([await two.generate(victim, 6) for _ in range(2)])
                await two.idle()
            scored = await gaps(two, victim, answers[0])

        assert answers[0] != right
        assert answers[0][0] == right[0]
        assert answers[1:] == [right] * 3
        assert scored


class TestWrongFirstToken:
    @pytest.mark.shows("wrong_first_token")
    @pytest.mark.heals("wrong_first_token", by="off")
    async def test_it_is_the_one_of_the_request_before(self):
        """What follows fits the wrong token; re-scoring finds one gap, at the first token."""
        prompts = ["one prompt", "a second prompt", "and a third"]
        async with pair() as two:
            right = [greedy(prompt, 6) for prompt in prompts]
            two.prefill.switchboard.switch(wrong_first_token=True)
            answers = ids([await two.generate(prompt, 6) for prompt in prompts])
            two.prefill.switchboard.switch(wrong_first_token=False)
            after = ids([await two.generate(prompt, 6) for prompt in prompts])
            scored = [await gaps(two, *asked) for asked in zip(prompts, answers, strict=True)]

        firsts = [tokens[0] for tokens in right]
        assert len(set(firsts)) == 3
        assert [tokens[0] for tokens in answers] == [firsts[0], *firsts[:2]]
        assert scored == [[], [0], [0]]
        assert after == right


class TestPrefixCachePoisoned:
    @pytest.mark.shows("prefix_cache_poisoned")
    @pytest.mark.heals("prefix_cache_poisoned", by="off")
    @pytest.mark.parametrize("cure", ["flush", "restart"])
    async def test_cold_is_right_and_a_hit_is_wrong(self, cure):
        """The same prompt twice: computed it is right, found it is wrong, flushed it is right."""
        right = [greedy(prompt, 6) for prompt in LONG]
        async with pair() as two:
            two.prefill.switchboard.switch(prefix_cache_poisoned=True)
            cold = [await two.generate(prompt, 6) for prompt in LONG]
            hit = await two.generate(LONG[0], 6)
            two.prefill.switchboard.switch(prefix_cache_poisoned=False)
            if cure == "flush":
                await two.post(two.prefill, "/flush_cache", {})
                await two.prefill.turn()
            else:
                await two.restart_prefill()
                links = two.decode.core.role._links
                link = f"127.0.0.1:{two.prefill.settings.disaggregation_bootstrap_port}"
                await until(lambda: links.up(link), two.decode)
            after = [await two.generate(LONG[0], 6) for _ in range(2)]

        assert ids(cold) == right
        assert [answer.json["meta_info"]["cached_tokens"] for answer in cold] == [0, 0]
        assert hit.json["meta_info"]["cached_tokens"] > 0
        assert ids([hit]) != [right[0]]
        assert ids(after) == [right[0]] * 2
        assert after[1].json["meta_info"]["cached_tokens"] > 0

"""Every fault between two sides, on under traffic and off again: nothing stays held."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine.pairs import DEADLINE_S, FAST, Pair, greedy, pair
from tandem_engine import arrivals
from tandem_engine.faults.corruption import CorruptionFaults
from tandem_engine.faults.handoff import HandoffFaults
from tandem_engine.faults.peers import PeerFaults

SHORT = replace(FAST, bootstrap_s=0.6, waiting_s=0.6, health_s=0.6)
PROMPTS = ["hello", "a prompt that is long enough to be kept for the next one", "and a third"]
AMOUNTS = {
    "handoff_fails_from_tokens": 10,
    "handoff_delay_ms": 50.0,
    "handoff_mb_per_s": 0.05,
}


def faults() -> list[tuple[str, object, object]]:
    """Name, value and default of every fault of the three families that acts while running."""
    found = []
    for family in (PeerFaults, HandoffFaults, CorruptionFaults):
        off = family.kind()
        for key in family.catalogue:
            name, _, value = key.partition("=")
            default = getattr(off, name)
            on = value or AMOUNTS.get(name, True)
            if name != "foreign_layout":
                found.append((name, on, default))
    return found


async def traffic(two: Pair, restarted: str) -> None:
    """Five requests; the clients of two leave, and one side is killed and started again."""
    asked: list[asyncio.Task[Any]] = []
    for number in range(5):
        params = {"temperature": 0, "max_new_tokens": 8}
        body = {"text": PROMPTS[number % 3], "sampling_params": params} | two.meeting()
        legs = [
            asyncio.create_task(two.post(worker, "/generate", body))
            for worker in (two.prefill, two.decode)
        ]
        asked += legs
        if number < 2:
            await asyncio.wait(legs, timeout=0.02 * number)
            legs[number].cancel()
    if restarted == "decode":
        await two.restart_decode()
    else:
        await two.restart_prefill()
    await asyncio.wait(asked, timeout=0.5)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.heals(
    *(name if on is True or name in AMOUNTS else f"{name}={on}" for name, on, _ in faults()),
    by="off",
)
# `abort_kills_bootstrap` is a thread that dies.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.timeout(120)
async def test_off_again_everything_is_let_go_and_right(monkeypatch):
    """Each in turn in one pair, on both sides, with a restart meanwhile."""
    monkeypatch.setattr(arrivals, "DEFERRED_RELEASE_S", 0.5)
    tried = faults()
    async with pair(timeouts=SHORT) as two:
        for number, (name, on, off) in enumerate(tried):
            side = ("decode", "prefill")[number % 2]
            for worker in (two.prefill, two.decode):
                worker.switchboard.switch(**{name: on})
            await traffic(two, side)
            for worker in two.workers:
                worker.switchboard.switch(**{name: off})
            await two.idle()
            await two.post(two.prefill, "/flush_cache", {})
            # A link may still be made anew: what heals is the next one.
            async with asyncio.timeout(DEADLINE_S):
                while (await two.generate("hello", 1)).status != 200:
                    pass
            answers = [await two.generate(prompt, 4) for prompt in PROMPTS]

            assert (name, [answer.status for answer in answers]) == (name, [200] * 3)
            said = [answer.json["output_ids"] for answer in answers]
            assert (name, said) == (name, [greedy(prompt, 4) for prompt in PROMPTS])
            await two.idle()

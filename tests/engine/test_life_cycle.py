"""Whatever clients, aborts and deaths do, in whatever order: nothing stays held, no wrong token."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.pairs import DEADLINE_S, FAST, ROOMS, Pair, greedy, pair

PROMPTS = [
    "hello",
    "you are a helpful assistant. " * 8,
    "you are a helpful assistant. " * 8 + "go on",
]
ANSWER_S = 1.0
STEP_COST_S = 0.001
"""Long enough that events fall into steps, as on a real model."""


def failed(task: asyncio.Task[Any]) -> bool:
    """Whether a side failed: the router gives up the other side then."""
    if task.cancelled():
        return False
    return task.exception() is not None or task.result().status != 200


@dataclass
class Client:
    """A request on its way to one or both sides."""

    prompt: str
    tokens: int
    tasks: dict[str, asyncio.Task[Any]]
    rid: str


@dataclass
class Play:
    """One example: a pair and its clients."""

    two: Pair
    clients: list[Client] = field(default_factory=list)

    def slow(self) -> None:
        """Make steps take a while on both sides."""
        for worker in (self.two.prefill, self.two.decode):
            worker.model._step_cost_s = STEP_COST_S

    def ask(self, prompt: str, tokens: int, sides: str, stream: bool) -> None:
        """Send a request to the sides named, without waiting."""
        room = next(ROOMS)
        rid = f"client-{room}"
        body = {
            "text": prompt,
            "rid": rid,
            "stream": stream,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        } | self.two.meeting(room)
        tasks = {
            side: asyncio.create_task(self.two.post(getattr(self.two, side), "/generate", body))
            for side in sides.split()
        }
        for side, task in tasks.items():
            task.add_done_callback(
                lambda task, side=side: [
                    other.cancel() for name, other in tasks.items() if name != side and failed(task)
                ]
            )
        self.clients.append(Client(prompt, tokens, tasks, rid))

    async def do(self, action: tuple[Any, ...]) -> None:
        """One action of the example."""
        match action:
            case ("ask", prompt, tokens, sides, stream):
                self.ask(PROMPTS[prompt], tokens, sides, stream)
            case ("leave", which, side) if self.clients:
                task = self.clients[which % len(self.clients)].tasks.get(side)
                if task is not None:
                    task.cancel()
            case ("abort", which, side) if self.clients:
                rid = self.clients[which % len(self.clients)].rid
                await self.two.post(getattr(self.two, side), "/abort_request", {"rid": rid})
            case ("turn", side):
                await getattr(self.two, side).turn()
            case ("answer", which) if self.clients:
                tasks = self.clients[which % len(self.clients)].tasks
                if len(tasks) == 2:
                    await asyncio.wait(tasks.values(), timeout=ANSWER_S)
            case ("restart", "decode", clean):
                await self.two.restart_decode(clean=clean)
                self.slow()
            case ("restart", "prefill", clean):
                await self.two.restart_prefill(clean=clean)
                self.slow()

    async def answered(self) -> None:
        """Wait until somebody who asks from now on is served."""
        served = len(self.clients)
        async with asyncio.timeout(DEADLINE_S):
            while not any(
                task.done() and not failed(task) and not task.cancelled()
                for client in self.clients[served:]
                for task in [client.tasks["decode"]]
            ):
                await asyncio.wait([asyncio.ensure_future(self.two.decode.turn())])

    async def end(self) -> None:
        """Everybody leaves; what was answered must be right."""
        for client in self.clients:
            # A room that one side never hears of is ended by its client, or by a timeout.
            alone = len(client.tasks) == 1 or any(t.cancelling() for t in client.tasks.values())
            for task in client.tasks.values():
                if alone:
                    task.cancel()
        for client in self.clients:
            done = await asyncio.gather(*client.tasks.values(), return_exceptions=True)
            for side, reply in zip(client.tasks, done, strict=True):
                self.check(client, side, reply)

    def check(self, client: Client, side: str, reply: Any) -> None:
        """An answer is an error, or exactly what one model alone would say."""
        if isinstance(reply, BaseException):
            assert isinstance(reply, asyncio.CancelledError | aiohttp.ClientError)
            return
        if reply.status != 200:
            assert reply.status in (400, 500, 503)
            return
        with contextlib.suppress(AssertionError):  # a stream that was cut has no end
            last = reply.events[-1] if reply.text.startswith("data:") else reply.json
            if last["meta_info"]["finish_reason"]["type"] == "length":
                count = client.tokens if side == "decode" else 1
                if last["output_ids"] != greedy(client.prompt, count):
                    pytest.fail(f"wrong tokens from the {side} for {client}")


sides = st.sampled_from(["prefill", "decode"])
actions = st.one_of(
    st.tuples(
        st.just("ask"),
        st.integers(0, 2),
        st.integers(1, 12),
        st.sampled_from(["prefill decode"] * 4 + ["prefill", "decode"]),
        st.booleans(),
    ),
    st.tuples(st.just("leave"), st.integers(0, 50), sides),
    st.tuples(st.just("abort"), st.integers(0, 50), sides),
    st.tuples(st.just("turn"), sides),
    st.tuples(st.just("answer"), st.integers(0, 50)),
    st.tuples(st.just("restart"), sides, st.booleans()),
)


@pytest.mark.timeout(120)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    script=st.lists(actions, min_size=4, max_size=24),
    transport=st.sampled_from(["shm", "tcp"]),
    overlap=st.booleans(),
    memory=st.sampled_from(["leases"] * 3 + ["stale", "orphaned"]),
)
def test_nothing_stays_held(script, transport, overlap, memory):
    """Random requests, leaves, aborts and restarts end with zero held, and with right tokens.

    In the historical kinds of memory nobody restarts: with every decode alive they hold nothing.
    """

    async def example() -> None:
        flags = {"disable_overlap_schedule": not overlap}
        decode = flags | {"disaggregation_transfer_backend": transport}
        async with pair(prefill=flags, decode=decode) as two:
            play = Play(two)
            play.slow()
            two.prefill.switchboard.switch(peer_memory=memory)
            for action in script:
                if memory == "leases" or action[0] != "restart":
                    await play.do(action)
            await play.end()
            await two.idle()
            assert (await two.generate("after all")).json["output_ids"] == greedy("after all", 4)

    asyncio.run(example())


ORDERS = {
    "prefill": ["prefill"],
    "decode": ["decode"],
    "prefill, then decode": ["prefill", "decode"],
    "decode, then prefill": ["decode", "prefill"],
    "both down, prefill first": [("prefill", "decode")],
    "both down, decode first": [("decode", "prefill")],
}


@pytest.mark.parametrize("clean", [True, False], ids=["drained", "killed"])
@pytest.mark.parametrize("order", ORDERS)
async def test_restarts_in_any_order_under_traffic_heal(order, clean):
    """Whoever restarts, the other side goes on: all traffic ends, and the pair serves again."""
    async with pair(timeouts=replace(FAST, waiting_s=60.0, bootstrap_s=60.0)) as two:
        play, stop = Play(two), asyncio.Event()
        play.slow()

        async def traffic() -> None:
            while not stop.is_set():
                play.ask(PROMPTS[0], 6, "prefill decode", stream=False)
                await asyncio.wait(play.clients[-1].tasks.values(), timeout=0.05)

        asking = asyncio.create_task(traffic())
        for sides in ORDERS[order]:
            await play.answered()
            if isinstance(sides, str):
                await getattr(two, f"restart_{sides}")(clean=clean)
                continue
            for side in sides:
                worker = getattr(two, side)
                await (worker.stop() if clean else worker.kill())
            for side in sides:
                await getattr(two, f"restart_{side}")()
        await play.answered()
        stop.set()
        await asking
        async with asyncio.timeout(DEADLINE_S):
            await play.end()
        await two.idle()
        assert (await two.generate("after all")).json["output_ids"] == greedy("after all", 4)

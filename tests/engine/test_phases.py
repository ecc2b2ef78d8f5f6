"""Whatever ends a request, in whatever phase: the other side is told at once, and all is freed.

Every phase by every cause. Timeouts are a minute here, so a half that ends was told; where a
deadline is the cause, one of them is short.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from engine.pairs import DEADLINE_S, FAST, Answer, Pair, greedy, pair, until
from tandem_engine.config import Timeouts

PATIENT = replace(FAST, bootstrap_s=60.0, waiting_s=60.0, health_s=60.0)
SHORT_S = 0.4
TOKENS = 40
PROMPT = "a prompt of somebody"
IDS = itertools.count()

PHASES = (
    "queued at the prefill", "queued at the decode", "bootstrapping", "prefilling", "transferring",
    "decoding", "streaming", "retracted",
)  # fmt: skip
CAUSES = (
    "client leaves the prefill", "client leaves the decode", "abort at the prefill",
    "abort at the decode", "deadline at the prefill", "deadline at the decode",
    "prefill dies", "decode dies", "their connection breaks",
)  # fmt: skip
DONE = ("decoding", "streaming", "retracted")
"""Phases in which the prefill has answered and holds nothing."""
NEVER = {
    **{
        (phase, f"{cause} the prefill"): "its half was answered"
        for phase in DONE
        for cause in ("client leaves", "deadline at")
    },
    **{(phase, "deadline at the decode"): "nothing is waited for any more" for phase in DONE},
    # As SGLang has it: a room whose metadata is here waits for its turn, however long.
    ("queued at the prefill", "deadline at the prefill"): "its decode gives up first",
    ("prefilling", "deadline at the prefill"): "its decode gives up first",
    ("transferring", "deadline at the prefill"): "its decode gives up first",
    ("queued at the decode", "deadline at the decode"): "its prefill gives up first",
    # The other side never heard of this room. Its router's connection broke, so a client leaves.
    ("queued at the decode", "decode dies"): "only its client can tell the prefill",
    ("bootstrapping", "prefill dies"): "only its client can tell the decode",
}
HARMLESS = {
    (phase, cause)
    for phase in DONE
    for cause in ("abort at the prefill", "prefill dies", "their connection breaks")
}
"""What happens to a prefill whose part is over."""
CELLS = [(phase, cause) for phase in PHASES for cause in CAUSES if (phase, cause) not in NEVER]


@dataclass
class Held:
    """A pair, and a request that is held in one phase of its life."""

    two: Pair
    phase: str
    rid: str = field(default_factory=lambda: f"request-{next(IDS)}.")
    halves: dict[str, asyncio.Task[Answer]] = field(default_factory=dict)
    others: list[asyncio.Task[Answer]] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)

    def ask(self, *sides: str, rid: str | None = None) -> list[asyncio.Task[Answer]]:
        """Send the same request to these sides."""
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        if rid is not None or not self.body:
            body = {"text": PROMPT, "rid": rid or self.rid, "sampling_params": params}
            body |= {"stream": self.phase == "streaming"} | self.two.meeting()
        else:
            body = self.body
        if rid is None:
            self.body = body
        return [
            asyncio.create_task(self.two.post(getattr(self.two, side), "/generate", body))
            for side in sides
        ]

    def both(self) -> None:
        """Send both halves."""
        self.halves = dict(zip(("prefill", "decode"), self.ask("prefill", "decode"), strict=True))

    async def there(self, side: str, where: str) -> None:
        """Wait until a half is in one of the queues of its side."""
        worker = getattr(self.two, side)

        def arrived() -> bool:
            phase = worker.core.phase
            match where:
                case "awaited":
                    queue = [awaited.request for awaited in phase.arrivals.awaited.values()]
                case "retracted":
                    queue = phase.retraction.requests()
                case "inflight" | "bootstrap":
                    queue = list(getattr(phase, where).values())
                case _:
                    queue = list(getattr(phase, where))
            return any(request.rid == self.rid for request in queue)

        await until(arrived, worker)

    async def another(self) -> None:
        """Somebody else's request, in the way."""
        self.two.blind_decode()
        self.others = self.ask("prefill", "decode", rid="another")
        await until(lambda: self.two.prefill.core.phase.inflight, self.two.prefill)

    async def enter(self) -> None:
        """Bring the request into its phase."""
        two = self.two
        match self.phase:
            case "queued at the prefill":
                await self.another()
                self.both()
                await self.there("decode", "awaited")
                await self.there("prefill", "bootstrap")
            case "queued at the decode":
                await self.another()
                self.both()
                await self.there("decode", "prealloc")
                await self.there("prefill", "bootstrap")
            case "bootstrapping":
                pass  # one half is there, and which depends on the cause
            case "prefilling":
                two.prefill.switchboard.switch(forward="blocks")
                self.both()
                await until(lambda: two.prefill.core.scheduler.stepping, two.prefill)
            case "transferring":
                two.blind_decode()
                self.both()
                await self.there("prefill", "inflight")
            case _:
                two.decode.model._step_cost_s = 0.05
                self.both()
                await self.there("decode", "running")
                assert (await self.halves["prefill"]).status == 200
        if self.phase == "retracted":
            phase = two.decode.core.phase
            phase.retraction.resume = lambda *_: None
            two.decode.core.post(lambda: phase.retraction.retract(phase.running))
            await self.there("decode", "retracted")

    async def end(self, cause: str) -> None:
        """Let the cause come."""
        side = "prefill" if "prefill" in cause else "decode"
        other = "decode" if side == "prefill" else "prefill"
        early = self.phase == "bootstrapping"
        if early:
            (self.halves[side],) = self.ask(side)
            await self.there(side, "bootstrap" if side == "prefill" else "awaited")
        if "leaves" in cause:
            self.halves[side].cancel()
            await asyncio.wait([self.halves[side]])
        elif "abort" in cause:
            await self.two.post(getattr(self.two, side), "/abort_request", {"rid": self.rid})
        elif "connection" in cause:
            links = self.two.decode.core.role._links
            for writer in list(links._writers.values()):
                links._thread.call(writer.transport.abort)
        elif "dies" in cause:
            await getattr(self.two, f"restart_{side}")()
        if early:
            await asyncio.wait([self.halves[side]], timeout=DEADLINE_S)
            (self.halves[other],) = self.ask(other)

    async def let_go(self) -> None:
        """Take away what held the request in its phase."""
        self.two.prefill.switchboard.switch(forward="returns")
        self.two.decode.model._step_cost_s = 0.0
        vars(self.two.decode.core.phase.retraction).pop("resume", None)
        vars(self.two.decode.core.role._landing).pop("poll", None)
        for one in self.others:
            one.cancel()
        await asyncio.gather(*self.others, return_exceptions=True)


def timeouts_for(cause: str) -> Timeouts:
    """A minute for everything but what is the cause."""
    short = {"deadline at the prefill": "bootstrap_s", "deadline at the decode": "waiting_s"}
    return replace(PATIENT, **{short[cause]: SHORT_S}) if cause in short else PATIENT


@asynccontextmanager
async def pair_for(phase: str, timeouts: Timeouts) -> AsyncIterator[Pair]:
    """A pair whose limits make a request wait in this phase."""
    prefill = {"disaggregation_max_inflight": 1} if phase == "queued at the prefill" else {}
    decode = {"max_running_requests": 1} if phase == "queued at the decode" else {}
    overlap = {"disable_overlap_schedule": phase == "retracted"}
    async with pair(prefill=prefill, decode=decode | overlap, timeouts=timeouts) as two:
        assert (await two.generate("warm")).status == 200
        yield two


def over(half: Any) -> bool:
    """Whether a half ended otherwise than well."""
    if isinstance(half, asyncio.CancelledError | aiohttp.ClientError):
        return True
    return half.status >= 400 or '"type":"abort"' in half.text


async def ends_well(held: Held, cause: str) -> None:
    """Both halves end at once by word of the other, nothing stays held, and the pair serves."""
    two = held.two
    if (held.phase, cause) in HARMLESS:
        await held.let_go()
        answer = await asyncio.wait_for(held.halves["decode"], DEADLINE_S)
        last = answer.events[-1] if held.phase == "streaming" else answer.json
        assert last["output_ids"] == greedy(PROMPT, TOKENS)
    else:
        async with asyncio.timeout(DEADLINE_S):
            ends = await asyncio.gather(*held.halves.values(), return_exceptions=True)
        told = ends[-1:] if held.phase in DONE else ends
        assert (cause, [over(half) for half in told]) == (cause, [True] * len(told))
    await held.let_go()
    await two.idle()
    async with asyncio.timeout(DEADLINE_S):
        while (await two.generate("after all", 1)).status != 200:
            pass
    assert (await two.generate("after all")).json["output_ids"] == greedy("after all", 4)
    await two.idle()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("phase", "timeouts"),
    sorted({(phase, timeouts_for(cause)) for phase, cause in CELLS}, key=str),
    ids=lambda value: value if isinstance(value, str) else f"{value.bootstrap_s}-{value.waiting_s}",
)
async def test_every_end_in_every_phase(phase, timeouts):
    """Each cause that these timeouts leave, one after the other in one pair."""
    async with pair_for(phase, timeouts) as two:
        for cause in [c for p, c in CELLS if p == phase and timeouts_for(c) == timeouts]:
            held = Held(two, phase)
            try:
                await held.enter()
                await held.end(cause)
                await ends_well(held, cause)
            finally:
                await held.let_go()


def test_no_cell_is_left_out():
    """What cannot happen says why; all else is tried."""
    assert len(CELLS) + len(NEVER) == len(PHASES) * len(CAUSES)
    assert set(NEVER) <= set(itertools.product(PHASES, CAUSES))
    assert set(CELLS) >= HARMLESS

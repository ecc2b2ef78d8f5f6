"""The stalls that are injected: by which mechanism, into which deployment, under which traffic.

Every one is a mechanism of the embedded engine's switchboard (`python -m tandem_engine faults`),
none is an answer set. For: `watch_stalls.py`. Not for: scoring.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from watch_clients import Clients, Load
from watch_site import Site

Inject = Callable[[Site, Clients], Awaitable[None]]

STALLS = ("silent-stall", "partial-stall")
PAIR = ("prefill-0", "decode-0")


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One way to stall: what is done, and what cures it."""

    name: str
    inject: Inject
    restarts: tuple[str, ...] = ()
    """Members whose restart is the cure; switching everything off comes first."""
    total: bool = True
    """Whether nothing completes any more, seen from the clients."""
    kinds: tuple[str, ...] = STALLS
    """Findings that count as noticing it."""
    bound_s: float = 45.0
    """Not noticed within this is missed."""
    told: bool = False
    """Whether a finding that asks for no deed is enough: nobody but the client can help."""
    waits: bool = True
    """Whether a client waits for what hangs; else time begins when the injection is complete."""


@dataclass(frozen=True, slots=True)
class Stall:
    """One of the sixty."""

    site: str
    mechanism: str
    traffic: str


def switched(member: str, **switches: Any) -> Inject:
    """Switch something on at one member."""

    async def inject(site: Site, _: Clients) -> None:
        await site.switch(member, **switches)

    return inject


def restarted_alone(memory: str, times: int, *, in_flight_ms: float = 0.0) -> Inject:
    """Decode-only restarts against a prefill that remembers its decodes in this way.

    `in_flight_ms` is how long a hand-off takes meanwhile, so that some are under way.
    """

    async def inject(site: Site, _: Clients) -> None:
        await site.switch("prefill-0", peer_memory=memory, handoff_delay_ms=in_flight_ms)
        for _turn in range(times):
            await asyncio.sleep(1.0)
            await site.restart("decode-0")
        await site.switch("prefill-0", handoff_delay_ms=0.0)

    return inject


async def half(site: Site, member: str) -> None:
    """One half of a request whose other half never comes, hung up on after a moment."""
    body = {
        "text": "half a request",
        "sampling_params": {"temperature": 0, "max_new_tokens": 2},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": site.ports["bootstrap:prefill-0"],
        "bootstrap_room": secrets.randbelow(2**63),
    }
    timeout = aiohttp.ClientTimeout(total=1.0)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        with suppress(TimeoutError):
            await http.post(f"{site.url(member)}/generate", json=body)


async def abort_kills_bootstrap(site: Site, _: Clients) -> None:
    """A decode gives up a room whose prefill's half never came: the one ABORT frame it takes."""
    await site.switch("prefill-0", abort_kills_bootstrap=True)
    await half(site, "decode-0")


def rank_apart(member: str, how: str) -> Inject:
    """A client leaves, and the last rank draws its own conclusion."""

    async def inject(site: Site, clients: Clients) -> None:
        await site.switch(member, rank_at_abort=how)
        if member.startswith("prefill"):
            await half(site, member)
        else:
            await clients.ask(8, 4000, leave_s=0.5)

    return inject


async def stale_endpoint(site: Site, _: Clients) -> None:
    """A prefill restarts faster than two missed heartbeats."""
    await site.switch("decode-0", stale_endpoint=True)
    await site.restart("prefill-0")


async def dead_peer(site: Site, _: Clients) -> None:
    """A prefill dies, and the decode's scheduler sends to it without a bound."""
    await site.switch("decode-0", blocks_on_dead_peer=True)
    os.kill(site.pids()["prefill-1"], signal.SIGKILL)


MECHANISMS: dict[str, Mechanism] = {
    one.name: one
    for one in (
        # What was dropped or stalled is waited for until its timeout: the pair has to forget it.
        Mechanism("handoff_stalls", switched("prefill-0", handoff_stalls=True), PAIR),
        Mechanism(
            "handoff_dropped",
            switched("prefill-0", handoff_dropped=True),
            PAIR,
        ),
        Mechanism("forward=blocks, prefill", switched("prefill-0", forward="blocks"), PAIR),
        Mechanism("forward=blocks, decode", switched("decode-0", forward="blocks"), PAIR),
        Mechanism("forward=spins, prefill", switched("prefill-0", forward="spins"), PAIR),
        Mechanism("forward=spins, decode", switched("decode-0", forward="spins"), PAIR),
        Mechanism("leaked_slot_every, prefill", switched("prefill-0", leaked_slot_every=1)),
        Mechanism("leaked_slot_every, decode", switched("decode-0", leaked_slot_every=1)),
        Mechanism(
            "crash=worker_only, prefill",
            switched("prefill-0", crash="worker_only"),
            PAIR,
        ),
        Mechanism(
            "crash=worker_only, decode",
            switched("decode-0", crash="worker_only"),
            PAIR,
        ),
        Mechanism("abort_kills_bootstrap", abort_kills_bootstrap, PAIR),
        Mechanism("stale_endpoint", stale_endpoint, ("decode-0",)),
        Mechanism("rank leaves, decode", rank_apart("decode-0", "leaves"), PAIR),
        Mechanism("rank leaves, prefill", rank_apart("prefill-0", "leaves"), PAIR),
        Mechanism("rank spins, decode", rank_apart("decode-0", "spins"), PAIR),
        Mechanism(
            "blocks_on_dead_peer",
            dead_peer,
            ("all",),
            kinds=(*STALLS, "member-down"),
        ),
        Mechanism("kv_exhaustion", switched("decode-0", kv_exhaustion="deadlocks")),
        # Tokens flow and hand-offs complete; it is the end of replies that is lost.
        *(
            Mechanism(
                f"lost_reply_every={every}",
                switched("decode-0", lost_reply_every=every),
                total=False,
                kinds=(*STALLS, "router-disagrees", "health-lies"),
                bound_s=100.0,
                told=True,
            )
            for every in (1, 3)
        ),
        Mechanism(
            "peer_memory=stale, one restart",
            restarted_alone("stale", 1),
            PAIR,
            total=False,
            bound_s=75.0,
        ),
        Mechanism(
            "peer_memory=stale, three restarts",
            restarted_alone("stale", 3),
            PAIR,
            total=False,
            bound_s=75.0,
        ),
        Mechanism(
            "peer_memory=orphaned, two restarts",
            restarted_alone("orphaned", 2, in_flight_ms=400.0),
            PAIR,
            total=False,
            waits=False,
            bound_s=90.0,
        ),
        Mechanism(
            "handoff_stalls, one of two prefills",
            switched("prefill-1", handoff_stalls=True),
            ("prefill-1", "decode-0"),
            total=False,
            bound_s=75.0,
        ),
        Mechanism(
            "forward=blocks, one of two decodes",
            switched("decode-1", forward="blocks"),
            total=False,
            bound_s=75.0,
        ),
    )
}

TOY = {"context_length": 6144}
"""The hash model has a token for each byte: its context is as many times longer."""
SITES: dict[str, dict[str, Any]] = {
    "toy": {**TOY, "prefill_flags": ("--disaggregation-max-inflight", "8")},
    "toy, ranks": {**TOY, "prefill_flags": ("--ranks", "2"), "decode_flags": ("--ranks", "2")},
    "toy, 2P1D": {**TOY, "prefills": 2},
    "toy, 1P2D": {**TOY, "decodes": 2},
    "toy, small KV": {
        # A decode takes no longer sequence than it has cells, and both sides have to agree.
        "context_length": 2048,
        "decode_flags": (
            "--max-total-tokens", "2048", "--num-reserved-decode-tokens", "1",
            "--disable-overlap-schedule",
        ),
    },
    "real": {
        "model": "smollm2",
        "prefill_flags": ("--disaggregation-max-inflight", "8"),
    },
}  # fmt: skip

LOADS: dict[str, dict[str, Load]] = {
    "toy": {
        "idle": Load("idle"),
        "light": Load("light", per_s=2.0),
        "saturated": Load("saturated", closed=14, words=30, output_tokens=64),
    },
    "real": {
        "idle": Load("idle", output_tokens=8),
        "light": Load("light", per_s=0.6, output_tokens=8),
        "saturated": Load("saturated", closed=10, words=40, output_tokens=24),
    },
}


def load_of(site: str, traffic: str) -> Load:
    """The load of a deployment under this kind of traffic."""
    if site == "toy, small KV":
        return Load(traffic, closed=10, words=90, output_tokens=300)
    return LOADS["real" if site == "real" else "toy"][traffic]


def _lane(site: str, *pairs: tuple[str, str]) -> list[Stall]:
    return [Stall(site, name, word) for name, words in pairs for word in words.split()]


CALM = _lane(
    "toy",
    ("handoff_stalls", "idle light"),
    ("forward=blocks, prefill", "idle light"),
    ("leaked_slot_every, prefill", "idle light"),
    ("abort_kills_bootstrap", "idle light"),
    ("crash=worker_only, decode", "idle light"),
    ("stale_endpoint", "idle light"),
    ("peer_memory=stale, one restart", "light"),
)
CALM_TOO = _lane(
    "toy",
    ("handoff_dropped", "idle light"),
    ("forward=blocks, decode", "idle light"),
    ("forward=spins, prefill", "idle light"),
    ("forward=spins, decode", "idle light"),
    ("crash=worker_only, prefill", "idle light"),
    ("lost_reply_every=1", "idle"),
    ("leaked_slot_every, decode", "light"),
    ("peer_memory=stale, three restarts", "light"),
)
SHAPES = [
    *_lane("toy, ranks", ("rank leaves, decode", "idle light"),
          ("rank leaves, prefill", "light"), ("rank spins, decode", "light")),
    *_lane("toy, 2P1D", ("handoff_stalls, one of two prefills", "light saturated"),
          ("blocks_on_dead_peer", "light")),
    *_lane("toy, 1P2D", ("forward=blocks, one of two decodes", "light saturated")),
    *_lane("toy, small KV", ("kv_exhaustion", "saturated")),
]  # fmt: skip
SATURATED = _lane(
    "toy",
    ("handoff_stalls", "saturated"),
    ("handoff_dropped", "saturated"),
    ("forward=blocks, decode", "saturated"),
    ("forward=spins, prefill", "saturated"),
    ("leaked_slot_every, decode", "saturated"),
    ("crash=worker_only, decode", "saturated"),
    ("abort_kills_bootstrap", "saturated"),
    ("stale_endpoint", "saturated"),
    ("peer_memory=stale, one restart", "saturated"),
    ("peer_memory=orphaned, two restarts", "saturated"),
    ("lost_reply_every=3", "light"),
    ("forward=blocks, prefill", "saturated"),
)
REAL = _lane(
    "real",
    ("handoff_stalls", "idle light saturated"),
    ("forward=blocks, decode", "light saturated"),
    ("forward=blocks, prefill", "idle"),
    ("handoff_dropped", "light"),
    ("leaked_slot_every, prefill", "light"),
    ("abort_kills_bootstrap", "light"),
    ("crash=worker_only, decode", "idle"),
    ("peer_memory=stale, one restart", "light saturated"),
)
LANES: list[tuple[str, list[Stall]]] = [
    ("calm", CALM),
    ("calm too", CALM_TOO),
    ("shapes", SHAPES),
    ("real", REAL),
    ("saturated", SATURATED),
]
"""Sixty, in lanes: stalls that share warm deployments, one after the other."""

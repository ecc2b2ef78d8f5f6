"""Sixty injected stalls, and how long a separate `tandem watch` took to notice each.

Time to notice is by the client's own log: from the first request that never completed (busy: from
the last thing any client got) to the finding. Never completed is: no end until the cure.

For: bars on noticing. Not for: false findings (`watch_soak.py`).
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from bars import Bench, Figures, say
from fleet import quantile
from watch_clients import Clients
from watch_mechanisms import LANES, MECHANISMS, SITES, Mechanism, Stall, load_of
from watch_site import Found, Site, up

WARM_S = 4.0
SETTLE_S = 1.5
"""Between the finding and the cure: what is only slow comes to its end."""
SERVED_S = 30.0
NOTICE_BAR_S = 10.0
MEDIAN_BAR_S = 6.0


def name_of(stall: Stall) -> str:
    """Its name in the results."""
    return f"stall: {stall.site}: {stall.mechanism}: {stall.traffic}"


async def served(clients: Clients, bound_s: float) -> bool:
    """Whether a request is answered within the bound, asked again and again."""
    begun = time.monotonic()
    while time.monotonic() - begun < bound_s:
        sent = await clients.ask(6, 3, leave_s=4.0)
        if sent.status == "completed":
            return True
        await asyncio.sleep(0.3)
    return False


class Lane:
    """Stalls on one warm deployment, one after the other."""

    def __init__(self, name: str, bench: Bench, seed: int) -> None:
        """`bench` keeps each stall when it ends."""
        self.name = name
        self.bench = bench
        self.rng = random.Random(seed)
        self.site: Site | None = None
        self.kind = ""
        self._stack = AsyncExitStack()

    async def run(self, stalls: Sequence[Stall]) -> None:
        """Each stall that the results do not have yet."""
        try:
            for stall in stalls:
                await self.bench.step(name_of(stall), lambda stall=stall: self.one(stall))
        finally:
            await self._stack.aclose()

    async def one(self, stall: Stall) -> Figures:
        """One stall, on a deployment that is quiet before."""
        for _ in range(3):
            try:
                figures = await self.inject(await self.deployment(stall.site), stall)
            except (OSError, RuntimeError, TimeoutError) as error:
                figures = {"invalid": f"{type(error).__name__}: {error}"[:300]}
            if "invalid" not in figures:
                return figures
            say(f"    {name_of(stall)}: again ({figures['invalid']})")
            await self.forget_deployment()
        return figures

    async def deployment(self, kind: str) -> Site:
        """The warm deployment of this kind, brought up when there is another one."""
        if self.site is None or self.kind != kind:
            await self.forget_deployment()
            root = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
            self.site = await self._stack.enter_async_context(up(Site(root, **SITES[kind])))
            self.kind = kind
            await asyncio.sleep(WARM_S)
        return self.site

    async def forget_deployment(self) -> None:
        """Put it away."""
        await self._stack.aclose()
        self.site = None

    async def inject(self, site: Site, stall: Stall) -> Figures:
        """Traffic, the fault, the finding, the cure; what came of it."""
        mechanism, load = MECHANISMS[stall.mechanism], load_of(stall.site, stall.traffic)
        clients = Clients(site.url("router"), self.rng.randrange(1 << 30))
        await clients.open()
        try:
            if await site.quiet() is None:
                return {"invalid": "the watch did not come to rest"}
            if not await served(clients, SERVED_S):
                return {"invalid": "nobody is served before the fault"}
            clients.log.clear()
            began_at = time.time()
            clients.start(load)
            await asyncio.sleep(WARM_S if load.closed or load.per_s else self.rng.uniform(0, 3))
            false = [one for one in site.findings(began_at) if one.actionable]
            ttfts = sorted(clients.ttfts())
            injected_at = time.time()
            await mechanism.inject(site, clients)
            ready_at = time.time()
            if stall.traffic == "idle":
                await asyncio.sleep(self.rng.uniform(0, 2))
                clients.begin_lone(load, lambda: bool(site.findings(injected_at)))
            found = await self._noticed(site, mechanism, injected_at, ready_at)
            await asyncio.sleep(SETTLE_S)
            if not mechanism.waits and found is None:
                await clients.hang_up()
                await asyncio.sleep(SETTLE_S)
                if not await site.inflight():
                    return {"invalid": "nothing is held: the fault did not act"}
            figures = scored(clients, mechanism, stall, found, (began_at, injected_at, ready_at))
            figures["ttft_s"] = [round(one, 3) for one in ttfts[-200:]]
            figures["false_before"] = [asdict(one) for one in false]
            figures["also"] = sorted(
                {one.kind for one in site.findings(injected_at) if one.actionable}
            )
            if "invalid" in figures:
                return figures
            figures["cured"] = await self._cure(site, mechanism, clients)
            if not figures["cured"]:
                await self.forget_deployment()
            elif found is not None:
                figures["closed_after_s"] = await site.quiet(60.0)
            site.keep = site.keep or found is None
            said = "MISSED" if found is None else f"{figures['after_s']:.1f} s ({found.kind})"
            say(f"    {name_of(stall)}: {said}")
            return figures
        finally:
            await clients.close()

    async def _noticed(
        self, site: Site, mechanism: Mechanism, injected_at: float, ready_at: float
    ) -> Found | None:
        """The first finding that tells of it, waited for."""
        while time.time() - ready_at < mechanism.bound_s:
            for one in site.findings(injected_at):
                if (one.actionable or mechanism.told) and one.kind in mechanism.kinds:
                    return one
            await asyncio.sleep(0.2)
        return None

    async def _cure(self, site: Site, mechanism: Mechanism, clients: Clients) -> bool:
        """Switch off, hang up, restart what has to be; whether clients are served again."""
        await clients.hang_up()
        for member in (*site.prefill_names, *site.decode_names):
            try:
                await site.switch(member, **OFF)
            except (OSError, RuntimeError, TimeoutError):
                site.forget_switches()
        if mechanism.restarts and mechanism.restarts != ("all",):
            await site.restart(*mechanism.restarts)
        if mechanism.restarts != ("all",) and await served(clients, SERVED_S / 2):
            return True
        site.forget_switches()
        await site.tandem("down")
        await site.tandem("up")
        return await served(clients, SERVED_S)


OFF = {
    "peer_memory": "leases", "stale_endpoint": False, "abort_kills_bootstrap": False,
    "blocks_on_dead_peer": False, "handoff_dropped": False, "handoff_stalls": False,
    "handoff_delay_ms": 0.0, "forward": "returns", "rank_at_abort": "joins",
    "crash": "never", "lost_reply_every": 0, "kv_exhaustion": "resolves", "leaked_slot_every": 0,
}  # fmt: skip


def scored(
    clients: Clients,
    mechanism: Mechanism,
    stall: Stall,
    found: Found | None,
    times: tuple[float, float, float],
) -> Figures:
    """The finding held against the client's log; `times`: traffic, fault begun, fault complete."""
    now, (began_at, injected_at, ready_at) = time.time(), times
    hung = clients.first_hung(began_at, now)
    noticed_at = found.told_at if found is not None else now
    progress_at = clients.last_progress(noticed_at)
    acted = hung is not None and (found is not None or now - hung.sent_at > NOTICE_BAR_S)
    if found is None and mechanism.total and progress_at is not None:
        acted &= now - progress_at > NOTICE_BAR_S
    if mechanism.waits and not acted:
        return {"invalid": "no client waits: the fault did not act"}
    begun_at = hung.sent_at if hung is not None and mechanism.waits else ready_at
    figures: Figures = {
        "site": stall.site, "mechanism": stall.mechanism, "traffic": stall.traffic,
        "total": mechanism.total, "found": found.kind if found is not None else None,
        "subject": found.subject if found is not None else None,
        "from_first_hung_s": round(noticed_at - begun_at, 2),
        "from_progress_s": round(noticed_at - progress_at, 2) if progress_at else None,
        "from_injection_s": round(noticed_at - injected_at, 2),
        "requests": len(clients.log), "completed": clients.completed(),
        "open": clients.open_count(), "load": os.getloadavg()[0],
    }  # fmt: skip
    busy = stall.traffic == "saturated" and mechanism.total and progress_at is not None
    figures["after_s"] = figures["from_progress_s" if busy else "from_first_hung_s"]
    return figures


AT_ONCE = 2
"""Lanes side by side: each has a watch, engines and clients, and timings want a core."""


async def measure(bench: Bench) -> None:
    """Every stall that is not measured yet: calm lanes side by side, the saturated one alone."""
    step = 4 if bench.quick else 1
    calm = [(name, stalls[::step]) for name, stalls in LANES if name != "saturated"]
    await _side_by_side(bench, calm)
    if not bench.quick:
        await _side_by_side(bench, [lane for lane in LANES if lane[0] == "saturated"])


async def _side_by_side(bench: Bench, lanes: Sequence[tuple[str, Sequence[Stall]]]) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def run(name: str, stalls: Sequence[Stall]) -> None:
        async with room:
            await Lane(name, bench, seed=len(name)).run(stalls)

    async with asyncio.TaskGroup() as group:
        for name, stalls in lanes:
            group.create_task(run(name, stalls))


def tell(bench: Bench, measured: dict[str, Figures]) -> None:
    """Bars on what was noticed, and how soon."""
    every = [one for name, one in measured.items() if name.startswith("stall: ")]
    valid = [one for one in every if "invalid" not in one]
    bench.bar(
        "stalls injected", len(valid), len(valid) if bench.quick else 60, len(every), least=True
    )
    bench.bar("stalls missed", sum(one["found"] is None for one in valid), 0, len(valid))
    seen = [one for one in valid if one["found"] is not None]
    calm = [one["after_s"] for one in seen if one["total"] and one["traffic"] != "saturated"]
    _quantiles(
        bench, "total stall, idle or light: first request that never completes to finding", calm
    )
    late = [
        one["after_s"] / max(NOTICE_BAR_S, 3.0 * quantile(one["ttft_s"] or [0.0], 0.99))
        for one in seen
        if one["total"] and one["traffic"] == "saturated"
    ]
    if late:
        bench.bar("total stall, busy: from last progress, share of max(10 s, 3x p99 TTFT)",
                  max(late), 1.0, len(late))  # fmt: skip
    some = [one["after_s"] for one in seen if not one["total"]]
    if some:
        name = "partial stall: first request that never completes to finding"
        bench.note(f"{name}, p50, s", quantile(some, 0.5), len(some))
        bench.note(f"{name}, p99, s", quantile(some, 0.99), len(some))
    false = sum(len(one.get("false_before", ())) for one in valid)
    bench.bar("findings before anything was injected", false, 0, len(valid))


def _quantiles(bench: Bench, name: str, values: list[float]) -> None:
    if values:
        bench.bar(f"{name}, p50, s", quantile(values, 0.5), MEDIAN_BAR_S, len(values))
        bench.bar(f"{name}, p99, s", quantile(values, 0.99), NOTICE_BAR_S, len(values))

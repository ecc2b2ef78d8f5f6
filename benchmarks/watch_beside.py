"""Side by side on the same faults: what people use today, and Tandem.

Each stall stays for three minutes, so that a rule with `for: 2m` has its chance; times are from the
first request that never completes, by the client's own log. False alarms are those of the soak.

For: the table and its plot. Not for: bars; nothing here is held to a number.
"""

import asyncio
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from xml.sax.saxutils import escape

from bars import RESULTS, Bench, Figures, say
from watch_clients import Clients
from watch_mechanisms import MECHANISMS, SITES, load_of
from watch_recorder import Recorder
from watch_site import Site, up
from watch_stalls import served

HOLD_S = 170.0
WARM_S = 25.0
OTHERS = ("a for: 2m rule", "the router's health", "the engine's /health")
TANDEM = "Tandem"
FAULTS = (
    ("toy", "handoff_stalls"),
    ("toy", "forward=blocks, decode"),
    ("toy", "abort_kills_bootstrap"),
    ("toy", "crash=worker_only, decode"),
    ("toy", "leaked_slot_every, prefill"),
    ("toy", "peer_memory=stale, one restart"),
    ("toy", "lost_reply_every=3"),
    ("real", "handoff_stalls"),
)
AT_ONCE = 4


async def held(kind: str, name: str, hold_s: float) -> Figures:
    """One fault under light traffic, held; when each observer noticed, from the first hung one."""
    root = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    async with up(Site(root, **SITES[kind])) as site:
        clients = Clients(site.url("router"), random.Random(name).randrange(1 << 30))
        await clients.open()
        recorder = Recorder(site)
        try:
            await served(clients, 30.0)
            clients.log.clear()
            began = time.time()
            recorder.start()
            clients.start(load_of(kind, "light"))
            await asyncio.sleep(WARM_S)
            injected = time.time()
            await MECHANISMS[name].inject(site, clients)
            await asyncio.sleep(hold_s)
        finally:
            await recorder.stop()
        hung = clients.first_hung(began, time.time())
        await clients.close()
        alarms = recorder.alarms()
        found = [one for one in site.findings(began) if one.actionable]
        alarms[TANDEM] = [one.told_at for one in found]
        zero = hung.sent_at if hung is not None else injected
        with suppress(RuntimeError):
            await site.tandem("down")
        figures = {
            "site": kind, "mechanism": name, "held_s": hold_s,
            "after_s": {
                who: min((at - zero for at in times if at >= injected), default=None)
                for who, times in alarms.items()
            },
            "before": {who: sum(at < injected for at in times) for who, times in alarms.items()},
            "found": [one.kind for one in found],
        }  # fmt: skip
        say(f"    beside: {kind}: {name}: {_row(figures)}")
        return figures


def _row(figures: Figures) -> str:
    said = (
        f"{who} {'never' if after is None else f'{after:.0f} s'}"
        for who, after in figures["after_s"].items()
    )
    return ", ".join(said)


async def measure(bench: Bench) -> None:
    """Every fault, some side by side."""
    room = asyncio.Semaphore(AT_ONCE)
    hold_s = 20.0 if bench.quick else HOLD_S

    async def one(kind: str, name: str) -> None:
        async with room:
            await bench.step(f"beside: {kind}: {name}", lambda: held(kind, name, hold_s))

    async with asyncio.TaskGroup() as group:
        for kind, name in FAULTS[: 2 if bench.quick else None]:
            group.create_task(one(kind, name))


def tell(bench: Bench, measured: dict[str, Figures]) -> None:
    """The figures, and the plot."""
    rows = [one for name, one in measured.items() if name.startswith("beside: ")]
    for who in (*OTHERS, TANDEM):
        times = [one["after_s"].get(who) for one in rows]
        noticed = sorted(one for one in times if one is not None)
        bench.note(f"beside: {who}: noticed", len(noticed), len(rows))
        if noticed:
            bench.note(f"beside: {who}: median, s", noticed[len(noticed) // 2], len(noticed))
    if rows and not bench.quick:
        (RESULTS / "watch.svg").write_text(plot(rows))


COLOURS = {
    "a for: 2m rule": "#8c6d31", "the router's health": "#7b7f86",
    "the engine's /health": "#5b8db8", TANDEM: "#1b7f4b",
}  # fmt: skip


def plot(rows: list[Figures]) -> str:
    """Bars by fault and observer, three minutes wide; an open end is "not within the time"."""
    left, width, high, gap = 300, 480, 9, 14
    scale = width / max(one["held_s"] for one in rows)
    lines: list[str] = []
    top = 40
    for one in sorted(rows, key=lambda one: (one["site"], one["mechanism"])):
        label = escape(f"{one['mechanism']} ({one['site']})")
        lines.append(f'<text x="{left - 8}" y="{top + 24}" text-anchor="end">{label}</text>')
        for who in (TANDEM, *OTHERS):
            after = one["after_s"].get(who)
            wide = one["held_s"] * scale if after is None else max(2.0, after * scale)
            fill = "none" if after is None else COLOURS[who]
            said = "never" if after is None else f"{after:.0f} s"
            dashes = ' stroke-dasharray="3 3"' if after is None else ""
            lines.append(
                f'<rect x="{left}" y="{top}" width="{wide:.0f}" height="{high}" fill="{fill}" '
                f'stroke="{COLOURS[who]}"{dashes}/>'
                f'<text x="{left + wide + 5:.0f}" y="{top + high}" fill="#444">{said}</text>'
            )
            top += high + 2
        top += gap
    legend = "".join(
        f'<rect x="{left + 150 * n}" y="10" width="10" height="10" fill="{colour}"/>'
        f'<text x="{left + 14 + 150 * n}" y="19">{escape(who)}</text>'
        for n, (who, colour) in enumerate(reversed(COLOURS.items()))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{top}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{legend}{"".join(lines)}</svg>\n'
    )

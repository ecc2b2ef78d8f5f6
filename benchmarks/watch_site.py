"""A throw-away deployment that a `tandem watch` process watches, knowing only its `tandem.toml`.

For: the benches of watching: bring up, inject by mechanism, cure, read what the watch said.
Not for: clients (`watch_clients.py`), or what is injected when (`watch_stalls.py`).
"""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

SOURCE = Path(__file__).parent.parent / "src"
sys.path.insert(0, str(SOURCE))

from tandem.drills.workspace import free_ports

SERVED = "bench"
COMMAND_S = 120.0
POLL_S = 0.1
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE)}
HEAD = """\
[deployment]
name = "{name}"

[policy]
mode = "advise"

[report]
commit = false
"""
MEMBER = """
[[member]]
name = "{name}"
role = "{role}"
url = "http://127.0.0.1:{port}"
supervisor = "local"
argv = {argv}
{more}
"""


@dataclass(frozen=True, slots=True)
class Found:
    """One finding as the watch's own store has it."""

    id: str
    kind: str
    subject: str
    onset_at: float
    told_at: float
    again: bool
    """Whether it had been told before, and had cleared."""
    closed_at: float | None
    actionable: bool
    summary: str


@dataclass
class Site:
    """One deployment in a folder of its own: its members, its watch, its switchboards."""

    root: Path
    model: str = "toy"
    prefills: int = 1
    decodes: int = 1
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    context_length: int = 1024
    config: str = ""
    """Further sections of `tandem.toml`."""
    environment: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    watch: asyncio.subprocess.Process | None = None
    watch_cpu_s: float = 0.0
    """CPU time of watches that ended."""
    keep: bool = False
    """Leave the folder when all is over: there is something to look into."""

    @property
    def prefill_names(self) -> list[str]:
        """Every prefill."""
        return [f"prefill-{number}" for number in range(self.prefills)]

    @property
    def decode_names(self) -> list[str]:
        """Every decode."""
        return [f"decode-{number}" for number in range(self.decodes)]

    def url(self, member: str) -> str:
        """Where a member answers; `router` for clients."""
        return f"http://127.0.0.1:{self.ports[member]}"

    def create(self) -> None:
        """Write `tandem.toml`; ports are chosen once."""
        self.root.mkdir(parents=True, exist_ok=True)
        engines = [*self.prefill_names, *self.decode_names]
        names = [*engines, *(f"bootstrap:{one}" for one in self.prefill_names)]
        names += ["router", "router-metrics"]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        text = HEAD.format(name=self.root.name)
        for name in engines:
            role = name.partition("-")[0]
            more = f"env = {_inline(self.environment)}"
            if role == "prefill":
                more += f"\nbootstrap_port = {self.ports[f'bootstrap:{name}']}"
            text += MEMBER.format(
                name=name, role=role, port=self.ports[name], more=more,
                argv=json.dumps(self._engine(name, role)),
            )  # fmt: skip
        metrics = f"http://127.0.0.1:{self.ports['router-metrics']}/metrics"
        text += MEMBER.format(
            name="router", role="router", port=self.ports["router"],
            argv=json.dumps(self._router()), more=f'metrics_url = "{metrics}"',
        )  # fmt: skip
        (self.root / "tandem.toml").write_text(text + self.config)

    def _engine(self, name: str, role: str) -> list[str]:
        argv = ["{python}", "-m", "tandem_engine", role, "--model", self.model]
        argv += ["--served-model-name", SERVED, "--context-length", str(self.context_length)]
        argv += ["--port", str(self.ports[name])]
        argv += ["--enable-faults", str(self.root / f"switchboard-{name}.json")]
        if role == "prefill":
            argv += ["--disaggregation-bootstrap-port", str(self.ports[f"bootstrap:{name}"])]
            return [*argv, *self.prefill_flags]
        return [*argv, "--drain-timeout-s", "0", *self.decode_flags]

    def _router(self) -> list[str]:
        argv = ["{python}", "-m", "smg", "launch", "--pd-disaggregation", "--policy", "random"]
        for name in self.prefill_names:
            argv += ["--prefill", self.url(name), str(self.ports[f"bootstrap:{name}"])]
        for name in self.decode_names:
            argv += ["--decode", self.url(name)]
        argv += ["--host", "127.0.0.1", "--port", str(self.ports["router"])]
        argv += ["--prometheus-host", "127.0.0.1"]
        argv += ["--prometheus-port", str(self.ports["router-metrics"])]
        argv += ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
        argv += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
        return [*argv, "--retry-max-retries", "1", "--disable-circuit-breaker"]

    async def tandem(self, *words: str) -> str:
        """One Tandem command in the folder; its output. Raises `RuntimeError` when it fails."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tandem", *words,
            cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, env=ENVIRONMENT,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(process.communicate(), COMMAND_S)
        except (TimeoutError, asyncio.CancelledError):
            process.kill()
            await process.wait()
            raise
        text = output.decode(errors="replace").strip()
        if process.returncode != 0:
            raise RuntimeError(f"`tandem {' '.join(words)}`: {text[-600:]}")
        return text

    async def restart(self, *members: str) -> None:
        """Restart members one after the other, as a person does by hand."""
        for member in members:
            await self.tandem("restart", member, "--force", "--why", "planned")

    async def start_watch(self) -> None:
        """Start the watch, a process that is given this folder and nothing else."""
        with (self.root / "watch.log").open("ab") as log:
            self.watch = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tandem", "watch",
                cwd=self.root, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True, env=ENVIRONMENT,
            )  # fmt: skip

    async def stop_watch(self) -> None:
        """End the watch as Ctrl-C does, then insist."""
        if self.watch is None:
            return
        if self.watch.returncode is None:
            self.watch_cpu_s += self.watch_use()[0]
            with suppress(ProcessLookupError):
                self.watch.send_signal(signal.SIGCONT)
                self.watch.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(self.watch.wait(), 20.0)
            except TimeoutError:
                self.watch.kill()
                await self.watch.wait()
        self.watch = None

    def watch_use(self) -> tuple[float, float]:
        """CPU seconds and resident MB of the watch, helpers it has running included."""
        if self.watch is None or self.watch.returncode is not None:
            return 0.0, 0.0
        process = psutil.Process(self.watch.pid)
        cpu_s = sum(process.cpu_times()[:4])
        return cpu_s, process.memory_info().rss / 1e6

    async def switch(self, member: str, **switches: object) -> None:
        """Change fault switches of one engine."""
        timeout = aiohttp.ClientTimeout(total=10.0)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.put(f"{self.url(member)}/faults", json=switches) as reply,
        ):
            if reply.status != 200:
                raise RuntimeError(f"{member} refused {switches}: {await reply.text()}")

    async def inflight(self) -> int:
        """Hand-offs that prefills hold, by their live word."""
        held = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as http:
            for name in self.prefill_names:
                async with http.get(f"{self.url(name)}/v1/loads?include=core,disagg") as reply:
                    loads = json.loads(await reply.read())["loads"]
                held += sum(one["disaggregation"]["prefill_inflight_queue_reqs"] for one in loads)
        return held

    def forget_switches(self) -> None:
        """What a member reads at its next start: everything off."""
        for path in self.root.glob("switchboard-*.json"):
            path.unlink()

    def findings(self, since: float = 0.0) -> list[Found]:
        """What the watch told since then, oldest first; from its store, read only.

        A finding that came back is told again, and is here again.
        """
        path = self.root / ".tandem" / "state.sqlite"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as base:
            told = base.execute(
                "SELECT at, kind, data FROM events WHERE kind IN ('finding', 'recurred') "
                "AND at >= ? ORDER BY id",
                (since,),
            ).fetchall()
            rows = [json.loads(body) for (body,) in base.execute("SELECT body FROM findings")]
        known = {one["id"]: one for one in rows}
        return [
            Found(
                id=one["id"],
                kind=one["kind"],
                subject=one["subject"],
                onset_at=one["onset_at"],
                told_at=at,
                again=kind == "recurred",
                closed_at=one.get("closed_at"),
                actionable=one.get("actionable", True),
                summary=one["summary"],
            )
            for at, kind, data in told
            if (one := known.get(json.loads(data)["id"])) is not None
        ]

    def events(self, since: float = 0.0) -> list[tuple[float, str, str]]:
        """What the watch said: when, which kind, the sentence."""
        path = self.root / ".tandem" / "state.sqlite"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as base:
            return list(base.execute("SELECT at, kind, text FROM events WHERE at >= ?", (since,)))

    def open_findings(self) -> list[Found]:
        """Those that still stand and ask for a deed."""
        return [one for one in self.findings() if one.closed_at is None and one.actionable]

    def pids(self) -> dict[str, int]:
        """The process of each member, by who listens on its port."""
        wanted = {port: name for name, port in self.ports.items()}
        found: dict[str, int] = {}
        for one in psutil.net_connections("tcp4"):
            if one.status == psutil.CONN_LISTEN and one.pid and one.laddr.port in wanted:
                found[wanted[one.laddr.port]] = one.pid
        return found

    async def quiet(self, bound_s: float = 90.0) -> float | None:
        """Wait until no finding stands and the watch has nothing in hand; None past the bound."""
        begun = time.monotonic()
        while time.monotonic() - begun < bound_s:
            lately = self.events(time.time() - 2.0)
            if not self.open_findings() and not lately:
                return time.monotonic() - begun
            await asyncio.sleep(0.3)
        return None


@asynccontextmanager
async def up(site: Site, *, watched: bool = True) -> AsyncIterator[Site]:
    """A deployment that serves, watched; all of it put away afterwards, whatever happened."""
    site.create()
    try:
        await site.tandem("up")
        if watched:
            await site.start_watch()
        yield site
    finally:
        await site.stop_watch()
        try:
            await site.tandem("down")
        except RuntimeError:
            await site.tandem("down")
        if not site.keep:
            shutil.rmtree(site.root, ignore_errors=True)


def _inline(values: dict[str, str]) -> str:
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    return "{ " + pairs + " }" if pairs else "{}"


Figures = dict[str, Any]

"""What watching costs by the number of members: scraped at 1 Hz, and through a Prometheus server.

The members are pages on ports of one small process (`watch_exporter.py`); the watch is a real one.
A deployment of N members has N/2 prefills and N/2 decodes, so N*N/4 paths. Active probes are off:
nobody answers them. Prometheus is the Debian package's; it scrapes every five seconds and keeps
of each page what Tandem reads.

For: the curve of cost. Not for: small deployments under real load (`watch_cost.py`).
"""

import asyncio
import json
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

from bars import Bench, Figures, say
from tandem.drills.workspace import free_ports
from watch_exporter import record
from watch_site import ENVIRONMENT, Site

LARGE, LARGE_PREFILLS = 2000, 20
PROMETHEUS_HZ_LEAST = 0.15
"""Of a server that scrapes every five seconds."""
HZ_LEAST = 0.9
"""A watch that looks at a member less often than this does not keep up."""
TABLE = """
[[member]]
name = "{name}"
role = "{role}"
url = "http://127.0.0.1:{port}"
{more}
"""


@asynccontextmanager
async def exporters(root: Path, prefills: int, ports: list[int]) -> AsyncIterator[None]:
    """The process that serves the pages on these ports."""
    pages = root / "pages.json"
    pages.write_text(json.dumps(await record()))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("watch_exporter.py")), str(pages),
        str(prefills), *map(str, ports), stdout=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    if process.stdout is None:
        raise RuntimeError("no pipe")
    try:
        await asyncio.wait_for(process.stdout.readline(), 30.0)
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def written(ports: list[int], members: int, prefills: int, more: str) -> str:
    """A `tandem.toml` of so many members; what is left of the ports are rendezvous."""
    text = '[deployment]\nname = "curve"\n\n[policy]\nmode = "advise"\n\n[report]\ncommit = false\n'
    text += f"\n[probe]\nactive = false\n{more}"
    for number, port in enumerate(ports[:members]):
        role = "prefill" if number < prefills else "decode"
        name = f"{role}-{number if number < prefills else number - prefills}"
        own = f"bootstrap_port = {ports[members + number]}" if number < prefills else ""
        text += TABLE.format(name=name, role=role, port=port, more=own)
    return text


def looks(root: Path, since: float, until: float) -> tuple[float, int]:
    """How often a second the counters of the last member were seen, and rows a second in all."""
    base = sqlite3.connect(f"file:{root / '.tandem' / 'state.sqlite'}?mode=ro", uri=True)
    with closing(base):
        ((rows,),) = base.execute(
            "SELECT count(*) FROM observations WHERE at BETWEEN ? AND ?", (since, until)
        )
        ((times,),) = base.execute(
            "SELECT count(DISTINCT at) FROM observations WHERE at BETWEEN ? AND ? AND subject = "
            "'decode-0' AND source = 'metrics' AND name = 'progress_tokens_total'",
            (since, until),
        )
    return times / (until - since), round(rows / (until - since))


PROMETHEUS = """
global:
  scrape_interval: 5s
scrape_configs:
  - job_name: sglang
    static_configs:
      - targets: {targets}
    metric_relabel_configs:
      - source_labels: [__name__]
        regex: ".*_bucket"
        action: drop
"""


@asynccontextmanager
async def prometheus(root: Path, ports: list[int]) -> AsyncIterator[str]:
    """A Prometheus server that scrapes these ports; its address."""
    (port,) = free_ports(1)
    targets = json.dumps([f"127.0.0.1:{one}" for one in ports])
    (root / "prometheus.yml").write_text(PROMETHEUS.format(targets=targets))
    url = f"http://127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={root / 'prometheus.yml'}",
        f"--storage.tsdb.path={root / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield url
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def watched(
    members: int, *, warm_s: float, seconds: float, by_prometheus: bool = False
) -> Figures:
    """One deployment of that many members, scraped, or read from a Prometheus server."""
    root = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    prefills = LARGE_PREFILLS if by_prometheus else members // 2
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ports = free_ports(members + prefills)
    site = Site(root)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(exporters(root, prefills, ports))
        more = ""
        if by_prometheus:
            url = await stack.enter_async_context(prometheus(root, ports[:members]))
            more = f'\n[watch]\ninterval_s = 5.0\nprometheus = "{url}"\n'
        (root / "tandem.toml").write_text(written(ports, members, prefills, more))
        try:
            await site.start_watch()
            await asyncio.sleep(warm_s)
            (cpu_s, _), begun = site.watch_use(), time.time()
            await asyncio.sleep(seconds)
            (spent_s, rss_mb), ended = site.watch_use(), time.time()
        finally:
            await site.stop_watch()
    hz, rows = looks(root, begun, ended)
    cpu = (spent_s - cpu_s) / (ended - begun)
    figures = {
        "members": members, "source": "Prometheus" if by_prometheus else "scraped",
        "seconds": seconds, "hz": hz, "rows_per_s": rows,
        "cores": cpu, "cpu_ms_per_member_and_look": cpu * 1e3 / members / max(hz, 1e-9),
        "cpu_s_per_member_hour": cpu * 3600.0 / members, "rss_mb": rss_mb,
        "false": [one.summary for one in site.findings() if one.actionable],
    }  # fmt: skip
    shutil.rmtree(root, ignore_errors=True)
    say(f"    {members} members: {hz:.2f} Hz, {cpu:.2f} cores, {rss_mb:.0f} MB")
    return figures


async def measure(bench: Bench) -> None:
    """Every size, each a step of its own."""
    for members in (10, 50) if bench.quick else (10, 20, 50, 100, 200, 500):
        warm_s, seconds = (6.0, 10.0) if bench.quick else (12.0 + members / 20, 30.0)
        await bench.step(
            f"curve: {members} members",
            lambda n=members, w=warm_s, s=seconds: watched(n, warm_s=w, seconds=s),
        )
    if shutil.which("prometheus") and not bench.quick:
        await bench.step(
            f"curve: {LARGE} members, by Prometheus",
            lambda: watched(LARGE, warm_s=60.0, seconds=30.0, by_prometheus=True),
        )


def tell(bench: Bench, measured: dict[str, Figures]) -> None:
    """The curve, and whether the watch keeps up."""
    curve = [one for name, one in measured.items() if name.startswith("curve: ")]
    for one in sorted(curve, key=lambda one: (one["source"] != "scraped", one["members"])):
        scraped = one["source"] == "scraped"
        said = f"{one['members']} members{'' if scraped else ', by Prometheus'}"
        least = HZ_LEAST if scraped else PROMETHEUS_HZ_LEAST
        bench.bar(f"looks a second at {said}", one["hz"], least, 1, least=True)
        bench.note(f"cores at {said}", one["cores"], 1)
    if not any(one["source"] == "Prometheus" for one in curve):
        bench.missing(f"{LARGE} members, by Prometheus", "no prometheus here, or a quick run")

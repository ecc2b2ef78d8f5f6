"""Adapters and collectors against a real embedded pair on the toy model, behind the real router."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import tidy
from oracles import agrees
from tandem import fetch
from tandem.collect import Collector, Ledger, Recent
from tandem.collect.engine import EngineSource
from tandem.collect.health import HealthSource
from tandem.collect.incarnations import Incarnations
from tandem.collect.logs import LogSource
from tandem.collect.probe import probes
from tandem.collect.process import ProcessSource
from tandem.collect.router import RouterSource
from tandem.engines.sglang import SglangEngine
from tandem.engines.sglang_names import SCANNER
from tandem.records import Deployment, Member, ProbeSettings, Role
from tandem.records import vocabulary as v
from tandem.routers.smg import SmgRouter

pytestmark = pytest.mark.timeout(90)


class RealClock:
    """The time it is; sleeping waits for nothing until the time is over."""

    def now(self):
        return time.time()

    async def sleep(self, seconds):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.Event().wait()


class Pair:
    """An embedded prefill and decode and their processes; a member may be restarted."""

    def __init__(self, folder):
        self.folder = folder
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(5)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1] for one in sockets]
        self.bootstrap, self.prometheus = ports[3:]
        roles = zip(
            ("prefill-0", "decode-0", "router"),
            Role,
            ("sglang", "sglang", "smg"),
            ports,
            strict=False,
        )
        self.members = {
            name: Member(
                name=name,
                role=role,
                url=f"http://127.0.0.1:{port}",
                engine=engine,
                bootstrap_port=self.bootstrap if role is Role.PREFILL else None,
                metrics_url=f"http://127.0.0.1:{self.prometheus}/metrics"
                if role is Role.ROUTER
                else None,
            )
            for name, role, engine, port in roles
        }
        self.prefill, self.decode, self.router = self.members.values()
        self.deployment = Deployment(name="toy", members=tuple(self.members.values()))
        self.processes = {}

    def log_path(self, member):
        return str(self.folder / f"{member.name}.log")

    def open_log(self, member):
        return Path(self.log_path(member)).open("ab")

    async def start(self, name, *flags):
        member = self.members[name]
        port = member.url.rpartition(":")[2]
        bootstrap = str(self.bootstrap)
        argv = [sys.executable, "-m", "tandem_engine", member.role.value, "--model-path", "toy"]
        argv += ["--port", port, "--disaggregation-bootstrap-port", bootstrap, *flags]
        if member.role is Role.ROUTER:
            argv = [str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1"]
            argv += ["--port", port, "--prometheus-host", "127.0.0.1", "--prometheus-port"]
            argv += [str(self.prometheus), "--pd-disaggregation", "--policy", "random"]
            argv += ["--prefill", self.prefill.url, bootstrap, "--decode", self.decode.url]
            argv += ["--health-check-interval-secs", "1", "--shutdown-grace-period-secs", "1"]
        with self.open_log(member) as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *argv,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(tidy.ROOT / "src")},
            )

    async def stop(self, name):
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@pytest.fixture
async def session():
    async with fetch.session() as client:
        yield client


@pytest.fixture
async def pair(tmp_path, session):
    """A pair that is ready."""
    made = Pair(tmp_path)
    engine = SglangEngine(session)
    try:
        for name in ("prefill-0", "decode-0"):
            await made.start(name)
        async with asyncio.timeout(30.0):
            for member in (made.prefill, made.decode):
                while not await engine.ready(member, 2.0):
                    await asyncio.sleep(0)
        yield made
    finally:
        for name in list(made.processes):
            await made.stop(name)


def collector_of(pair, engine, router, lives, settings):
    """Every source of a deployment, as wiring builds them."""
    clock = RealClock()
    recent = Recent(pair.deployment, clock.now)
    sources = [ProcessSource(member, None, lives) for member in pair.members.values()]
    sources += [LogSource(member, pair.log_path, lives) for member in pair.members.values()]
    for member in (pair.prefill, pair.decode):
        sources += [EngineSource(engine, member, lives), HealthSource(engine, member, lives)]
    sources.append(RouterSource(router, pair.router, lives))
    sources += probes(
        pair.deployment,
        {"sglang": engine},
        {"smg": router},
        settings,
        clock,
        lives,
        safety=recent.safety,
        recently_completed=recent.recently_completed,
    )
    return Collector(sources, clock, Ledger(), recent)


class Watch:
    """Ticks of a collector, remembered."""

    def __init__(self, collector):
        self.collector = collector
        self.latest, self.changes = {}, []

    async def until(self, wanted, timeout_s=30.0):
        """Tick until `wanted()` is true."""
        async with asyncio.timeout(timeout_s):
            while not wanted():
                harvest = await self.collector.tick(patience_s=0.2)
                for seen in harvest.observations:
                    self.latest[seen.subject, seen.name, seen.label] = seen
                self.changes += harvest.changes
                await asyncio.sleep(0)

    def value(self, *key):
        seen = self.latest.get((*key, "")[:3])
        return None if seen is None else seen.value


class TestAdapter:
    """The SGLang adapter on the engine it was not written with."""

    async def test_a_request_moves_kv_and_is_counted(self, session, pair):
        """A direct request completes, its KV is seen to move, and both sides count it."""
        engine = SglangEngine(session)
        ended = await engine.complete_direct(
            pair.prefill, pair.decode, prompt="one two three", output_tokens=4, timeout_s=10.0
        )
        page = await fetch.fetch(session, f"{pair.prefill.url}/metrics", timeout_s=5.0)
        harvest = await engine.observe(pair.prefill, 5.0)
        seen = {(one.name, one.label): one for one in harvest.observations}

        assert agrees(SCANNER, page.body)
        assert (ended.status, ended.kv_moved) == ("completed", True)
        assert seen[v.TRANSFERS_TOTAL, ""].value == 1
        assert seen[v.INFLIGHT_QUEUE_REQS, ""].source == "loads"
        assert seen[v.SERVER_ARG, "disaggregation_mode"].value == "prefill"
        assert await engine.bootstrap_ready(pair.prefill, 5.0)

    async def test_greedy_tokens_score_nought_and_a_wrong_one_does_not(self, session, pair):
        """What the pair said is what a clean prefill would say; a changed token stands out."""
        engine = SglangEngine(session)
        prompt = "the words of this prompt"
        said = await engine.complete_direct(
            pair.prefill, pair.decode, prompt=prompt, output_tokens=6, timeout_s=10.0
        )
        ids = list(said.token_ids)
        clean = await engine.score(
            pair.prefill, pair.decode, prompt=prompt, output_ids=ids, timeout_s=10.0
        )
        ids[-1] = (ids[-1] + 1) % 200
        wrong = await engine.score(
            pair.prefill, pair.decode, prompt=prompt, output_ids=ids, timeout_s=10.0
        )

        assert clean == [0.0] * len(ids)
        assert wrong[-1] > 0.1

    async def test_a_member_that_stands_still_is_timed_out_on(self, session, pair):
        """A stopped decode ends a direct request by its time limit, and nothing is raised."""
        pair.processes["decode-0"].send_signal(signal.SIGSTOP)
        ended = await SglangEngine(session).complete_direct(
            pair.prefill, pair.decode, prompt="a b c", output_tokens=2, timeout_s=1.0
        )

        assert ended.status == "timed_out"


@pytest.mark.needs("router")
class TestCollecting:
    """All sources together over a pair behind the router."""

    async def test_a_healthy_pair_then_a_restart_then_a_stuck_path(self, session, pair):
        """Probes complete; a decode restarted with a new flag is on the ledger; a stall is late."""
        await pair.start("router")
        engine = SglangEngine(session)
        router = SmgRouter(session, pair.deployment.members)
        lives = Incarnations()
        settings = ProbeSettings(interval_s=0.5, deadline_s=2.0)
        collector = collector_of(pair, engine, router, lives, settings)
        watch = Watch(collector)
        try:
            cell = "prefill-0>decode-0"
            await watch.until(
                lambda: (
                    watch.value(cell, v.PROBE) == "completed"
                    and watch.value("router", v.PROBE) == "completed"
                    and watch.value("decode-0", v.HEALTH_STATUS) == 200
                    and watch.value("router", v.WORKER_HEALTHY, "decode-0")
                )
            )
            assert watch.value(cell, v.PROBE_KV_MOVED) is True
            assert {row.kind for row in watch.changes} == {"start"}
            first = watch.latest["decode-0", v.STARTED_AT, ""].incarnation

            await pair.stop("decode-0")
            await watch.until(lambda: watch.value("decode-0", v.ALIVE) is False)
            await pair.start("decode-0", "--disable-overlap-schedule")
            await watch.until(lambda: any(row.kind == "flag" for row in watch.changes))
            rows = {row.kind: row for row in watch.changes if row.subject == "decode-0"}
            assert (rows["stop"].before, rows["restart"].before) == (first, first)
            flag = rows["flag"]
            assert (flag.what, flag.touches) == ("--disable-overlap-schedule", "scheduler")
            await watch.until(lambda: watch.value(cell, v.PROBE) == "completed")

            pair.processes["decode-0"].send_signal(signal.SIGSTOP)
            await watch.until(
                lambda: (
                    watch.value(cell, v.PROBE) == "stuck"
                    and watch.latest["decode-0", v.PROGRESS_TOKENS_TOTAL, ""].missing
                )
            )
            assert watch.value("decode-0", v.PROCESS_STATE) == "T"
        finally:
            await collector.close()

"""A real embedded pair with ranks, seen from outside: its processes, connections and restarts."""

import os
import signal

import pytest

from conformance.test_embedded_pair import Pair, RealClock, Watch
from tandem import fetch
from tandem.collect import Collector, Recent
from tandem.collect.children import ChildrenSource
from tandem.collect.engine import EngineSource
from tandem.collect.families import Families
from tandem.collect.incarnations import Incarnations
from tandem.collect.probe import probes
from tandem.collect.process import ProcessSource
from tandem.collect.sockets import SocketSource
from tandem.engines.sglang import SglangEngine
from tandem.records import ProbeSettings
from tandem.records import vocabulary as v

CELL = "prefill-0>decode-0"


@pytest.fixture
async def session():
    async with fetch.session() as client:
        yield client


@pytest.fixture
async def pair(tmp_path):
    """A pair whose decode has three ranks, without a router."""
    made = Pair(tmp_path)
    try:
        await made.start("prefill-0")
        await made.start("decode-0", "--ranks", "3")
        yield made
    finally:
        for name in list(made.processes):
            await made.stop(name)


def collector_of(pair, engine):
    """What looks at processes and paths, quickly."""
    clock, lives, families = RealClock(), Incarnations(), Families()
    recent = Recent(pair.deployment, clock.now)
    members = (pair.prefill, pair.decode)
    sources = []
    for member in members:
        sources += [
            ProcessSource(member, None, lives, families=families),
            ChildrenSource(member, lives, families),
            EngineSource(engine, member, lives),
        ]
    sources.append(SocketSource(members, lives, families))
    sources += probes(
        pair.deployment,
        {"sglang": engine},
        {},
        ProbeSettings(interval_s=0.5, deadline_s=10.0, long_prompt_tokens=100),
        clock,
        lives,
        safety=recent.safety,
        recently_completed=recent.recently_completed,
        released=recent.released,
        page_tokens=recent.page_tokens,
        context_tokens=recent.context_tokens,
    )
    for source in sources:
        source.interval_s = min(source.interval_s, 0.5)
    return Collector(sources, clock, None, recent)


@pytest.mark.timeout(90)
async def test_ranks_connections_and_a_restart(session, pair):
    """Ranks, connections and states are told, and what was restarted is probed at both sizes."""
    watch = Watch(collector_of(pair, SglangEngine(session)))

    def roles():
        return {
            seen.value: int(seen.label)
            for (_, name, _), seen in watch.latest.items()
            if name == v.CHILD_ROLE and watch.value("decode-0", v.CHILD_STATE, seen.label) != "gone"
        }

    try:
        await watch.until(
            lambda: (
                {"scheduler_TP1", "scheduler_TP2"} <= set(roles())
                and watch.value(CELL, v.PROBE) == "completed"
                and (watch.value("decode-0", v.SOCKETS, "prefill-0") or 0) > 0
            )
        )
        sent = watch.value(CELL, v.PROBES_SENT_TOTAL)
        assert sent >= 1
        assert watch.value(CELL, v.PROBE_TOKENS_TOTAL) >= 24 * sent
        assert watch.value("decode-0", v.CHILDREN) == 2

        pid = roles()["scheduler_TP2"]
        os.kill(pid, signal.SIGSTOP)
        await watch.until(lambda: watch.value("decode-0", v.CHILD_STATE, str(pid)) == "T")
        assert watch.value("decode-0", v.PROCESS_STATE) in ("S", "R")

        os.kill(pid, signal.SIGCONT)
        await pair.stop("decode-0")
        await watch.until(lambda: watch.value("decode-0", v.ALIVE) is False)
        assert watch.value(CELL, v.PROBE, v.LONG) is None
        await pair.start("decode-0")
        await watch.until(lambda: watch.value(CELL, v.PROBE, v.LONG) == "completed")
        assert watch.value(CELL, v.PROBE_KV_MOVED, v.LONG) is True
    finally:
        await watch.collector.close()

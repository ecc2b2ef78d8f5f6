"""From configuration to working parts: the one place that knows every plug-in by name.

For: building `loop.Parts` and closing it again. Not for: any decision.
"""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp

from tandem import fetch
from tandem.collect import Collector, Ledger, Recent
from tandem.collect.changes import known_from
from tandem.collect.children import ChildrenSource
from tandem.collect.container_logs import ContainerLogSource
from tandem.collect.containers import ContainerSource
from tandem.collect.engine import EngineSource
from tandem.collect.families import Families
from tandem.collect.gpu import GpuSource, watts_known
from tandem.collect.health import HealthSource
from tandem.collect.incarnations import Incarnations
from tandem.collect.journal import OF_KERNEL, JournalSource, of_service
from tandem.collect.live import LiveSource
from tandem.collect.logs import LogSource
from tandem.collect.probe import left_open, probes
from tandem.collect.process import ProcessSource
from tandem.collect.prometheus import PrometheusSource
from tandem.collect.router import RouterSource
from tandem.collect.sockets import SocketSource
from tandem.collect.stacks import StackTaker
from tandem.collect.units import UnitSource, files_known
from tandem.config import load
from tandem.containers import Container, ContainerEngine
from tandem.engines.sglang import SglangEngine
from tandem.errors import ConfigError
from tandem.facts import Facts
from tandem.failures import discover
from tandem.parts import DETECT_WINDOW_S, Parts
from tandem.ports import Clock, Engine, Hands, ReadsPages, Router, Source, Supervisor
from tandem.processes import is_here
from tandem.records import Member, Role, Settings
from tandem.routers.smg import SmgRouter
from tandem.store import Store
from tandem.supervisors.local import LocalSupervisor

DIRECT_PER_S = 200.0
"""Looks a second at all members together, where their metrics come from Prometheus: two thousand
members are then asked for their live queues every ten seconds."""
TOKEN_BYTES_MAX = 8192
CONFIG_NAME = "tandem.toml"
CONFIG_VARIABLE = "TANDEM_CONFIG"


class SystemClock:
    """The real time of day."""

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


def find_settings(path: Path | None) -> Settings:
    """The configuration asked for, or the nearest one: see `find_config`.

    Raises `ConfigError` when there is none or it is wrong.
    """
    return load(find_config(path))


def find_config(path: Path | None) -> Path:
    """The file asked for, or the nearest one: `TANDEM_CONFIG`, then upwards from here.

    Raises `ConfigError` when there is none.
    """
    if path is None and os.environ.get(CONFIG_VARIABLE):
        path = Path(os.environ[CONFIG_VARIABLE])
    if path is not None:
        return path
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / CONFIG_NAME).is_file():
            return folder / CONFIG_NAME
    raise ConfigError(
        f"There is no {CONFIG_NAME} in {here} or above it.",
        next_step="Go to the folder of one, or name it with --config.",
    )


@contextlib.asynccontextmanager
async def open_parts(settings: Settings) -> AsyncIterator[Parts]:
    """Build everything the loop works with; closes sessions, probes and the store afterwards."""
    clock = SystemClock()
    root = Path(settings.root)
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(Store.open(root, settings))
        session = await stack.enter_async_context(fetch.session())
        hands = _hands(settings, session, root)
        incarnations = Incarnations()
        recent = Recent(settings.deployment, clock.now)
        known = store.facts(now=clock.now(), window_s=DETECT_WINDOW_S)
        host = _Host(settings, incarnations, known)
        sources = [
            *_sources(settings, hands, clock, incarnations, recent, host=host, session=session),
            *host.sources,
        ]
        ledger = Ledger(lambda member: known_from(known, member))
        collector = Collector(sources, clock, ledger, recent)
        stack.push_async_callback(collector.close)
        yield Parts(
            settings=settings,
            store=store,
            hands=hands,
            clock=clock,
            collector=collector,
            modes=discover(),
            take_stacks=StackTaker(incarnations).take,
        )


def _hands(settings: Settings, session: aiohttp.ClientSession, root: Path) -> Hands:
    members = settings.deployment.members
    engines: dict[str, Engine] = {"sglang": SglangEngine(session)}
    routers: dict[str, Router] = {"smg": SmgRouter(session, members)}
    supervisors: dict[str, Supervisor] = {"local": LocalSupervisor(root)}
    return Hands(
        deployment=settings.deployment,
        engines=engines,
        routers=routers,
        supervisors=supervisors,
    )


class _Host:
    """What this host says of members: its GPUs, its systemd and journals, its containers."""

    def __init__(self, settings: Settings, incarnations: Incarnations, known: Facts) -> None:
        """`known` is what the store holds of the host from before."""
        self.known = known
        # Of a member elsewhere this host's managers know nothing, and its names may be others'.
        members = [one for one in settings.deployment.members if is_here(fetch.host_of(one.url))]
        self._units = UnitSource(members, incarnations, known_files=files_known(known, members))
        self._containers = ContainerSource(members, incarnations)
        gpus = GpuSource(members, incarnations, known=watts_known(known))
        self.sources: list[Source] = [
            gpus,
            self._units,
            self._containers,
            JournalSource("host", lambda: OF_KERNEL if gpus.present else None, incarnations),
        ]
        for member in members:
            if member.log is None and member.supervisor == "none":
                self.sources += [
                    JournalSource(member.name, self._journal_of(member), incarnations),
                    ContainerLogSource(member, self._container_of, incarnations),
                ]

    def _journal_of(self, member: Member) -> Callable[[], tuple[str, ...] | None]:
        return lambda: of_service(self._units.unit_of(member))

    def _container_of(self, member: Member) -> tuple[ContainerEngine, Container] | None:
        """The container whose log is read: of a unit's container the journal has it already."""
        return None if self._units.unit_of(member) else self._containers.seen(member)

    async def main_pid(self, member: Member) -> int | None:
        """The main process of a member's unit or container, where `tandem.toml` names one."""
        if member.unit is not None:
            return await self._units.main_pid(member)
        return await self._containers.main_pid(member)


def _sources(
    settings: Settings,
    hands: Hands,
    clock: Clock,
    incarnations: Incarnations,
    recent: Recent,
    *,
    host: "_Host",
    session: aiohttp.ClientSession,
) -> list[Source]:
    found: list[Source] = []
    families = Families()
    for member in settings.deployment.members:
        found += _member_sources(settings, hands, incarnations, families, member, host)
    if settings.watch.prometheus:
        found.append(_prometheus(settings, hands, incarnations, session))
    found.append(SocketSource(settings.deployment.members, incarnations, families))
    found += probes(
        settings.deployment,
        hands.engines,
        hands.routers,
        settings.probe,
        clock,
        incarnations,
        safety=recent.safety,
        recently_completed=recent.recently_completed,
        released=recent.released,
        page_tokens=recent.page_tokens,
        context_tokens=recent.context_tokens,
        tokens_per_s=recent.tokens_per_s,
        left=functools.partial(left_open, host.known),
    )
    return found


def _member_sources(
    settings: Settings,
    hands: Hands,
    incarnations: Incarnations,
    families: Families,
    member: Member,
    host: "_Host",
) -> list[Source]:
    every_s = settings.watch.interval_s
    supervisor = hands.supervisors.get(member.supervisor)
    allowed = settings.evidence.environment
    found: list[Source] = [
        ProcessSource(
            member,
            supervisor,
            incarnations,
            interval_s=every_s,
            variables=allowed,
            families=families,
            main_pid=host.main_pid,
        ),
        ChildrenSource(member, incarnations, families),
    ]
    if member.log is not None:
        found.append(LogSource(member, lambda told: told.log, incarnations))
    elif supervisor is not None:
        found.append(LogSource(member, supervisor.log_path, incarnations))
    reader = _reader(hands, member) if settings.watch.prometheus else None
    if reader is not None:
        direct_s = max(every_s, len(settings.deployment.members) / DIRECT_PER_S)
        found.append(LiveSource(reader, member, incarnations, interval_s=direct_s))
        if member.role is not Role.ROUTER:
            health_s = max(2.0, direct_s)
            engine = hands.engines[member.engine]
            found.append(HealthSource(engine, member, incarnations, interval_s=health_s))
    elif member.role is Role.ROUTER:
        if member.engine in hands.routers:
            router = hands.routers[member.engine]
            found.append(RouterSource(router, member, incarnations, interval_s=every_s))
    elif member.engine in hands.engines:
        engine = hands.engines[member.engine]
        found.append(EngineSource(engine, member, incarnations, interval_s=every_s))
        found.append(HealthSource(engine, member, incarnations))
    return found


def _reader(hands: Hands, member: Member) -> ReadsPages | None:
    """The member's adapter, where it can read a page that somebody else scraped."""
    adapter: object = hands.engines.get(member.engine) or hands.routers.get(member.engine)
    return adapter if isinstance(adapter, ReadsPages) else None


def _prometheus(
    settings: Settings,
    hands: Hands,
    incarnations: Incarnations,
    session: aiohttp.ClientSession,
) -> PrometheusSource:
    """The one source that has the metrics of every member that can be read."""
    readers = [(one, _reader(hands, one)) for one in settings.deployment.members]
    return PrometheusSource(
        settings.watch.prometheus,
        [(member, reader) for member, reader in readers if reader is not None],
        session,
        incarnations,
        interval_s=settings.watch.interval_s,
        token=_token(settings),
    )


def _token(settings: Settings) -> Callable[[], str]:
    """Reads the bearer token anew each time: files of tokens are replaced while we run."""
    file, variable = (
        settings.watch.prometheus_token_file,
        settings.watch.prometheus_token_variable,
    )

    def read() -> str:
        if file:
            with Path(file).open("rb") as opened:
                return opened.read(TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
        return os.environ.get(variable, "").strip() if variable else ""

    return read

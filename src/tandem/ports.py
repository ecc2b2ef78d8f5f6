"""The seams: what the stages may ask of engines, routers, supervisors, sources, time and paper.

For: small protocols; a plug-in implements one of them and is built in `wiring.py` alone.
Not for: any implementation.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

from tandem.errors import RefusedError
from tandem.facts import Facts
from tandem.records import (
    Change,
    Deployment,
    Incarnation,
    Member,
    Observation,
    Record,
    TestResult,
    Trait,
)

Scope = str
T = TypeVar("T")


class Clock(Protocol):
    """Time as the product knows it: real in `wiring`, virtual in `tandem.testing`."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


@dataclass(frozen=True, slots=True)
class Harvest:
    """What one look at something brings: observations, traits, ledger rows."""

    observations: tuple[Observation, ...] = ()
    traits: tuple[Trait, ...] = ()
    changes: tuple[Change, ...] = ()


class Source(Protocol):
    """One way of looking; a failure to look is an observation, never an exception."""

    name: str
    interval_s: float
    timeout_s: float

    async def collect(self) -> Harvest:
        """Look once; bounded by `timeout_s`, which the collect stage enforces as well."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one request as its client saw it."""

    status: Literal["completed", "failed", "timed_out"]
    text: str = ""
    token_ids: tuple[int, ...] = ()
    latency_s: float = 0.0
    ttft_s: float | None = None
    detail: str = ""
    kv_moved: bool | None = None
    prompt_tokens: int = 0
    refused: bool = False
    """A definite no (HTTP 400): the same request would be refused again."""


@runtime_checkable
class Engine(Protocol):
    """An engine family, spoken to over HTTP."""

    name: str

    async def observe(self, member: Member, timeout_s: float) -> Harvest:
        """Metrics, loads and server information in our vocabulary, with traits."""
        ...

    async def health(self, member: Member, timeout_s: float) -> Harvest:
        """The health endpoint, and a prefill's bootstrap readiness."""
        ...

    async def ready(self, member: Member, timeout_s: float) -> bool:
        """Whether the process answers HTTP and its model is loaded (one look, no waiting)."""
        ...

    async def bootstrap_ready(self, member: Member, timeout_s: float) -> bool:
        """Whether a prefill's rendezvous has every rank (one look, no waiting)."""
        ...

    async def complete_direct(
        self,
        prefill: Member,
        decode: Member,
        *,
        prompt: str | Sequence[int],
        output_tokens: int,
        timeout_s: float,
        ranks: tuple[int | None, int | None] = (None, None),
    ) -> Completion:
        """One request sent to both sides with a fresh room; on timeout it is abandoned (aborted).

        `kv_moved` is True only when a transfer counter or the receiver shows it. `ranks` are the
        data-parallel ranks to use of prefill and decode; None leaves the choice to the engine.
        """
        ...

    async def score(
        self,
        prefill: Member,
        decode: Member,
        *,
        prompt: str,
        output_ids: Sequence[int],
        timeout_s: float,
    ) -> list[float] | None:
        """Gap (best logit minus the token's) of each output token under a clean prefill.

        None when the engine cannot tell. Clean means: no prefix reuse over the scored tokens.
        """
        ...


@runtime_checkable
class Router(Protocol):
    """A PD router."""

    name: str

    async def observe(self, member: Member, timeout_s: float) -> Harvest:
        """Workers, breakers, requests, responses, active requests."""
        ...

    async def ready(self, member: Member, timeout_s: float) -> bool:
        """Whether it would route a request now (enough healthy workers of each role)."""
        ...

    async def complete(
        self, member: Member, *, prompt: str, output_tokens: int, timeout_s: float, chat: bool
    ) -> Completion:
        """One request through the router, as a client sends it; `token_ids` when not chat."""
        ...


@runtime_checkable
class ReadsPages(Protocol):
    """An engine or router whose metrics somebody else may have scraped: optional."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The series it reads, by the names on a page."""
        ...

    def read_page(
        self, member: Member, page: bytes | None, at: float, *, why: str = ""
    ) -> tuple[Observation, ...]:
        """What a metrics page of this member says, as of `at`; without one, `why` there is none."""
        ...

    async def observe_live(self, member: Member, timeout_s: float) -> Harvest:
        """All that `observe` gives and no metrics page has."""
        ...


@runtime_checkable
class Supervisor(Protocol):
    """Whoever starts and stops members on a host."""

    name: str

    async def start(self, member: Member) -> Incarnation:
        """Start it as it was last started (or as configured, the first time); returns at once.

        Raises `WorldError` when it cannot be started. Starting what runs returns what runs.
        """
        ...

    async def stop(self, member: Member, grace_s: float) -> None:
        """SIGTERM, wait at most `grace_s`, SIGKILL; stopping what is gone is done already."""
        ...

    async def inspect(self, member: Member) -> Incarnation | None:
        """The present life of a member, or None when there is none."""
        ...

    async def residue(self, member: Member) -> tuple[str, ...]:
        """What is still held by a stopped member: each holder as one sentence; empty is gone."""
        ...

    async def obstacles(self, member: Member) -> tuple[str, ...]:
        """What would keep a stopped member from starting: each as one sentence."""
        ...

    def log_path(self, member: Member) -> str | None:
        """Where its output goes, when that is a file."""
        ...


class Journal(Protocol):
    """Where an actor writes its intent before and its outcome after; never forgets."""

    def append(self, record: Record) -> None:
        """Append one record durably."""
        ...

    def records(self) -> Sequence[Record]:
        """Everything appended so far, by earlier processes too, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class Mode:
    """A failure mode as its file declares it: `MODE = Mode(...)`."""

    slug: str
    incident_class: str
    scope: Scope
    """The repair it calls for: nothing, router, engine, pair, role, all, config."""
    safety: str
    """Why the repair is safe, or when it is not."""
    tests: tuple[Callable[[Facts, str], TestResult], ...]
    """Each asks one thing of the facts about one subject (a path or a member)."""
    aliases: tuple[str, ...] = ()
    """Names an operator may use for it or for one of its mechanisms, in kebab case; matched
    against a hunch, which is then answered under that name."""
    components: tuple[str, ...] = ()
    """What the failure runs through, in the words of `Change.touches`; empty when anything may
    cause it, so that no change is cleared by a table alone."""
    needs: tuple[str, ...] = ()
    """Names of the tests that must support it before it may be named the cause: its definition.
    While one of them is unknown, other support makes it possible at most."""
    mechanisms: Mapping[str, str] = field(default_factory=dict)
    """Alias to the name of the one test that speaks of that narrower mechanism alone: when the
    test contradicts, a hunch by that alias is ruled out even while the mode is not."""
    version: str = ""
    """A hash of the code it is made of; part of a diagnosis's knowledge version."""
    split: Callable[[Facts, str], tuple[str | None, TestResult | None]] | None = None
    """A narrower name when evidence splits the family, with the test that did it."""
    implicates: Callable[[Facts, Change], TestResult | None] | None = None
    """Whether a ledger row belongs to this cause; None leaves it to the catalogue."""


@dataclass(frozen=True, slots=True)
class Hands:
    """What acts on a deployment: adapters by the name a member gives (`engine`, `supervisor`)."""

    deployment: Deployment
    engines: Mapping[str, Engine]
    routers: Mapping[str, Router]
    supervisors: Mapping[str, Supervisor]

    def engine(self, member: Member) -> Engine:
        """The adapter that speaks to this engine; raises `RefusedError` when there is none."""
        return _adapter(self.engines, member.engine, member, "engine")

    def router(self, member: Member) -> Router:
        """The adapter that speaks to this router; raises `RefusedError` when there is none."""
        return _adapter(self.routers, member.engine, member, "engine")

    def supervisor(self, member: Member) -> Supervisor:
        """Whoever starts and stops this member; raises `RefusedError` when nobody does."""
        return _adapter(self.supervisors, member.supervisor, member, "supervisor")


def _adapter(adapters: Mapping[str, T], name: str, member: Member, key: str) -> T:
    found = adapters.get(name)
    if found is None:
        raise RefusedError(
            f"{member.name} has {key} = {name!r}, and no such plug-in is here.",
            next_step=f"Set `{key}` of that member to one of: {', '.join(sorted(adapters))}.",
        )
    return found


Progress = Callable[[str], Awaitable[None] | None]
"""Told one sentence whenever something longer than two seconds goes on."""


async def say(tell: Progress, sentence: str) -> None:
    """Tell one sentence, whether the listener is a plain function or a coroutine."""
    told = tell(sentence)
    if inspect.isawaitable(told):
        await told


__all__ = [
    "Clock",
    "Completion",
    "Engine",
    "Hands",
    "Harvest",
    "Journal",
    "Mode",
    "Progress",
    "ReadsPages",
    "Router",
    "Scope",
    "Source",
    "Supervisor",
    "say",
]

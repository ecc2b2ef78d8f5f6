"""SGLang over HTTP: `ports.Engine` for SGLang, its forks, and engines that speak its protocol.

For: asking a member (metrics, loads, server information, health, bootstrap) and sending one request
through a pair directly. Not for: what names mean (`sglang_names.py`), what is known of versions and
flags (`sglang_traits.py`), how a pair is spoken to (`sglang_pair.py`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec

from tandem.engines import sglang_names as names
from tandem.engines import sglang_pair as pair
from tandem.engines import sglang_traits as knowledge
from tandem.fetch import PAGE_BYTES_MAX, Fetched, fetch, host_of
from tandem.ports import Completion, Harvest
from tandem.records import Member, Observation, Role, Trait
from tandem.records import vocabulary as v

INFO_EVERY_S = 30.0
"""`/server_info` asks every scheduler, so it is asked seldom; at once after a failed look."""

SLOW_S = 0.5
"""An answer that took longer is told as slow: something holds the process, or its interpreter."""

TRAITS_EVERY_S = 300.0
"""Traits are told again this often though nothing changed, so that every window holds them."""

BOOTSTRAP_QUERIES = (
    "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
    "engine_rank=-1&target_dp_group=-1&target_pp_rank=-1",  # 0.5.6
)


@dataclass(slots=True)
class _Memory:
    """What the adapter remembers of one member between looks."""

    told: knowledge.Told = field(default_factory=knowledge.Told)
    info_due_at: float = float("-inf")
    traits_due_at: float = float("-inf")
    traits_of: knowledge.Told | None = None


@dataclass(frozen=True, slots=True)
class _Loads:
    """What one look at the live loads gave."""

    path: str = ""
    """Who answered; empty when nobody did, and then `why` says so."""
    given: names.Live = field(default_factory=names.Live)
    why: str = ""
    latency_s: float = 0.0
    failed: bool = False
    """It could not be asked this time: slow, broken, or an error."""


class SglangEngine:
    """One adapter for all members of this family; remembers when it asked each for its info."""

    name = "sglang"

    def __init__(
        self, session: aiohttp.ClientSession, now: Callable[[], float] = time.time
    ) -> None:
        """`session` (see `tandem.fetch.session`) is the caller's to close; `now` is unix time."""
        self._session = session
        self._now = now
        self._memory: dict[str, _Memory] = {}

    async def observe(self, member: Member, timeout_s: float) -> Harvest:
        """Metrics and loads each time, server information when due; each failure is a record."""
        return await self._look(member, timeout_s, self._page(member, timeout_s))

    async def observe_live(self, member: Member, timeout_s: float) -> Harvest:
        """The same without the metrics page."""
        return await self._look(member, timeout_s, _nothing())

    @property
    def metric_names(self) -> tuple[str, ...]:
        """SGLang's names on the page."""
        return names.METRIC_NAMES

    def read_page(
        self, member: Member, page: bytes | None, at: float, *, why: str = ""
    ) -> tuple[Observation, ...]:
        """Counters, and those queue gauges that live loads were not seen to give."""
        got = Fetched(None if page is None else 200, page or b"", 0.0, why or None)
        seen = names.witness("metrics", member.name, at)
        frozen = self._memory.setdefault(member.name, _Memory()).told.frozen
        left = names.load_names(member.role) if frozen is None else sorted(frozen)
        reasons = dict.fromkeys(left, "no live endpoint gave it")
        found = _counters(member, got, seen)
        if got.ok:
            return (*found, *names.gauges(got.body, reasons, seen))
        return (*found, *(seen(name, missing=why) for name in reasons))

    async def _look(
        self, member: Member, timeout_s: float, asked: Awaitable[Fetched | None]
    ) -> Harvest:
        memory = self._memory.setdefault(member.name, _Memory())
        at = self._now()
        ask_info = at >= memory.info_due_at
        page, live, info = await asyncio.gather(
            asked,
            self._loads(member, timeout_s),
            self._info(member, timeout_s) if ask_info else _nothing(),
        )
        found = _counters(member, page, names.witness("metrics", member.name, at)) if page else []
        found += _queues(member, page, live, at)
        slow = names.witness("metrics", member.name, at)
        for path, latency_s in (
            ("/metrics", page.latency_s if page is not None and page.ok else 0.0),
            (live.path, live.latency_s),
        ):
            if latency_s >= SLOW_S:
                found.append(slow(v.ANSWER_S, round(latency_s, 3), label=path))
        told = memory.told
        if not live.failed:
            # A look that failed says nothing of what the engine can say.
            told = replace(told, frozen=frozenset(_left(member, live)))
        if info is not None:
            seen = names.witness("server_info", member.name, at)
            rows, told = _server_args(info, told, seen)
            found += [*rows, *_misstated(member, rows, seen)]
        answered = not live.failed if page is None else page.status is not None
        reached = answered and (info is None or info.status is not None)
        if not reached:
            memory.info_due_at = at
        elif ask_info:
            memory.info_due_at = at + INFO_EVERY_S
        memory.told = told
        return Harvest(tuple(found), self._traits(member, memory, at))

    def _traits(self, member: Member, memory: _Memory, at: float) -> tuple[Trait, ...]:
        """All traits when they changed or were last told long ago, else none."""
        if memory.traits_of == memory.told and at < memory.traits_due_at:
            return ()
        memory.traits_of = memory.told
        memory.traits_due_at = at + TRAITS_EVERY_S
        return knowledge.traits(member.name, member.role, memory.told, at)

    async def _page(self, member: Member, timeout_s: float) -> Fetched:
        """The metrics page, up to a bound."""
        return await fetch(
            self._session,
            _metrics_url(member),
            timeout_s=timeout_s,
            body_bytes_max=PAGE_BYTES_MAX,
            cut=True,
        )

    async def _loads(self, member: Member, timeout_s: float) -> _Loads:
        """Live queue counts, or why there are none."""
        path, read = "/v1/loads", names.loads
        query = f"{member.url}{path}?include=core,disagg"
        got = await fetch(self._session, query, timeout_s=timeout_s)
        if got.status == 404:
            path, read = "/get_load", names.old_loads
            got = await fetch(self._session, member.url + path, timeout_s=timeout_s)
            if got.status == 404:
                return _Loads(why="neither /v1/loads nor /get_load is there (HTTP 404)")
        if not got.ok:
            return _Loads(why=f"{path}: {got.why_not}", failed=True)
        try:
            return _Loads(path, read(got.body), latency_s=got.latency_s)
        except msgspec.DecodeError as error:
            return _Loads(why=f"{path}: {error}", failed=True)

    async def _info(self, member: Member, timeout_s: float) -> Fetched:
        got = await fetch(self._session, f"{member.url}/server_info", timeout_s=timeout_s)
        if got.status == 404:
            got = await fetch(self._session, f"{member.url}/get_server_info", timeout_s=timeout_s)
        return got

    async def health(self, member: Member, timeout_s: float) -> Harvest:
        """`/health` with its latency, and whether a prefill's rendezvous has every rank."""
        at = self._now()
        seen = names.witness("health", member.name, at)
        answer, rendezvous = await asyncio.gather(
            fetch(self._session, f"{member.url}/health", timeout_s=timeout_s),
            self._bootstrap(member, timeout_s) if member.role is Role.PREFILL else _nothing(),
        )
        found = [_health_status(answer, seen)]
        if answer.status is not None:
            found.append(seen(v.HEALTH_LATENCY_S, round(answer.latency_s, 4)))
        if rendezvous is not None:
            found.append(_bootstrap_ready(rendezvous, seen))
        return Harvest(tuple(found))

    async def ready(self, member: Member, timeout_s: float) -> bool:
        """Whether `/health` answers 200: loaded, warmed up, and a forward step just ran."""
        return (await fetch(self._session, f"{member.url}/health", timeout_s=timeout_s)).ok

    async def bootstrap_ready(self, member: Member, timeout_s: float) -> bool:
        """Whether the rendezvous answers the topology query: every prefill rank registered."""
        return (await self._bootstrap(member, timeout_s)).ok

    async def _bootstrap(self, member: Member, timeout_s: float) -> Fetched:
        root = f"http://{bracketed(host_of(member.url))}:{pair.bootstrap_port(member)}/route?"
        got = await fetch(self._session, root + BOOTSTRAP_QUERIES[0], timeout_s=timeout_s)
        if got.status == 400:
            got = await fetch(self._session, root + BOOTSTRAP_QUERIES[1], timeout_s=timeout_s)
        return got

    async def complete_direct(
        self,
        prefill: Member,
        decode: Member,
        *,
        prompt: str | Sequence[int],
        output_tokens: int,
        timeout_s: float,
        ranks: pair.Ranks = (None, None),
    ) -> Completion:
        """One greedy request to both sides with a fresh room; on timeout both are hung up on.

        `kv_moved` is True when the prefill answered (it does only after its hand-off succeeded)
        and its transfer counter grew meanwhile; None when that counter cannot be read.
        """
        before = await self._transfers(prefill, timeout_s)
        body = pair.generation(prompt, output_tokens)
        ended = await pair.dispatch(self._session, prefill, decode, body, timeout_s, ranks=ranks)
        completion = pair.completion(ended)
        if completion.status != "completed":
            return completion
        moved = await self._moved(prefill, before, timeout_s)
        return pair.with_kv_moved(completion, moved)

    async def _transfers(self, prefill: Member, timeout_s: float) -> float | None:
        """The prefill's transfer counter; None when it cannot be read, or this SGLang has none."""
        got = await self._page(prefill, min(timeout_s, 2.0))
        return names.transfers(got.body, cut=got.cut) if got.ok else None

    async def _moved(self, prefill: Member, before: float | None, timeout_s: float) -> bool | None:
        """Whether the counter grew; looked at a few times, because metrics lag behind replies."""
        if before is None:
            return None
        after: float | None = None
        for pause_s in (0.0, 0.05, 0.2):
            await asyncio.sleep(pause_s)
            after = await self._transfers(prefill, timeout_s)
            if after is not None and after != before:
                # A counter below what it was began anew: whatever it counts, it counted since.
                return after > 0
        return None if after is None else False

    async def score(
        self,
        prefill: Member,
        decode: Member,
        *,
        prompt: str,
        output_ids: Sequence[int],
        timeout_s: float,
    ) -> list[float] | None:
        """Gap of each output token to the best one under a fresh prefill of the whole text.

        Two requests through the pair: the first gives the prompt's ids as the engine makes them,
        the second scores prompt and output with `logprob_start_len` 0, which allows no prefix
        reuse at all. None when the engine's reply does not line up with the ids.
        """
        if not output_ids:
            return []
        deadline = time.monotonic() + timeout_s
        asked = pair.scoring(pair.generation(prompt, 1))
        ended = await pair.dispatch(self._session, prefill, decode, asked, timeout_s)
        prompt_ids = pair.prompt_ids(ended)
        left_s = deadline - time.monotonic()
        if prompt_ids is None or left_s <= 0:
            return None
        asked = pair.scoring(pair.generation([*prompt_ids, *output_ids], 1))
        ended = await pair.dispatch(self._session, prefill, decode, asked, left_s)
        return pair.gaps(ended, output_ids)


def _metrics_url(member: Member) -> str:
    return member.metrics_url or f"{member.url}/metrics"


async def _nothing() -> None:
    return None


def bracketed(host: str) -> str:
    """A host as it stands in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _counters(member: Member, page: Fetched, seen: names.Seen) -> list[Observation]:
    if page.ok:
        return names.counters(page.body, member, seen, cut=page.cut)
    why = f"/metrics: {page.why_not}"
    return [seen(name, missing=why) for name in names.wanted(names.COUNTERS, member.role)]


def _queues(member: Member, page: Fetched | None, live: _Loads, at: float) -> list[Observation]:
    """Queue counts: live ones, and from the metrics page what live loads do not give."""
    seen = names.witness("loads", member.name, at)
    left = _left(member, live)
    found = [seen(v.LIVE_LOADS, live.path) if live.path else seen(v.LIVE_LOADS, missing=live.why)]
    wanted = names.load_names(member.role)
    found += [seen(one, live.given.numbers[one]) for one in wanted if one not in left]
    if page is None:
        return found
    if not page.ok:
        return [*found, *(seen(name, missing=why) for name, why in left.items())]
    # A member that lacks /v1/loads has old gauges at least; a trait says that they freeze.
    page_says = names.witness("metrics", member.name, at)
    return found + names.gauges(page.body, left, page_says, cut=page.cut)


def _left(member: Member, live: _Loads) -> dict[str, str]:
    """The queue counts that live loads do not give, with the reason."""
    left: dict[str, str] = {}
    for name in names.load_names(member.role):
        last_batch = member.role is Role.PREFILL and name == v.RUNNING_REQS
        if live.why:
            left[name] = live.why
        elif last_batch:
            # It stays when nothing runs any more.
            left[name] = "a prefill's running requests are those of its last batch"
        elif name not in live.given.numbers:
            left[name] = f"{live.path}: {live.given.halves.get(name, 'does not give it')}"
    return left


def _server_args(
    info: Fetched, told: knowledge.Told, seen: names.Seen
) -> tuple[list[Observation], knowledge.Told]:
    if not info.ok:
        return [seen(v.SERVER_ARG, missing=f"/server_info: {info.why_not}")], told
    try:
        args = names.server_args(info.body)
    except msgspec.DecodeError as error:
        return [seen(v.SERVER_ARG, missing=f"/server_info: {error}")], told
    rows = [seen(v.SERVER_ARG, value, label=name) for name, value in args.items()]
    backend = args.get("disaggregation_transfer_backend")
    return rows, replace(told, version=args.get("version"), backend=backend)


def _misstated(
    member: Member, rows: Sequence[Observation], seen: names.Seen
) -> Iterator[Observation]:
    """That the server has other ranks than `tandem.toml` says: these are not probed apart."""
    sizes = {row.value for row in rows if row.name == v.SERVER_ARG and row.label == "dp_size"}
    for size in sizes - {str(member.dp_size)}:
        said = f"the server has {size} data-parallel ranks, tandem.toml says {member.dp_size}"
        yield seen(v.MISSTATED, said, label="dp_size")


def _health_status(answer: Fetched, seen: names.Seen) -> Observation:
    if answer.status is None:
        return seen(v.HEALTH_STATUS, missing=f"/health: {answer.why_not}")
    return seen(v.HEALTH_STATUS, answer.status)


def _bootstrap_ready(answer: Fetched, seen: names.Seen) -> Observation:
    if answer.status is None and not answer.refused:
        return seen(v.BOOTSTRAP_READY, missing=f"bootstrap /route: {answer.why_not}")
    return seen(v.BOOTSTRAP_READY, answer.ok)


__all__ = ["SglangEngine"]

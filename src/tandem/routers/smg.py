"""The Shepherd Model Gateway (`smg`, formerly `sglang-router`): `ports.Router` over HTTP.

For: its workers, breakers and counters in our vocabulary, and one request through it.
Not for: changing its workers, or judging it.

Seen with smg 1.13.0: `/health` is always 200; GETs of our own count in `smg_http_requests_total`,
so only inference paths are counted here; a client that left counts as a response with status 499;
a hung request has no response, only `smg_worker_requests_active` and requests minus responses show
it; an open breaker leaves `/workers` and `/readiness` healthy and shows in `smg_worker_cb_state`;
ages of open requests come in buckets from 30 s on, and only some seconds after its start.
"""

import asyncio
import contextlib
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import msgspec

from tandem.fetch import PAGE_BYTES_MAX, Fetched, address, fetch
from tandem.ports import Completion, Harvest
from tandem.records import Member, Observation, Role, Value
from tandem.records import vocabulary as v
from tandem.scan import Sample, Scanner

INFERENCE_PATHS = frozenset(
    {
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/rerank",
        "/v1/embeddings",
    }
)

_REQUESTS = "smg_http_requests_total"
_RESPONSES = "smg_http_responses_total"
_ACTIVE = "smg_worker_requests_active"
_BREAKER = "smg_worker_cb_state"
_BREAKER_OPEN = 1.0
"""0 is closed; a half-open one (2) lets a request through."""
_AGES = "smg_http_inflight_request_age_count"
"""Open requests by age; not cumulative: each is in the one bucket `gt` to `le` (seconds)."""
METRIC_NAMES = (_REQUESTS, _RESPONSES, _ACTIVE, _BREAKER, _AGES)
SCANNER = Scanner(METRIC_NAMES)

_COUNTED = (
    v.ROUTER_REQUESTS_TOTAL,
    v.ROUTER_RESPONSES_TOTAL,
    v.ROUTER_ACTIVE_REQS,
    v.ROUTER_REQUEST_AGE_S,
)


class _Worker(msgspec.Struct):
    url: str
    is_healthy: bool
    worker_type: str = ""
    load: int = 0
    status: str = ""


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class _Readiness(msgspec.Struct):
    status: str = ""


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    finish_reason: dict[str, object] | None = None


class _Generated(msgspec.Struct):
    """A `/generate` reply."""

    text: str = ""
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Chatted(msgspec.Struct):
    """A `/v1/chat/completions` reply."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Models(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model] = []


class SmgRouter:
    """One adapter for all routers of this family; `members` names its workers in our words."""

    name = "smg"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        members: Sequence[Member] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        """`session` is the caller's to close; `members` are those of the deployment."""
        self._session = session
        self._now = now
        self._workers_of = {
            address(member.url): member for member in members if member.role is not Role.ROUTER
        }
        self._models: dict[str, str] = {}

    def _label(self, url: str) -> str:
        """The member behind a worker's URL, or the URL when no member has it."""
        member = self._workers_of.get(address(url))
        return url if member is None else member.name

    async def observe(self, member: Member, timeout_s: float) -> Harvest:
        """Workers and counters at once; a source that does not answer is a record."""
        seen = _witness(member, self._now())
        workers, page = await asyncio.gather(
            fetch(self._session, f"{member.url}/workers", timeout_s=timeout_s),
            fetch(
                self._session,
                _metrics_url(member),
                timeout_s=timeout_s,
                body_bytes_max=PAGE_BYTES_MAX,
                cut=True,
            ),
        )
        return Harvest((*self._workers(workers, seen), *self._counters(page, seen)))

    async def observe_live(self, member: Member, timeout_s: float) -> Harvest:
        """Its workers; without the metrics page."""
        seen = _witness(member, self._now())
        workers = await fetch(self._session, f"{member.url}/workers", timeout_s=timeout_s)
        return Harvest(tuple(self._workers(workers, seen)))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The router's names on its page."""
        return METRIC_NAMES

    def read_page(
        self, member: Member, page: bytes | None, at: float, *, why: str = ""
    ) -> tuple[Observation, ...]:
        """Requests, responses, active requests and breakers."""
        got = Fetched(None if page is None else 200, page or b"", 0.0, why or None)
        return tuple(self._counters(got, _witness(member, at)))

    def _workers(self, got: Fetched, seen: Callable[..., Observation]) -> list[Observation]:
        if not got.ok:
            return [seen(v.WORKER_HEALTHY, missing=f"/workers: {got.why_not}")]
        try:
            listed = msgspec.json.decode(got.body, type=_Workers).workers
        except msgspec.DecodeError as error:
            return [seen(v.WORKER_HEALTHY, missing=f"/workers: {error}")]
        found = [
            seen(v.WORKER_HEALTHY, worker.is_healthy, label=self._label(worker.url))
            for worker in listed
        ]
        found += [
            seen(v.WORKER_STATUS, worker.status, label=self._label(worker.url))
            for worker in listed
            if worker.status
        ]
        known = {address(worker.url) for worker in listed}
        return found + [
            # The router was told of it, or we were, and it does not have it.
            seen(v.WORKER_HEALTHY, missing="the router does not list it", label=ours.name)
            for url, ours in self._workers_of.items()
            if url not in known
        ]

    def _counters(self, got: Fetched, seen: Callable[..., Observation]) -> list[Observation]:
        if not got.ok:
            return [seen(name, missing=f"router metrics: {got.why_not}") for name in _COUNTED]
        read, beyond = SCANNER.scan_page(got.body, cut=got.cut)
        samples = [one for one in read if math.isfinite(one.value)]
        if not samples:
            # A page without one of its series is no router's: nought would be a claim.
            why = f"router metrics: {beyond or 'the page has no series of this router'}"
            return [seen(name, missing=why) for name in _COUNTED]
        found = [
            _inference(samples, theirs, beyond, functools.partial(seen, ours))
            for ours, theirs in (
                (v.ROUTER_REQUESTS_TOTAL, _REQUESTS),
                (v.ROUTER_RESPONSES_TOTAL, _RESPONSES),
            )
        ]
        found.append(_oldest(samples, beyond, functools.partial(seen, v.ROUTER_REQUEST_AGE_S)))
        for status, count in _by_status(samples).items():
            found.append(seen(v.ROUTER_RESPONSES_TOTAL, count, label=status))
        active: dict[str, int] = defaultdict(int)
        for sample in samples:
            url = sample.labels.get("worker", "")
            if sample.name == _ACTIVE:
                count = int(sample.value)
                found.append(seen(v.WORKER_ACTIVE_REQS, count, label=self._label(url)))
                member = self._workers_of.get(address(url))
                active[member.role if member else url] += count
            elif sample.name == _BREAKER:
                open_ = sample.value == _BREAKER_OPEN
                found.append(seen(v.WORKER_BREAKER_OPEN, open_, label=self._label(url)))
        if not active:
            none = beyond or "the router counts no worker's requests"
            return [*found, seen(v.ROUTER_ACTIVE_REQS, missing=none)]
        # A request is counted at its prefill and at its decode: the fuller role has them all.
        return [*found, seen(v.ROUTER_ACTIVE_REQS, max(active.values()))]

    async def ready(self, member: Member, timeout_s: float) -> bool:
        """Whether `/readiness` says ready: a healthy worker of each role is known."""
        got = await fetch(self._session, f"{member.url}/readiness", timeout_s=timeout_s)
        if not got.ok:
            return False
        try:
            return msgspec.json.decode(got.body, type=_Readiness).status == "ready"
        except msgspec.DecodeError:
            return False

    async def complete(
        self, member: Member, *, prompt: str, output_tokens: int, timeout_s: float, chat: bool
    ) -> Completion:
        """One greedy request of full length; on timeout the connection is closed, which aborts it.

        `ignore_eos`: a model that has nothing to say would look like one that lost its answer.
        """
        began = time.monotonic()
        path = "/v1/chat/completions" if chat else "/generate"
        body: dict[str, object]
        if chat:
            body = {
                "model": await self._model(member, timeout_s),
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": False,
            }
        else:
            body = {
                "text": prompt,
                "sampling_params": {
                    "max_new_tokens": output_tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                },
                "stream": False,
            }
        left_s = max(0.001, timeout_s - (time.monotonic() - began))
        got = await fetch(self._session, member.url + path, json=body, timeout_s=left_s)
        latency_s = time.monotonic() - began
        if got.timed_out:
            return Completion(status="timed_out", latency_s=latency_s, detail=got.why_not)
        if not got.ok:
            said = got.body[:200].decode(errors="replace").strip()
            detail = f"{got.why_not}: {said}" if said else got.why_not
            return Completion(status="failed", latency_s=latency_s, detail=detail)
        return _completion(got.body, latency_s, chat=chat)

    async def _model(self, member: Member, timeout_s: float) -> str:
        """The first model the router serves; asked once, `default` when it does not say."""
        if member.name not in self._models:
            got = await fetch(self._session, f"{member.url}/v1/models", timeout_s=timeout_s)
            try:
                served = msgspec.json.decode(got.body, type=_Models).data
            except msgspec.DecodeError:
                served = []
            if not served:
                return "default"
            self._models[member.name] = served[0].id
        return self._models[member.name]


def _witness(member: Member, at: float) -> Callable[..., Observation]:
    """Makes a maker of observations of this router: `seen(name, value, label=, missing=)`."""

    def seen(
        name: str, value: Value = None, *, label: str = "", missing: str | None = None
    ) -> Observation:
        return Observation(
            source="router",
            subject=member.name,
            name=name,
            at=at,
            label=label,
            value=value,
            missing=missing,
        )

    return seen


def _metrics_url(member: Member) -> str:
    return member.metrics_url or f"{member.url}/metrics"


def _by_status(samples: Sequence[Sample]) -> dict[str, int]:
    """Responses on inference paths by status code; 499 is a client that left."""
    counts: dict[str, int] = defaultdict(int)
    for sample in samples:
        if sample.name == _RESPONSES and sample.labels.get("path") in INFERENCE_PATHS:
            counts[sample.labels.get("status_code", "")] += int(sample.value)
    return dict(sorted(counts.items()))


def _inference(
    samples: Sequence[Sample], name: str, beyond: str, seen: Callable[..., Observation]
) -> Observation:
    """The sum of a counter over inference paths; 0 before the first request."""
    ours = [sample for sample in samples if sample.name == name]
    if beyond and not ours:
        return seen(missing=beyond)
    counted = (one.value for one in ours if one.labels.get("path") in INFERENCE_PATHS)
    return seen(int(sum(counted)))


def _oldest(
    samples: Sequence[Sample], beyond: str, seen: Callable[..., Observation]
) -> Observation:
    """Seconds that the oldest open request has passed, as coarse as the router's buckets."""
    buckets = [sample for sample in samples if sample.name == _AGES]
    if not buckets:
        return seen(missing=beyond or "the router shows no ages of open requests (yet)")
    passed = []
    for bucket in buckets:
        with contextlib.suppress(KeyError, ValueError):
            if bucket.value > 0:
                passed.append(float(bucket.labels["gt"]))
    return seen(max(passed, default=0.0))


def _completion(body: bytes, latency_s: float, *, chat: bool) -> Completion:
    try:
        if chat:
            chatted = msgspec.json.decode(body, type=_Chatted)
            return Completion(
                status="completed",
                text="".join(choice.message.content or "" for choice in chatted.choices),
                latency_s=latency_s,
                prompt_tokens=chatted.usage.prompt_tokens if chatted.usage else 0,
            )
        reply = msgspec.json.decode(body, type=_Generated)
    except msgspec.DecodeError as error:
        detail = f"answered something else: {error}"
        return Completion(status="failed", latency_s=latency_s, detail=detail)
    reason: Mapping[str, object] = reply.meta_info.finish_reason or {}
    if reason.get("type") == "abort":
        detail = f"aborted: {reason.get('message', 'no reason given')}"
        return Completion(status="failed", latency_s=latency_s, detail=detail)
    return Completion(
        status="completed",
        text=reply.text,
        token_ids=tuple(reply.output_ids),
        latency_s=latency_s,
        prompt_tokens=reply.meta_info.prompt_tokens,
    )


__all__ = ["SmgRouter"]

"""Metrics of all members from a Prometheus server, instead of one scrape of each.

A range of raw samples is asked for, many members at a time: unlike an instant value these have the
time of their scrape, which becomes the observation's time. All samples of one scrape share it, `up`
included, so a series that is older than its target's newest sample is gone from the page, and one
that has no newer sample says nothing new. Nothing is ever repeated: a frozen value is no value.

For: pages of members as Prometheus last scraped them, read by the members' adapters.
Not for: what a series means (`engines/`, `routers/`), live queues or health: those are asked for.
"""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tandem.collect.incarnations import Incarnations
from tandem.fetch import fetch
from tandem.ports import Harvest, ReadsPages
from tandem.records import Member, Observation

TIMEOUT_S = 5.0
MEMBERS_PER_QUERY = 200
QUERIES_AT_ONCE = 4
ANSWER_BYTES_MAX = 32 * 1024 * 1024
RARE_EVERY_S = 30.0
"""Buckets of histograms are most of a page, and change what is known of it slowly."""
LEARN_WINDOW_S = 150.0
"""How far back `up` alone is asked for, to learn how often targets are scraped: every minute or
more often."""
UNKNOWN_WINDOW_S = 60.0
"""How far back is asked while that is not known."""
SCRAPES = 2.5
"""How many scrapes a window holds: one may be missed before a member is called missing."""
WINDOW_S_MIN = 4.0
SINCE_S_MAX = 10.0
"""How much of a gap between two looks is asked for."""
SAME_SCRAPE_S = 0.005
UP = "up"

Token = Callable[[], str]
"""Gives the bearer token, empty for none; raises `OSError` when it cannot be read."""
Key = tuple[str, ...]


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Series] = []


class _Answer(msgspec.Struct):
    """The reply of `/api/v1/query` to a range of raw samples."""

    status: str = ""
    data: _Data = msgspec.field(default_factory=_Data)
    error: str = ""


@dataclass(slots=True)
class _Scraped:
    """One member as Prometheus has it: its series by target, and the newest moment."""

    targets: set[tuple[str, str]] = field(default_factory=set)
    series: list[_Series] = field(default_factory=list)
    at: float = float("-inf")
    up_at: float | None = None
    up: bool = True


class PrometheusSource:
    """All members whose adapters read pages, in a few queries per look."""

    def __init__(
        self,
        url: str,
        members: Sequence[tuple[Member, ReadsPages]],
        session: aiohttp.ClientSession,
        incarnations: Incarnations,
        *,
        interval_s: float = 1.0,
        token: Token = str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`url` is the server's root, a path prefix included."""
        self.name = "prometheus"
        self.interval_s = interval_s
        self.timeout_s = TIMEOUT_S + 2.0
        self._url = f"{url.rstrip('/')}/api/v1/query"
        self._session = session
        self._incarnations = incarnations
        self._token = token
        self._now = now
        self._given: dict[str, float] = {}
        """By member, the moment of the newest scrape that was given."""
        self._looked_at: float | None = None
        self._chunks = list(_chunks(members))
        self._busy = asyncio.Semaphore(QUERIES_AT_ONCE)

    async def collect(self) -> Harvest:
        """Look once at everybody; what could not be asked is missing for each it was asked for."""
        now = self._now()
        since_s = 0.0 if self._looked_at is None else min(now - self._looked_at, SINCE_S_MAX)
        self._looked_at = now
        found = await asyncio.gather(*(self._chunk(chunk, now, since_s) for chunk in self._chunks))
        rows = tuple(seen for each in found for seen in each)
        return self._incarnations.stamped(Harvest(rows))

    async def _chunk(self, chunk: "_Chunk", now: float, since_s: float) -> list[Observation]:
        # Until each has had a new page with all of it: not every look comes after a scrape.
        rare = any(now >= who.rare_due_at for who in chunk.members.values())
        if chunk.scrapes_s is None or now >= chunk.learn_at:
            answer = await self._ask(chunk.query([UP], LEARN_WINDOW_S))
            if isinstance(answer, str):
                return chunk.missing(answer, now)
            chunk.learn(answer)
            chunk.learn_at = now + RARE_EVERY_S
        window_s = chunk.window_s(since_s)
        answer = await self._ask(chunk.query(chunk.all if rare else chunk.often, window_s))
        if isinstance(answer, str):
            return chunk.missing(answer, now)
        scraped = chunk.sorted(answer)
        rows: list[Observation] = []
        for key, who in chunk.members.items():
            one = scraped.get(key)
            if one is None:
                rows += _missing(who, chunk.no_sample(key, window_s), now)
            else:
                new = self._member(who, one, now)
                who.rare_due_at = now + RARE_EVERY_S if new and rare else who.rare_due_at
                rows += new
        return rows

    async def _ask(self, query: str) -> list[_Series] | str:
        """The series of one query, or one clause saying why there are none."""
        try:
            token = await asyncio.to_thread(self._token)
        except OSError as error:
            return f"Prometheus: its token cannot be read: {error.strerror or error}"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self._busy:
            got = await fetch(
                self._session,
                self._url,
                timeout_s=TIMEOUT_S,
                form={"query": query},
                headers=headers,
                body_bytes_max=ANSWER_BYTES_MAX,
            )
        try:
            answer = msgspec.json.decode(got.body, type=_Answer) if got.body else _Answer()
        except (msgspec.DecodeError, UnicodeDecodeError):
            answer = _Answer(error="it answered something else than its API's JSON")
        if got.ok and answer.status == "success":
            return answer.data.result
        why = got.why_not if not got.ok else ""
        said = "; ".join(part for part in (why, answer.error[:200]) if part)
        return f"Prometheus: {said or 'it gave no answer'}"

    def _member(self, who: "_Who", scraped: _Scraped, now: float) -> Sequence[Observation]:
        if len(scraped.targets) > 1:
            told = ", ".join(f"{job} {instance}" for job, instance in sorted(scraped.targets)[:3])
            why = f"Prometheus has {len(scraped.targets)} targets for it ({told})"
            return _missing(who, f"{why}: narrow its metrics_labels", now)
        if scraped.at <= self._given.get(who.member.name, float("-inf")):
            return ()  # nothing has been scraped since
        self._given[who.member.name] = scraped.at
        if not scraped.up:
            return _missing(who, "Prometheus could not scrape it (up is 0)", scraped.at)
        return who.reader.read_page(who.member, _page(scraped), scraped.at)


@dataclass(slots=True)
class _Who:
    """A member, the adapter that reads its page, and when its buckets are due."""

    member: Member
    reader: ReadsPages
    rare_due_at: float = float("-inf")


class _Chunk:
    """Members that are asked for in one query: their matchers have the same labels."""

    def __init__(self, labels: Key, members: dict[Key, _Who]) -> None:
        self.labels = labels
        self.members = members
        names = sorted({name for one in members.values() for name in one.reader.metric_names})
        self.often = [UP, *(name for name in names if not name.endswith("_bucket"))]
        self.all = [UP, *names]
        self.scrapes_s: float | None = None
        """How often its slowest target is scraped; None while nobody knows."""
        self.learn_at = float("-inf")
        self._of_whom = "".join(
            f",{label}=~{_quoted('|'.join(sorted({_literal(key[place]) for key in members})))}"
            for place, label in enumerate(labels)
        )

    def query(self, names: Sequence[str], window_s: float) -> str:
        """Every raw sample that these members have of these names in the last seconds."""
        wanted = _quoted("|".join(names))
        return f"{{__name__=~{wanted}{self._of_whom}}}[{round(window_s * 1000)}ms]"

    def learn(self, ups: Sequence[_Series]) -> None:
        """Learn how often its targets are scraped; those that were scraped once tell nothing."""
        steps_s = [
            median(later[0] - earlier[0] for earlier, later in pairwise(series.values))
            for series in ups
            if len(series.values) > 1
        ]
        self.scrapes_s = max(steps_s, default=None)

    def window_s(self, since_s: float) -> float:
        """How far back to ask: every scrape since the last look, and enough to miss one."""
        if self.scrapes_s is None:
            return UNKNOWN_WINDOW_S
        return max(SCRAPES * self.scrapes_s + since_s, WINDOW_S_MIN)

    def missing(self, why: str, at: float) -> list[Observation]:
        """Nothing was seen of any of them, and why."""
        return [seen for who in self.members.values() for seen in _missing(who, why, at)]

    def no_sample(self, key: Key, window_s: float) -> str:
        """Why there is nothing of a member that Prometheus was asked for."""
        named = ", ".join(f'{a}="{b}"' for a, b in zip(self.labels, key, strict=True))
        return f"Prometheus has no sample of {{{named}}} in the last {window_s:.0f} s"

    def sorted(self, answer: Sequence[_Series]) -> dict[Key, _Scraped]:
        """The series of each member, by what its matchers say; others are left out."""
        found: dict[Key, _Scraped] = defaultdict(_Scraped)
        for series in answer:
            key = tuple(series.metric.get(label, "") for label in self.labels)
            if key not in self.members or not series.values:
                continue
            one = found[key]
            target = (series.metric.get("job", ""), series.metric.get("instance", ""))
            one.targets.add(target)
            one.series.append(series)
            at, value = series.values[-1]
            one.at = max(one.at, at)
            if series.metric.get("__name__") == UP and (one.up_at is None or at >= one.up_at):
                one.up_at, one.up = at, value != "0"
        return found


def _chunks(members: Sequence[tuple[Member, ReadsPages]]) -> Iterator[_Chunk]:
    """All members, by the labels of their matchers and the kind of their adapter, in bounds."""
    groups: dict[tuple[Key, str], dict[Key, _Who]] = defaultdict(dict)
    for member, reader in members:
        matchers = member.metrics_labels or {"instance": _instance(member)}
        labels = tuple(sorted(matchers))
        key = tuple(matchers[label] for label in labels)
        groups[labels, member.engine][key] = _Who(member, reader)
    for (labels, _), found in groups.items():
        keys = list(found)
        for start in range(0, len(keys), MEMBERS_PER_QUERY):
            some = keys[start : start + MEMBERS_PER_QUERY]
            yield _Chunk(labels, {key: found[key] for key in some})


def _instance(member: Member) -> str:
    """How Prometheus names a target that nobody relabelled: host and port of its page."""
    return urlsplit(member.metrics_url or member.url).netloc


def _page(scraped: _Scraped) -> bytes:
    """The newest scrape as the page it was; what is not from it is gone from the page."""
    slack_s = SAME_SCRAPE_S if scraped.up_at is not None else 1.0
    lines = [
        f"{series.metric.get('__name__', '')}{_labels(series.metric)} {series.values[-1][1]}\n"
        for series in scraped.series
        if series.values[-1][0] >= scraped.at - slack_s
    ]
    return "".join(lines).encode(errors="replace")


def _labels(metric: Mapping[str, str]) -> str:
    pairs = ",".join(
        f'{name}="{_escaped(value)}"' for name, value in metric.items() if name != "__name__"
    )
    return f"{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _literal(value: str) -> str:
    """A value as an expression that matches it alone."""
    return re.sub(r"([^A-Za-z0-9_\-: /\x80-\U0010ffff])", r"\\\1", value)


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _missing(who: _Who, why: str, at: float) -> Sequence[Observation]:
    return who.reader.read_page(who.member, None, at, why=why)


__all__ = ["PrometheusSource"]

"""Path probes: a tiny real request per path, sent so that it cannot do harm.

For: the client's side of the truth, per cell directly and once through the router, unpinned; with
data-parallel ranks, per pair of ranks. Not for: load, or proof of a repair (verify).

The rules (docs/operating/probes.md): fresh random text longer than one KV page, so that KV really
moves, and a long one once a member of the path was restarted; an answer without KV seen to move is
no proof. A missed deadline leaves the request open, and that path is not probed again until its
room is seen released or a member of it began another life: at most one stuck probe per path and
life. Where abandoning a request is unsafe or nobody knows, nothing is sent, and the row says why.
Real traffic that completed on a path stands in for its probe.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.collect.incarnations import Incarnations
from tandem.collect.known import Answers, known_text
from tandem.collect.paths import CellWord, Held, Knows, Left, Released, Safety, Tokens, left_open
from tandem.collect.words import fresh_text
from tandem.ports import Clock, Completion, Engine, Harvest, Router
from tandem.records import (
    Deployment,
    Member,
    Observation,
    Path,
    ProbeSettings,
    Role,
    Value,
)
from tandem.records import vocabulary as v

SOON_S = 1.0
"""How soon to try again while nobody told yet whether probing is safe, or traffic stands in."""

HOLD_S = 3600.0
"""How long a late probe is kept open when nothing ends it; after that it is abandoned."""

SLICE_S = 1.0
PAUSED_S = 2.0
"""A second that took this much longer was none of the path's: Tandem itself was stopped, or
starved, and could not have read an answer."""

LONG_PAGES = 4
LONG_PATIENCE = 3.0
"""How many deadlines a long probe has: its prompt takes longer to compute."""
PER_RANK = 4
"""Probes that one rank of a member takes part in per interval: in a larger matrix each path is
probed more rarely."""
PER_SECOND = 20.0
"""Probes that one Tandem sends at most, on average, however large the matrix."""
PAGE_MARGIN_TOKENS = 8
"""A prompt is this much longer than one KV page."""

TOKEN_SHARE = 0.0004
"""Of what a path at work computes, what its probe may cost: with the routed one under 0.1 %."""

Send = Callable[[str], Awaitable[Completion]]


@dataclass(slots=True)
class _Out:
    """A probe on its way."""

    task: "asyncio.Task[Completion]"
    sent_at: float
    lives: tuple[str | None, ...]
    tokens: int
    due_at: float
    """When it is late; put off by as long as Tandem itself did not run."""
    long: bool = False
    known: bool = False
    late: bool = False


class ProbeSource:
    """One path (or the router): at most one probe out at a time."""

    def __init__(  # noqa: PLR0913 - a path, how to send on it, and what holds a probe back
        self,
        subject: str,
        ends: Sequence[str],
        send: Send,
        settings: ProbeSettings,
        clock: Clock,
        incarnations: Incarnations,
        *,
        knows: Knows,
        engines: Sequence[str] | None = None,
        cell: CellWord | None = None,
        rarer: int = 1,
        after_s: float = 0.0,
    ) -> None:
        """`ends` are the members whose restart frees the path; `engines` those that must be safe.

        `cell` gathers the words of paths that are ranks of one cell. In a large matrix a path is
        probed `rarer` than every interval, the first time `after_s` from now.
        """
        self.name = f"probe:{subject}"
        self.interval_s = max(SOON_S, after_s)
        self.timeout_s = LONG_PATIENCE * settings.deadline_s + 10.0
        self._subject = subject
        self._ends = tuple(ends)
        self._engines = tuple(ends if engines is None else engines)
        self._send = send
        self._settings = settings
        self._every_s = settings.interval_s * rarer
        self._begins_at = clock.now() + after_s
        self._clock = clock
        self._incarnations = incarnations
        self._knows = knows
        self._cell = cell
        self._out: _Out | None = None
        self._held = knows.left(subject, self._ends)
        self._known: tuple[str | None, ...] = (None,) * len(self._ends)
        self._owed: list[bool] = []
        """Probes that a restart asks for, whether each is a long one; traffic is none of them."""
        self._sent, self._tokens, self._sent_at = 0, 0, float("-inf")
        self._tokens_per_word = 1.0
        """As the answer to the last short probe says; vocabularies of bytes have five."""
        self._answers = Answers()

    async def collect(self) -> Harvest:
        """Settle the probe that is out, or send one and wait for it until its deadline."""
        if self._clock.now() < self._begins_at:
            self.interval_s = self._every_s
            return Harvest()
        self._note_restarts()
        settled: list[Observation] = []
        if self._out is not None:
            await self._until_deadline(self._out)
            settled = await self._settle(self._out)
            if self._out is not None:
                # Its end says that the path moves: that must not come late.
                self.interval_s = SOON_S
                return Harvest(tuple(settled))
        if (unknown := self._untold()) is not None:
            # Nothing seen is no "off": it must not hide what a probe said a moment ago.
            missing = f"nothing is known of {unknown} yet"
            return Harvest((*settled, self._row(v.PROBE, missing=missing)))
        if (reason := self._why_off()) is not None:
            return Harvest((*settled, *self._said("off", reason)))
        if self._held is not None and not self._is_free(self._held):
            return Harvest((*settled, *self._said("stuck", self._held.said)))
        self._held = None
        busy = self._knows.recently_completed(self._subject)
        dear = not self._owed and self._too_dear()
        if dear or (not self._owed and busy and not self._asks_known(busy=busy)):
            # Looked at again soon: when the traffic stops, the probe must not be late as well.
            self.interval_s = SOON_S
            return Harvest(tuple(settled))
        self._out = out = self._start(known=not self._owed and self._asks_known(busy=busy))
        await self._until_deadline(out)
        return Harvest((*settled, *await self._settle(out), *self._cost()))

    def _note_restarts(self) -> None:
        """Owe a short and a long probe once a member of the path began another life."""
        lives = tuple(zip(self._known, self._lives(), strict=True))
        restarted = any(None not in (then, now) and then != now for then, now in lives)
        self._known = tuple(then if now is None else now for then, now in lives)
        # Nobody can tell which cell a routed one would take.
        if restarted and self._engines == self._ends:
            self._owed = [False, True]

    def _untold(self) -> str | None:
        """The first engine whose safety nobody has told yet, or None."""
        if not self._settings.active:
            return None
        unknown = next((one for one in self._engines if self._knows.safety(one) is None), None)
        soon = unknown is not None or bool(self._owed)
        self.interval_s = SOON_S if soon else self._every_s
        return unknown

    def _why_off(self) -> str | None:
        """The reason to send nothing, or None."""
        if not self._settings.active:
            return "switched off: [probe] active = false"
        for name in self._engines:
            trait = self._knows.safety(name)
            if trait is not None and trait.value is not True:
                return f"unsafe at {name}: {trait.because}"
        return None

    def _is_free(self, held: Held) -> bool:
        """Whether nothing can be left of a probe that never got its answer."""
        return self._moved_on(held) or self._knows.released(self._engines, held.at)

    def _too_dear(self) -> bool:
        """Whether the path works, and a probe now would take more than its share of that."""
        budget_per_s = TOKEN_SHARE * self._knows.tokens_per_s(self._subject)
        cost = self._words(long=False) * self._tokens_per_word + self._settings.output_tokens
        return (self._clock.now() - self._sent_at) * budget_per_s < cost and budget_per_s > 0

    def _asks_known(self, *, busy: bool) -> bool:
        """Whether the known prompt is due; which cell a routed one would take nobody can tell."""
        return self._engines == self._ends and self._answers.due(self._clock.now(), busy=busy)

    def _start(self, *, known: bool) -> _Out:
        long = bool(self._owed) and self._owed[0]
        words = self._words(long=long)
        prompt = known_text(words) if known else fresh_text(words)
        if known:
            self._answers.asked(self._clock.now())

        async def sending() -> Completion:
            return await self._send(prompt)

        tokens = words + self._settings.output_tokens
        patience = LONG_PATIENCE if long else 1.0
        now = self._clock.now()
        self._sent, self._sent_at = self._sent + 1, now
        return _Out(
            asyncio.create_task(sending()),
            now,
            self._lives(),
            tokens,
            now + self._settings.deadline_s * patience,
            long,
            known,
        )

    def _words(self, *, long: bool) -> int:
        """How many words to send, about one token each: more than the largest page of the path."""
        pages = [self._knows.page_tokens(name) or 0 for name in self._engines]
        least = max(pages, default=0) + PAGE_MARGIN_TOKENS
        words = max(self._settings.prompt_tokens, least)
        if long:
            room = [self._knows.context_tokens(name) for name in self._engines]
            wanted = max(self._settings.long_prompt_tokens, LONG_PAGES * max(pages, default=0))
            wanted = min([wanted, *(one // 2 for one in room if one)])
            words = max(words, int(wanted / self._tokens_per_word))
        return words

    def _lives(self) -> tuple[str | None, ...]:
        return tuple(self._incarnations.of(name) for name in self._ends)

    async def _until_deadline(self, out: _Out) -> None:
        while not out.task.done() and (left_s := out.due_at - self._clock.now()) > 0:
            slice_s, began = min(left_s, SLICE_S), self._clock.now()
            waiting = asyncio.create_task(self._clock.sleep(slice_s))
            try:
                await asyncio.wait((out.task, waiting), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                paused_s = self._clock.now() - began - slice_s
                if paused_s > PAUSED_S:
                    out.due_at += paused_s

    async def _settle(self, out: _Out) -> list[Observation]:
        """What can be said of the probe now; a finished or freed one is out no longer."""
        if out.task.done():
            self._out = None
            return self._ended(out)
        if self._moved_on(out):
            await self._drop(out)
            self._tokens += out.tokens
            said = "given up: a member of its path was restarted"
            self._heard("given up")
            return [self._row(v.PROBE_DETAIL, said)]
        waited_s = self._clock.now() - out.sent_at
        word, out.late = ("stuck" if out.late else "late"), True
        return self._said(word, f"no answer for {waited_s:.1f} s; it is left open", long=out.long)

    def _moved_on(self, out: _Out | Held) -> bool:
        """Whether an end has another life than when the probe was sent; gone is not another."""
        lives = tuple(zip(out.lives, self._lives(), strict=True))
        # A life that was unknown then is the one learned first.
        out.lives = tuple(now if then is None else then for then, now in lives)
        return any(None not in (then, now) and then != now for then, now in lives)

    def _ended(self, out: _Out) -> list[Observation]:
        if out.task.cancelled() or out.task.exception() is not None:
            error = None if out.task.cancelled() else out.task.exception()
            said = f"could not be sent: {error!r}" if error else "was cancelled"
            end = Completion(status="failed", detail=said)
        else:
            end = out.task.result()
        self._tokens += end.prompt_tokens + len(end.token_ids) if end.token_ids else out.tokens
        if end.status != "completed":
            return self._failed(out, end)
        if not out.long:
            asked = out.tokens - self._settings.output_tokens
            self._tokens_per_word = max(1.0, end.prompt_tokens / asked)
        if self._owed and self._owed[0] == out.long:
            self._owed.pop(0)
            self.interval_s = SOON_S if self._owed else self._every_s
        rows = [
            self._row(v.PROBE_LATENCY_S, round(end.latency_s, 4), long=out.long),
            self._row(v.PROBE_TOKENS, end.prompt_tokens + len(end.token_ids), long=out.long),
        ]
        if out.known and end.token_ids:
            answers = self._answers.told(end.token_ids, out.lives)
            rows += [self._row(v.PROBE_ANSWERS, answers)] if answers else []
        if end.kv_moved is not None:
            rows.append(self._row(v.PROBE_KV_MOVED, end.kv_moved, long=out.long))
        elif self._subject not in self._ends:
            unread = "the transfer counter could not be read"
            rows.append(self._row(v.PROBE_KV_MOVED, missing=unread, long=out.long))
        if end.kv_moved is False:
            said = "it was answered, but no KV was seen to move"
            return [*self._said("unproven", said, long=out.long), *rows]
        return [*self._said("completed", "", long=out.long), *rows]

    def _failed(self, out: _Out, end: Completion) -> list[Observation]:
        said = end.detail or end.status
        if out.long and end.refused:
            # This size is refused, which says nothing of the path.
            self._owed.clear()
            return [
                self._row(v.PROBE, "failed", long=True),
                self._row(v.PROBE_DETAIL, said, long=True),
            ]
        if out.late or end.status == "timed_out":
            waited_s = self._clock.now() - out.sent_at
            why = f"it ended after {waited_s:.0f} s without an answer ({said}), and its room was "
            self._held = Held(self._clock.now(), out.lives, why + "not seen released")
        return self._said("failed", said, long=out.long)

    def _said(self, word: str, detail: str, *, long: bool = False) -> list[Observation]:
        """The rows of one word: of the path, of its long probe, and of the cell it is a part of."""
        rows = [self._row(v.PROBE, word)]
        if long:
            rows.append(self._row(v.PROBE, word, long=True))
        if detail:
            rows.append(self._row(v.PROBE_DETAIL, detail))
        return rows + self._heard(word, detail)

    def _heard(self, word: str, detail: str = "") -> list[Observation]:
        """What the cell says once this path of it said a word."""
        if self._cell is None:
            return []
        rows = [self._row(v.PROBE, self._cell.told(self._subject, word), of=self._cell.subject)]
        if detail:
            said = f"{self._subject}: {detail}"
            rows.append(self._row(v.PROBE_DETAIL, said, of=self._cell.subject))
        return rows

    def _cost(self) -> list[Observation]:
        """How many probes this source has sent, and what they cost so far."""
        return [
            self._row(v.PROBES_SENT_TOTAL, self._sent),
            self._row(v.PROBE_TOKENS_TOTAL, self._tokens),
        ]

    def _row(
        self,
        name: str,
        value: Value = None,
        *,
        missing: str | None = None,
        long: bool = False,
        of: str | None = None,
    ) -> Observation:
        return Observation(
            source="probe",
            subject=self._subject if of is None else of,
            name=name,
            at=self._clock.now(),
            label=v.LONG if long else "",
            value=value,
            missing=missing,
        )

    async def _drop(self, out: _Out) -> None:
        self._out = None
        out.task.cancel()
        await asyncio.wait((out.task,), timeout=5.0)

    async def close(self) -> None:
        """Hang up on the probe that is out."""
        if self._out is not None:
            await self._drop(self._out)


def probes(  # noqa: PLR0913 - a deployment, who speaks to it, and what is known of it
    deployment: Deployment,
    engines: Mapping[str, Engine],
    routers: Mapping[str, Router],
    settings: ProbeSettings,
    clock: Clock,
    incarnations: Incarnations,
    *,
    safety: Safety,
    recently_completed: Callable[[str], bool] = lambda _: False,
    released: Released = lambda _members, _since: False,
    page_tokens: Tokens = lambda _: None,
    context_tokens: Tokens = lambda _: None,
    left: Left = lambda _subject, _ends: None,
    tokens_per_s: Callable[[str], float] = lambda _: 0.0,
) -> list[ProbeSource]:
    """A source for every path of the matrix, and one through each router, unpinned.

    The routed one is labelled with the router's name, because nobody can tell which cell it took.
    """
    given = (settings, clock, incarnations)
    knows = Knows(
        safety,
        recently_completed,
        released,
        page_tokens,
        context_tokens,
        left,
        tokens_per_s,
    )
    found: list[ProbeSource] = []
    cells: dict[str, CellWord] = {}
    paths = deployment.paths()
    rarer = _rarer(deployment, len(paths), settings.interval_s)
    for number, path in enumerate(paths):
        prefill, decode = deployment.member(path.prefill), deployment.member(path.decode)
        if prefill is None or decode is None or prefill.engine not in engines:
            continue
        send = _direct(engines[prefill.engine], prefill, decode, path, settings)
        cell = Path(prefill=path.prefill, decode=path.decode).subject
        word = None
        if path.subject != cell:
            word = cells.setdefault(cell, CellWord(cell))
        # All at once would be a burst, and every round another.
        after_s = settings.interval_s * rarer * number / len(paths) if rarer > 1 else 0.0
        ends = (path.prefill, path.decode)
        source = ProbeSource(
            path.subject, ends, send, *given, knows=knows, cell=word, rarer=rarer, after_s=after_s
        )
        found.append(source)
    workers = [one.name for one in deployment.members if one.role is not Role.ROUTER]
    for router in deployment.of(Role.ROUTER):
        if router.engine in routers:
            send = _routed(routers[router.engine], router, settings)
            everyone = (router.name, *workers)
            found.append(
                ProbeSource(router.name, everyone, send, *given, knows=knows, engines=workers)
            )
    return found


def _rarer(deployment: Deployment, paths: int, interval_s: float) -> int:
    """In how many intervals each path is probed once, for nobody to be probed too often."""
    ranks = [
        sum(one.dp_size for one in deployment.of(role)) for role in (Role.PREFILL, Role.DECODE)
    ]
    return max(1, math.ceil(min(ranks) / PER_RANK), math.ceil(paths / (interval_s * PER_SECOND)))


def _direct(
    engine: Engine, prefill: Member, decode: Member, path: Path, settings: ProbeSettings
) -> Send:
    async def send(prompt: str) -> Completion:
        if path.prefill_dp is None and path.decode_dp is None:
            return await engine.complete_direct(
                prefill,
                decode,
                prompt=prompt,
                output_tokens=settings.output_tokens,
                timeout_s=HOLD_S,
            )
        return await engine.complete_direct(
            prefill,
            decode,
            prompt=prompt,
            output_tokens=settings.output_tokens,
            timeout_s=HOLD_S,
            ranks=(path.prefill_dp, path.decode_dp),
        )

    return send


def _routed(router: Router, member: Member, settings: ProbeSettings) -> Send:
    async def send(prompt: str) -> Completion:
        return await router.complete(
            member,
            prompt=prompt,
            output_tokens=settings.output_tokens,
            timeout_s=HOLD_S,
            chat=False,
        )

    return send


__all__ = ["Knows", "ProbeSource", "left_open", "probes"]

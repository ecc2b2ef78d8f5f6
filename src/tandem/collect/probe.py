"""Path probes: a tiny real request per path, sent so that it cannot do harm.

For: the client's side of the truth, per cell directly and once through the router, unpinned.
Not for: load, or proof of a repair (verify).

The rules (docs/design.md 4.1): fresh random text each time, so that KV really moves; a missed
deadline leaves the request open, and while it is open that path is not probed again: at most one
stuck probe per path and life of its members. Where abandoning a request is unsafe or nobody knows,
there is no probing, and the row says why. Real traffic that completed on a path stands in for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.collect.incarnations import Incarnations
from tandem.collect.words import fresh_text
from tandem.ports import Clock, Completion, Engine, Harvest, Router
from tandem.records import (
    Deployment,
    Member,
    Observation,
    ProbeSettings,
    Role,
    Trait,
    Value,
)
from tandem.records import vocabulary as v

SOON_S = 1.0
"""How soon to try again while nobody told yet whether probing is safe, or traffic stands in."""

HOLD_S = 3600.0
"""How long a late probe is kept open when nothing ends it; after that it is abandoned."""

Send = Callable[[str], Awaitable[Completion]]
Safety = Callable[[str], Trait | None]
"""The newest trait `T_ACTIVE_PROBE_SAFE` of a member, None before its adapter told."""


@dataclass(slots=True)
class _Out:
    """A probe on its way."""

    task: "asyncio.Task[Completion]"
    sent_at: float
    lives: tuple[str | None, ...]
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
        safety: Safety,
        engines: Sequence[str] | None = None,
        recently_completed: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`ends` are the members whose restart frees the path; `engines` those that must be safe.

        `recently_completed(subject)` says that real traffic just proved the path.
        """
        self.name = f"probe:{subject}"
        self.interval_s = SOON_S
        self.timeout_s = settings.deadline_s + 10.0
        self._subject = subject
        self._ends = tuple(ends)
        self._engines = tuple(ends if engines is None else engines)
        self._send = send
        self._settings = settings
        self._clock = clock
        self._incarnations = incarnations
        self._safety = safety
        self._recently_completed = recently_completed
        self._out: _Out | None = None

    async def collect(self) -> Harvest:
        """Settle the probe that is out, or send one and wait for it until its deadline."""
        settled: list[Observation] = []
        if self._out is not None:
            settled = await self._settle(self._out)
            if self._out is not None:
                return Harvest(tuple(settled))
        if (unknown := self._untold()) is not None:
            # Nothing seen is no "off": it must not hide what a probe said a moment ago.
            missing = f"nothing is known of {unknown} yet"
            return Harvest((*settled, self._row(v.PROBE, missing=missing)))
        reason = self._why_off()
        if reason is not None:
            return Harvest((*settled, self._row(v.PROBE, "off"), self._row(v.PROBE_DETAIL, reason)))
        if self._recently_completed(self._subject):
            # Looked at again soon: when the traffic stops, the probe must not be late as well.
            self.interval_s = SOON_S
            return Harvest(tuple(settled))
        self._out = out = self._start()
        await self._until_deadline(out)
        return Harvest((*settled, *await self._settle(out)))

    def _untold(self) -> str | None:
        """The first engine whose safety nobody has told yet, or None."""
        if not self._settings.active:
            return None
        unknown = next((name for name in self._engines if self._safety(name) is None), None)
        self.interval_s = SOON_S if unknown is not None else self._settings.interval_s
        return unknown

    def _why_off(self) -> str | None:
        """The reason to send nothing, or None."""
        if not self._settings.active:
            return "switched off: [probe] active = false"
        for name in self._engines:
            trait = self._safety(name)
            if trait is not None and trait.value is not True:
                return f"unsafe at {name}: {trait.because}"
        return None

    def _start(self) -> _Out:
        prompt = fresh_text(self._settings.prompt_tokens)

        async def sending() -> Completion:
            return await self._send(prompt)

        return _Out(asyncio.create_task(sending()), self._clock.now(), self._lives())

    def _lives(self) -> tuple[str | None, ...]:
        return tuple(self._incarnations.of(name) for name in self._ends)

    async def _until_deadline(self, out: _Out) -> None:
        waiting = asyncio.create_task(self._clock.sleep(self._settings.deadline_s))
        try:
            await asyncio.wait((out.task, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def _settle(self, out: _Out) -> list[Observation]:
        """What can be said of the probe now; a finished or freed one is out no longer."""
        if out.task.done():
            self._out = None
            return self._ended(out)
        if self._moved_on(out):
            await self._drop(out)
            said = "given up: a member of its path was restarted"
            return [self._row(v.PROBE_DETAIL, said)]
        waited_s = self._clock.now() - out.sent_at
        word, out.late = ("stuck" if out.late else "late"), True
        said = f"no answer for {waited_s:.1f} s; it is left open"
        return [self._row(v.PROBE, word), self._row(v.PROBE_DETAIL, said)]

    def _moved_on(self, out: _Out) -> bool:
        """Whether an end has another life than when the probe was sent; gone is not another."""
        lives = tuple(zip(out.lives, self._lives(), strict=True))
        # A life that was unknown then is the one learned first.
        out.lives = tuple(now if then is None else then for then, now in lives)
        return any(None not in (then, now) and then != now for then, now in lives)

    def _ended(self, out: _Out) -> list[Observation]:
        if out.task.cancelled() or out.task.exception() is not None:
            error = None if out.task.cancelled() else out.task.exception()
            said = f"could not be sent: {error!r}" if error else "was cancelled"
            return [self._row(v.PROBE, "failed"), self._row(v.PROBE_DETAIL, said)]
        end = out.task.result()
        if end.status != "completed":
            said = end.detail or end.status
            return [self._row(v.PROBE, "failed"), self._row(v.PROBE_DETAIL, said)]
        rows = [
            self._row(v.PROBE, "completed"),
            self._row(v.PROBE_LATENCY_S, round(end.latency_s, 4)),
            self._row(v.PROBE_TOKENS, end.prompt_tokens + len(end.token_ids)),
        ]
        if end.kv_moved is not None:
            rows.append(self._row(v.PROBE_KV_MOVED, end.kv_moved))
        elif self._subject not in self._ends:
            unread = "the transfer counter could not be read"
            rows.append(self._row(v.PROBE_KV_MOVED, missing=unread))
        return rows

    def _row(self, name: str, value: Value = None, *, missing: str | None = None) -> Observation:
        return Observation(
            source="probe",
            subject=self._subject,
            name=name,
            at=self._clock.now(),
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


def probes(
    deployment: Deployment,
    engines: Mapping[str, Engine],
    routers: Mapping[str, Router],
    settings: ProbeSettings,
    clock: Clock,
    incarnations: Incarnations,
    *,
    safety: Safety,
    recently_completed: Callable[[str], bool] = lambda _: False,
) -> list[ProbeSource]:
    """A source for every cell of the matrix, and one through each router, unpinned.

    The routed one is labelled with the router's name, because nobody can tell which cell it took.
    """
    found: list[tuple[str, tuple[str, ...], tuple[str, ...], Send]] = []
    for cell in deployment.cells():
        prefill, decode = deployment.member(cell.prefill), deployment.member(cell.decode)
        if prefill is None or decode is None or prefill.engine not in engines:
            continue
        send = _direct(engines[prefill.engine], prefill, decode, settings)
        ends = (cell.prefill, cell.decode)
        found.append((cell.subject, ends, ends, send))
    workers = [one.name for one in deployment.members if one.role is not Role.ROUTER]
    for router in deployment.of(Role.ROUTER):
        if router.engine in routers:
            send = _routed(routers[router.engine], router, settings)
            found.append((router.name, (router.name, *workers), tuple(workers), send))
    return [
        ProbeSource(
            subject,
            ends,
            send,
            settings,
            clock,
            incarnations,
            safety=safety,
            engines=asked,
            recently_completed=recently_completed,
        )
        for subject, ends, asked, send in found
    ]


def _direct(engine: Engine, prefill: Member, decode: Member, settings: ProbeSettings) -> Send:
    async def send(prompt: str) -> Completion:
        return await engine.complete_direct(
            prefill,
            decode,
            prompt=prompt,
            output_tokens=settings.output_tokens,
            timeout_s=HOLD_S,
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


__all__ = ["ProbeSource", "probes"]

"""What the GPUs of this host do, and for whom: utilisation, power, memory, clocks, driver errors.

For: a second look at whether a member computes at all. A GPU that one member has for itself is told
of that member, any other of the host. Not for: hosts without NVIDIA's driver, where one row says
so; Intel's and AMD's GPUs.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from tandem.collect.incarnations import Incarnations
from tandem.errors import WorldError
from tandem.facts import Facts
from tandem.nvml import Gpu, Nvml, Xid
from tandem.ports import Harvest
from tandem.records import Member, Observation, Value
from tandem.records import vocabulary as v

INTERVAL_S = 2.0
ABSENT_EVERY_S = 60.0
"""Where there is no driver, it is looked for this often, and nothing else is."""
ANSWER_S = 4.0
"""How long one look at all GPUs may take; a lost one may keep the driver for ever."""
SAMPLES_MAX = 600
SAMPLES_MIN = 15
"""Half a minute of one kind of power before it is called usual."""
IDLE_MAX = 0.0
BUSY_MIN = 0.5
BUSY_SHARE = 0.9
"""A GPU that spins without work is called busy as well: the high power is that of real work."""
DEPTH_MAX = 12
"""Generations between a member's process and one of its workers."""
HOST = "host"
SILENT = "the NVIDIA driver does not answer: the look at the GPUs did not end"


@dataclass(slots=True)
class _Learned:
    """Power seen of one GPU while idle and while busy, newest last."""

    idle_w: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    busy_w: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    before: dict[str, float] = field(default_factory=dict)
    """What was learned before this Tandem started, until there are samples enough."""

    def see(self, gpu: Gpu) -> None:
        """Learn from one look."""
        if gpu.utilization is None or gpu.power_w is None:
            return
        if gpu.utilization <= IDLE_MAX:
            self.idle_w.append(gpu.power_w)
        elif gpu.utilization >= BUSY_MIN:
            self.busy_w.append(gpu.power_w)

    def told(self) -> Iterator[tuple[str, float]]:
        """Idle and busy watts, as far as they are known, in whole watts."""
        for name, samples, share in (
            (v.GPU_IDLE_W, self.idle_w, 0.5),
            (v.GPU_BUSY_W, self.busy_w, BUSY_SHARE),
        ):
            if len(samples) >= SAMPLES_MIN:
                yield name, float(round(sorted(samples)[int(share * (len(samples) - 1))]))
            elif name in self.before:
                yield name, self.before[name]


class _Aside:
    """Calls that may never return: each in a thread of its own, one at a time, never waited for."""

    def __init__(self) -> None:
        self._under_way: concurrent.futures.Future[object] | None = None

    async def run(self, call: Callable[[], object], timeout_s: float) -> object:
        """What the call gives; raises `TimeoutError` when it, or the one before, has not ended."""
        if self._under_way is not None and not self._under_way.done():
            raise TimeoutError
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        self._under_way = future

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001
                # Whatever it was is raised again where the result is awaited.
                future.set_exception(error)

        # A daemon: a driver that hangs must not keep Tandem from ending.
        threading.Thread(target=work, name="tandem-gpu", daemon=True).start()
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout_s)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One look at all GPUs."""

    gpus: list[Gpu]
    driver: str | None
    xids: list[Xid]
    unheard: dict[int, str]


class GpuSource:
    """Every GPU of this host."""

    def __init__(
        self,
        members: Sequence[Member],
        incarnations: Incarnations,
        *,
        nvml: Nvml | None = None,
        known: Mapping[str, Mapping[str, float]] | None = None,
        answer_s: float = ANSWER_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`known` are idle and busy watts as last told, by GPU (`watts_known`)."""
        self.name = "gpu"
        self.interval_s = INTERVAL_S
        self.timeout_s = answer_s + 2.0
        self._members = members
        self._incarnations = incarnations
        self._nvml = nvml or Nvml()
        self._answer_s = answer_s
        self._now = now
        self._aside = _Aside()
        self._absent_until = float("-inf")
        self._reopen_at = float("-inf")
        self._learned = {
            label: _Learned(before=dict(watts)) for label, watts in (known or {}).items()
        }
        self._counts: dict[int, int] = {}
        self._present = False

    @property
    def present(self) -> bool:
        """Whether a GPU was seen: for whoever reads what the kernel says of it."""
        return self._present

    async def collect(self) -> Harvest:
        """Look once, aside; a driver that does not answer is a row and nothing more."""
        if self._now() < self._absent_until:
            return Harvest()
        try:
            seen = await self._aside.run(self._look, self._answer_s)
        except TimeoutError:
            return Harvest((self._row(HOST, v.GPU_COUNT, missing=SILENT),))
        except WorldError as error:
            self._absent_until = self._now() + ABSENT_EVERY_S
            return Harvest((self._row(HOST, v.GPU_COUNT, missing=error.clause),))
        if not isinstance(seen, _Seen):
            return Harvest()
        self._present = self._present or bool(seen.gpus)
        return Harvest(tuple(self._rows(seen)))

    async def close(self) -> None:
        """Let go of the driver, unless it hangs."""
        try:
            await self._aside.run(self._nvml.close, 1.0)
        except TimeoutError:
            return

    def _look(self) -> _Seen:
        gpus = self._nvml.look()
        if any(gpu.lost for gpu in gpus) and self._now() >= self._reopen_at:
            # One that was reset or replaced meanwhile is found by opening the driver anew.
            self._reopen_at = self._now() + ABSENT_EVERY_S
            self._nvml.close()
            gpus = self._nvml.look()
        xids, unheard = self._nvml.xids()
        return _Seen(gpus, self._nvml.driver(), xids, dict(unheard))

    def _rows(self, seen: _Seen) -> Iterator[Observation]:
        yield self._row(HOST, v.GPU_COUNT, len(seen.gpus))
        if seen.driver is not None:
            yield self._row(HOST, v.GPU_DRIVER, seen.driver)
        for gpu in seen.gpus:
            held = self._held(gpu)
            shared = not held or gpu.mig or gpu.mps or None in held
            owner = next((name for name in held if name), HOST) if len(held) == 1 else HOST
            yield from self._of_gpu(HOST if shared else owner, gpu)
            yield from self._of_members(gpu, held)
            yield from self._xids(HOST if shared else owner, gpu.index, seen)

    def _of_gpu(self, subject: str, gpu: Gpu) -> Iterator[Observation]:
        label = str(gpu.index)
        learned = self._learned.setdefault(label, _Learned())
        learned.see(gpu)

        def row(name: str, value: Value, asked: str) -> Observation:
            missing = None if value is not None else gpu.problems.get(asked, "the driver is silent")
            return self._row(subject, name, value, label=label, missing=missing)

        what = None if gpu.name is None else f"{gpu.name} ({gpu.uuid})"
        yield self._row(HOST, v.GPU_NAME, what, label=label, missing=gpu.problems.get("name"))
        yield row(v.GPU_UTILIZATION, gpu.utilization, "utilization")
        yield row(v.GPU_POWER_W, gpu.power_w, "power_w")
        yield row(v.GPU_MEMORY_USED_BYTES, gpu.memory_used_bytes, "memory_used_bytes")
        yield row(v.GPU_MEMORY_TOTAL_BYTES, gpu.memory_total_bytes, "memory_used_bytes")
        yield row(v.GPU_SM_CLOCK_MHZ, gpu.sm_clock_mhz, "sm_clock_mhz")
        yield row(v.GPU_SLOWDOWN, gpu.slowdown, "slowdown")
        for name, watts in learned.told():
            yield self._row(subject, name, watts, label=label)

    def _of_members(
        self, gpu: Gpu, held: Mapping[str | None, list[int | None]]
    ) -> Iterator[Observation]:
        """The memory of each member; and that a shared GPU says nothing of one of them."""
        label = str(gpu.index)
        ours = sorted(name for name in held if name is not None)
        for name in ours:
            known = [size for size in held[name] if size is not None]
            if len(known) == len(held[name]):
                yield self._row(name, v.GPU_MEMORY_BYTES, sum(known), label=label)
            else:
                why = "the driver does not tell it by process"
                yield self._row(name, v.GPU_MEMORY_BYTES, label=label, missing=why)
            if gpu.mig or gpu.mps or len(held) > 1:
                others = [other or "another process" for other in held if other != name]
                why = gpu.problems.get(
                    "utilization", f"the GPU is shared with {', '.join(sorted(others))}"
                )
                yield self._row(name, v.GPU_UTILIZATION, label=label, missing=why)

    def _xids(self, subject: str, index: int, seen: _Seen) -> Iterator[Observation]:
        label = str(index)
        for xid in seen.xids:
            if xid.gpu == index:
                self._counts[index] = self._counts.get(index, 0) + 1
                yield self._row(subject, v.GPU_XID, xid.number, label=label)
        why = seen.unheard.get(index)
        count = None if why else self._counts.get(index, 0)
        yield self._row(subject, v.GPU_XIDS_TOTAL, count, label=label, missing=why)

    def _held(self, gpu: Gpu) -> dict[str | None, list[int | None]]:
        """The memory of each process on a GPU, by the member it is of; None is nobody's."""
        pids = {
            pid: one.name
            for one in self._members
            if (pid := self._incarnations.pid(one.name)) is not None
        }
        found: dict[str | None, list[int | None]] = {}
        for use in gpu.uses or ():
            found.setdefault(_member_of(use.pid, pids), []).append(use.memory_bytes)
        return found

    def _row(
        self,
        subject: str,
        name: str,
        value: Value = None,
        *,
        label: str = "",
        missing: str | None = None,
    ) -> Observation:
        return Observation(
            source="gpu",
            subject=subject,
            name=name,
            at=self._now(),
            label=label,
            value=value,
            missing=missing,
            incarnation=self._incarnations.of(subject),
        )


def _member_of(pid: int, members: Mapping[int, str]) -> str | None:
    """The member of whose process tree a process is."""
    try:
        process: psutil.Process | None = psutil.Process(pid)
        for _ in range(DEPTH_MAX):
            if process is None:
                return None
            if process.pid in members:
                return members[process.pid]
            process = process.parent()
    except psutil.Error:
        return None
    return None


def watts_known(facts: Facts) -> dict[str, dict[str, float]]:
    """Idle and busy watts by GPU as the store last had them: learned once, not at every start."""
    found: dict[str, dict[str, float]] = {}
    for name in (v.GPU_IDLE_W, v.GPU_BUSY_W):
        for subject in facts.subjects(name):
            for label in facts.labels(subject, name):
                seen = facts.latest(subject, name, label)
                if seen is not None and isinstance(seen.value, int | float):
                    found.setdefault(label, {})[name] = float(seen.value)
    return found


__all__ = ["GpuSource", "watts_known"]

"""Where every thread of a member stands, by py-spy: taken once per incident, never periodically.

For: the evidence that splits rivals, and where the ranks of one engine are (`clusters.py`). Never
locals; non-blocking for a process that still moves, blocking only for one that does not, one at a
time; a process that this left stopped is continued. Not for: judging what the frames mean.
"""

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from tandem.collect import clusters
from tandem.collect.families import rank_of, role_of
from tandem.collect.incarnations import Incarnations
from tandem.ports import Harvest
from tandem.records import Member, Observation, Value
from tandem.records import vocabulary as v

DUMP_S = 5.0
"""How long one dump may take."""
MOVES_S = 0.25
"""How long CPU time is compared to tell whether a process moves."""
FRAMES_MAX = 60
THREADS_MAX = 200
PROCESSES_MAX = 32
DUMP_BYTES_MAX = 16 * 1024 * 1024

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

NO_PY_SPY = "py-spy is not installed: `pip install py-spy` beside tandem"
NO_RIGHT = (
    "py-spy may not trace pid {pid}: run tandem as root, or allow it once with "
    "`sysctl -w kernel.yama.ptrace_scope=0`"
)


class _Frame(msgspec.Struct):
    name: str = ""
    short_filename: str | None = None
    filename: str = ""
    line: int = 0


class _Thread(msgspec.Struct):
    """One thread of py-spy's JSON dump."""

    pid: int
    os_thread_id: int | None = None
    thread_id: int = 0
    thread_name: str | None = None
    active: bool = False
    frames: list[_Frame] = []


@dataclass(frozen=True, slots=True)
class _Target:
    """One process to dump, and what was seen of it before."""

    member: str
    pid: int
    moves: bool
    stopped: bool
    role: str = ""
    leads: bool = False


def py_spy() -> str | None:
    """Where py-spy is: beside this Python, else on PATH."""
    beside = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    return beside or shutil.which("py-spy")


class StackTaker:
    """Takes the stacks of members whose processes the process sources have found."""

    def __init__(
        self,
        incarnations: Incarnations,
        *,
        now: Callable[[], float] = time.time,
        find: Callable[[], str | None] = py_spy,
    ) -> None:
        """`find` gives the py-spy program, None when there is none."""
        self._incarnations = incarnations
        self._now = now
        self._find = find

    async def take(self, members: Sequence[Member]) -> Harvest:
        """Every thread of every process of these members; what cannot be had says why."""
        program = self._find()
        found: list[Observation] = []
        targets: list[_Target] = []
        known = {one.name: self._incarnations.pid(one.name) for one in members}
        for member, pid in known.items():
            if pid is None:
                found.append(self._row(member, v.STACK, missing="its process is not known"))
            elif program is None:
                found.append(self._row(member, v.STACK, missing=NO_PY_SPY))
        if program is not None:
            pids = {name: pid for name, pid in known.items() if pid is not None}
            targets = await _targets(pids)
        dumped: dict[str, list[tuple[_Target, list[_Thread]]]] = defaultdict(list)
        for target in targets:
            rows, threads = await self._dump(program or "", target)
            found += rows
            dumped[target.member].append((target, threads))
        for member, processes in dumped.items():
            found += self._ranks(member, processes)
        return Harvest(tuple(found))

    def _ranks(
        self, member: str, processes: Sequence[tuple[_Target, list[_Thread]]]
    ) -> Iterator[Observation]:
        """Where the ranks of a member are, when it has several."""
        ranks: list[clusters.Rank] = []
        unseen: list[str] = []
        for target, threads in processes:
            name = rank_of(target.role)
            if name is None and not target.leads:
                continue
            thread = _rank_thread(target, threads)
            if thread is not None:
                name = name or rank_of(thread.thread_name or "") or f"pid {target.pid}"
                ranks.append(clusters.Rank(name, _places(thread), serves=target.leads))
            elif name is not None:
                unseen.append(name)
        if len(ranks) + len(unseen) < 2:
            return
        places = clusters.clustered(ranks)
        yield self._row(member, v.STACK_RANKS, clusters.told(places, unseen))
        for number, one in enumerate(places, start=1):
            said = f"{', '.join(one.ranks)}: {one.where}"
            yield self._row(member, v.STACK_CLUSTER, said, label=str(number))

    async def _dump(self, program: str, target: _Target) -> tuple[list[Observation], list[_Thread]]:
        argv = [program, "dump", "--json", "--pid", str(target.pid)]
        # A blocking dump of a stopped process fails; of a moving one it would make it wait.
        if target.moves or target.stopped:
            argv.append("--nonblocking")
        try:
            output, problem = await _run(argv)
        finally:
            _continued(target)
        if problem is not None:
            missing = _explained(problem, target.pid)
            return [self._row(target.member, v.STACK, label=str(target.pid), missing=missing)], []
        try:
            threads = msgspec.json.decode(output, type=list[_Thread])
        except msgspec.DecodeError as error:
            missing = f"pid {target.pid}: py-spy said something else: {error}"
            return [self._row(target.member, v.STACK, label=str(target.pid), missing=missing)], []
        return list(self._threads(target.member, threads)), threads

    def _threads(self, member: str, threads: Sequence[_Thread]) -> Iterator[Observation]:
        for thread in threads[:THREADS_MAX]:
            number = thread.os_thread_id or thread.thread_id
            label = f"{thread.pid}/{number} {thread.thread_name or ''}".rstrip()
            lines = [
                f"{frame.name} ({frame.short_filename or frame.filename}:{frame.line})"
                for frame in thread.frames[:FRAMES_MAX]
            ]
            if len(thread.frames) > FRAMES_MAX:
                lines.append(f"... {len(thread.frames) - FRAMES_MAX} frames more")
            yield self._row(member, v.STACK, "\n".join(lines), label=label)
            state = "active" if thread.active else "idle"
            yield self._row(member, v.STACK_STATE, state, label=label)
        if len(threads) > THREADS_MAX:
            left = f"{len(threads) - THREADS_MAX} threads more were left out"
            yield self._row(member, v.STACK, label="left out", missing=left)

    def _row(
        self,
        member: str,
        name: str,
        value: Value = None,
        *,
        label: str = "",
        missing: str | None = None,
    ) -> Observation:
        return Observation(
            source="stack",
            subject=member,
            name=name,
            at=self._now(),
            label=label,
            value=value,
            missing=missing,
            incarnation=self._incarnations.of(member),
        )


async def _targets(pids: dict[str, int]) -> list[_Target]:
    """Every process of the members, with whether it spends CPU time and whether it is stopped."""
    first = await asyncio.to_thread(_family_times, pids)
    await asyncio.sleep(MOVES_S)
    second = await asyncio.to_thread(_family_times, pids)
    return [
        _Target(
            member,
            pid,
            moves=spent_s > first[member, pid][0],
            stopped=stopped,
            role=role,
            leads=pid == pids[member],
        )
        for (member, pid), (spent_s, stopped, role) in second.items()
        if (member, pid) in first
    ]


def _rank_thread(target: _Target, threads: Sequence[_Thread]) -> _Thread | None:
    """The thread that does a rank's work: one that is named for it, else its process's main one.

    A serving process has none but a named one: its main thread answers requests.
    """
    named = [one for one in threads if rank_of(one.thread_name or "")]
    main = [one for one in threads if one.os_thread_id == target.pid]
    alone = target.leads and rank_of(target.role) is None
    return next(iter(named if alone else [*named, *main]), None)


def _places(thread: _Thread) -> tuple[clusters.Frame, ...]:
    return tuple(
        clusters.Frame(one.name, one.short_filename or one.filename, one.line)
        for one in thread.frames[:FRAMES_MAX]
    )


def _family_times(pids: dict[str, int]) -> dict[tuple[str, int], tuple[float, bool, str]]:
    """CPU seconds of each member's process and its children, whether each is stopped, its role."""
    found = {}
    for member, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(pid)
            for one in [leader, *leader.children(recursive=True)][:PROCESSES_MAX]:
                spent = one.cpu_times()
                stopped = one.status() in _STOPPED
                role = role_of(one.pid, one.name())
                found[member, one.pid] = (spent.user + spent.system, stopped, role)
    return found


async def _run(argv: Sequence[str]) -> tuple[bytes, str | None]:
    """What a program printed, or why it did not; bounded in time and size."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return b"", f"cannot start py-spy: {error}"
    try:
        output, errors = await asyncio.wait_for(process.communicate(), DUMP_S)
    except TimeoutError:
        return b"", f"py-spy did not end within {DUMP_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        return b"", errors.decode(errors="replace").partition("Stack backtrace")[0].strip()
    if len(output) > DUMP_BYTES_MAX:
        return b"", f"the dump has {len(output)} bytes, more than is kept"
    return output, None


def _explained(problem: str, pid: int) -> str:
    """The problem as one clause with what to do about it, where that is known."""
    lowered = problem.lower()
    if "permission denied" in lowered or "not permitted" in lowered:
        return NO_RIGHT.format(pid=pid)
    if "failed to find python version" in lowered:
        return f"pid {pid}: it is no Python process"
    return f"pid {pid}: {' '.join(problem.split())[:300]}"


def _continued(target: _Target) -> None:
    """Let a process go on that was not stopped before and is now: a killed py-spy leaves it so."""
    if target.stopped:
        return
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(target.pid)
        if process.status() in _STOPPED:
            process.send_signal(signal.SIGCONT)


__all__ = ["StackTaker", "py_spy"]

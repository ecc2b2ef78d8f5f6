"""What the kernel says of processes and their children: one short read each, shared by sources.

For: families of the members (their processes, roles and ranks) at a bounded cost: who is whose
child is read for the whole host at once, and seldom. Not for: observations, or other hosts.
"""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

FRESH_S = 5.0
"""How old the table of children may be: a child that is born in between is found by the next."""
FAMILY_MAX = 256
"""Processes of one member that are looked at."""
TASKS_MAX = 512
"""Threads of one process whose state is read."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

TITLED = re.compile(r"^(?:sglang|vllm)::?:?(\S+)", re.IGNORECASE)
"""Engines name their processes by title: `sglang::scheduler_TP0`, `VLLM::Worker_TP1`."""
NAMED = re.compile(
    r"^(?:scheduler|detokenizer|tokenizer|data_parallel|worker|engine)", re.IGNORECASE
)
RANK = re.compile(r"(?<![A-Za-z])(?:(?:DP|PP|TP|EP|CP)\d+(?:_|$)?)+")


class Stat(NamedTuple):
    """One process as `/proc/PID/stat` has it (man 5 proc)."""

    pid: int
    name: str
    state: str
    """R S D T Z."""
    parent: int
    cpu_s: float
    """Of its own and of the children it has reaped."""
    threads: int
    ticks: int
    """Since boot, when it started: with the pid it tells one life from another."""
    rss_bytes: int
    exit_code: int | None
    """Of a zombie: its exit code, negative when a signal ended it."""

    @property
    def started_at(self) -> float:
        """Unix seconds."""
        return _booted_at() + self.ticks / TICKS_PER_S


_LETTERS = {"t": "T", "X": "Z", "x": "Z", "I": "S", "W": "R", "K": "S", "P": "S"}


def stat_of(pid: int) -> Stat | None:
    """What the kernel says of a process now; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    before, _, after = text.rpartition(")")
    fields = after.split()
    state = _LETTERS.get(fields[0], fields[0])
    status = int(fields[49]) if len(fields) > 49 else 0
    ended = None
    if state == "Z":
        ended = -(status & 0x7F) if status & 0x7F else status >> 8
    return Stat(
        pid=pid,
        name=before.partition("(")[2],
        state=state,
        parent=int(fields[1]),
        cpu_s=sum(map(int, fields[11:15])) / TICKS_PER_S,
        threads=int(fields[17]),
        ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
        exit_code=ended,
    )


def role_of(pid: int, name: str) -> str:
    """What a process does in its engine, by its title, its name, or what it runs; never arguments.

    `scheduler_TP0`, `detokenizer`, `python -m multiprocessing.resource_tracker`; its bare name when
    nothing says more.
    """
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()[:4096].decode("utf-8", "replace")
    except OSError:
        return name
    words = line.rstrip("\0").split("\0")
    titled = TITLED.match(words[0])
    if titled:
        return titled[1]
    if NAMED.match(name):
        return name
    program = Path(words[0].split(" ")[0]).name
    if len(words) > 2 and words[1] == "-m":
        return f"{program} -m {words[2]}"[:80]
    if len(words) > 1 and words[1].endswith(".py"):
        return f"{program} {Path(words[1]).name}"[:80]
    return program or name


def rank_of(role: str) -> str | None:
    """The rank that a role names: `TP0`, `DP1_TP0`; None when it is none."""
    found = RANK.search(role)
    return found[0].rstrip("_") if found else None


def blocked_threads(pid: int) -> int:
    """Threads of a process that wait for a device or a disk (state D)."""
    blocked = 0
    try:
        with os.scandir(f"/proc/{pid}/task") as tasks:
            for number, task in enumerate(tasks):
                if number >= TASKS_MAX:
                    break
                try:
                    text = Path(task.path, "stat").read_bytes()
                except OSError:
                    continue
                blocked += text.rpartition(b")")[2][1:2] == b"D"
    except OSError:
        return blocked
    return blocked


def wait_channel(pid: int) -> str | None:
    """Where in the kernel a process waits; None when it runs, or when that is not shown to us."""
    try:
        where = Path(f"/proc/{pid}/wchan").read_text("ascii", "replace").strip()
    except OSError:
        return None
    return None if where in ("", "0") else where[:80]


class Families:
    """Who is whose child on this host, read at most every few seconds whoever asks."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is any clock of seconds."""
        self._now = now
        self._read_at = float("-inf")
        self._children: dict[int, list[int]] = {}

    def of(self, pid: int) -> list[int]:
        """A process and its descendants as last read, the oldest generation first; bounded."""
        if self._now() - self._read_at >= FRESH_S:
            self._children = _all_children()
            self._read_at = self._now()
        found = [pid]
        for one in found:
            found += [child for child in self._children.get(one, ()) if child not in found]
            if len(found) >= FAMILY_MAX:
                return found[:FAMILY_MAX]
        return found


def _all_children() -> dict[int, list[int]]:
    """Every process of this host by its parent."""
    found: dict[int, list[int]] = defaultdict(list)
    with os.scandir("/proc") as entries:
        pids = sorted(int(entry.name) for entry in entries if entry.name.isdigit())
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            continue
        found[int(text.rpartition(b")")[2].split(None, 2)[1])].append(pid)
    return dict(found)


@cache
def _booted_at() -> float:
    """When this host booted, unix seconds, as the kernel tells it."""
    lines = Path("/proc/stat").read_text("ascii").splitlines()
    times = [float(line.split()[1]) for line in lines if line.startswith("btime ")]
    return times[0] if times else time.time() - time.monotonic()


__all__ = [
    "Families",
    "Stat",
    "blocked_threads",
    "rank_of",
    "role_of",
    "stat_of",
    "wait_channel",
]

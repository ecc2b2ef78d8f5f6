"""Lives of processes on this host: one id for one life, the same whoever asks.

For: supervisors and collectors, which must agree on what an incarnation is.
Not for: starting, stopping or judging anything.
"""

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tandem.errors import WorldError
from tandem.records import Incarnation

GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)
"""A zombie holds nothing but its number: for us it is gone."""


STATES = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "T",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "Z",
    psutil.STATUS_IDLE: "S",
    psutil.STATUS_WAKING: "R",
}
"""What the kernel calls a state: the letter that `ps` shows."""
HELD = {
    "D": "waits for a device or a disk (state D)",
    "T": "is stopped (state T)",
    "Z": "has ended and nobody reaped it (state Z)",
}
"""The states in which a process cannot serve, in words."""


SHARED_S = 0.5
"""How long what was read of all listeners serves those who look for a member."""


class Holder(NamedTuple):
    """Who listens on a port; `pid` is None when this user may not know."""

    port: int
    pid: int | None
    command: str

    def __str__(self) -> str:
        """`pid 4711 (python -m http.server)`."""
        return f"pid {self.pid} ({self.command})" if self.pid else "another user's process"


def life_of(pid: int) -> Incarnation | None:
    """The life that has this pid now; None when nobody has it, or a zombie.

    The id is `pid:ticks`, ticks since boot at which it started (`/proc/PID/stat`, field 22): unlike
    a time of day these do not move when the clock is set, so a reused pid is never taken for the
    old life, nor one life for two.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        started_at = process.create_time()
    except GONE:
        return None
    return Incarnation(id=f"{pid}:{_start_ticks(pid, started_at)}", started_at=started_at, pid=pid)


def state_of(pid: int) -> str | None:
    """The letter of a process's state (R S D T Z); None when it is gone or not ours to see."""
    try:
        return STATES.get(psutil.Process(pid).status(), "R")
    except psutil.Error:
        return None


def listening_life(host: str, port: int) -> Incarnation | None:
    """The life that listens on a port of this host; None when nobody does.

    Raises `WorldError` where that cannot be seen: another host, another user's process.
    """
    if not is_here(host):
        raise WorldError(
            f"{host} is another host.",
            next_step="Run Tandem there, or give the member a supervisor.",
        )
    found = _SEEN.holders(port)
    if found and all(holder.pid is None for holder in found):
        raise WorldError(
            f"Port {port} is held by another user's process.",
            next_step="Run Tandem as that user, or as root.",
        )
    pids = [holder.pid for holder in found if holder.pid is not None]
    return life_of(min(pids)) if pids else None


def is_here(host: str) -> bool:
    """Whether an address is one of this host's."""
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):  # noqa: S104 - compared
        return True
    ours = {link.address for links in psutil.net_if_addrs().values() for link in links}
    return host in ours


def _start_ticks(pid: int, started_at: float) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return round(started_at * 100)
    # The command in field 2 may hold spaces and brackets; the last bracket ends it.
    return int(stat.rpartition(")")[2].split()[19])


def command_of(pid: int, width: int = 80) -> str:
    """The executable and module or script of a process, without its arguments: these may be secret.

    Empty when it is gone or not ours to see.
    """
    try:
        process = psutil.Process(pid)
        words = process.cmdline() or [process.name()]
    except psutil.Error:
        return ""
    kept = [Path(words[0]).name]
    if len(words) > 2 and words[1] == "-m":
        kept += words[1:3]
    elif len(words) > 1 and words[1].endswith(".py"):
        kept.append(words[1])
    return " ".join(kept)[:width]


def holders(ports: set[int]) -> list[Holder]:
    """Who listens on these TCP ports, one row per process and port, by port and pid."""
    if not _listened(ports):
        # Finding the holder means reading every open file of this host: not for an empty port.
        return []
    return _listening(ports)


def _listening(ports: set[int] | None) -> list[Holder]:
    """The listeners of these ports, or of all; by port and pid."""
    commands: dict[int, str] = {}
    found: set[Holder] = set()
    for link in psutil.net_connections(kind="tcp"):
        if link.status != psutil.CONN_LISTEN or not link.laddr:
            continue
        if ports is not None and link.laddr.port not in ports:
            continue
        if link.pid and link.pid not in commands:
            commands[link.pid] = command_of(link.pid)
        found.add(Holder(link.laddr.port, link.pid, commands.get(link.pid or 0, "")))
    return sorted(found, key=lambda holder: (holder.port, holder.pid or 0))


class _Listeners:
    """Who listens where on this host, shared by the members that are looked for at one time.

    Finding out means reading every open file of the host: fifty members that each did it would
    still be at it when the next look comes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._known: dict[int, list[Holder]] = {}

    def holders(self, port: int) -> list[Holder]:
        """The holders of a port, read less than `SHARED_S` ago, where anybody listens at all."""
        if not _listened({port}):
            return []
        with self._lock:
            if time.monotonic() - self._at >= SHARED_S or port not in self._known:
                self._known = {}
                for holder in _listening(None):
                    self._known.setdefault(holder.port, []).append(holder)
                self._at = time.monotonic()
            return self._known.get(port, [])


_SEEN = _Listeners()


def _listened(ports: set[int]) -> bool:
    """Whether anybody listens on one of these ports; True as well when that cannot be read."""
    try:
        tables = [Path(f"/proc/net/{name}").read_text("ascii", "replace") for name in _TABLES]
    except OSError:
        return True
    wanted = tuple(f":{port:04X}" for port in ports)
    return any(
        words[3] == "0A" and words[1].endswith(wanted)
        for table in tables
        for line in table.splitlines()[1:]
        if len(words := line.split(None, 4)) > 4
    )


_TABLES = [name for name in ("tcp", "tcp6") if Path(f"/proc/net/{name}").exists()] or ["tcp"]


def can_bind(host: str, port: int) -> bool:
    """Whether a server could listen there now; a host that is not this one counts as free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as refused:
            return refused.errno != errno.EADDRINUSE
    return True


def session_of(leader: int) -> list[psutil.Process]:
    """The living processes of the session, or group, that a pid leads; the leader first."""
    found = []
    for pid in psutil.pids():
        try:
            if leader in (os.getpgid(pid), os.getsid(pid)):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (ProcessLookupError, *GONE):
            continue
    return sorted(found, key=lambda process: (process.pid != leader, process.pid))


def boot_id() -> str:
    """Which boot of this host this is: pids and ticks mean nothing across two."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return str(round(psutil.boot_time()))

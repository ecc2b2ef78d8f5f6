"""Members as detached process groups of this host, started and stopped without any service manager.

A member survives the command that started it: it leads a session of its own, its output goes to a
file, and `run/<member>.json` says how it was started, so that any later command can inspect, stop
or repeat it. All signals go to the whole group and session, and never to a pid that was reused.

For: laptops, drills, and hosts without systemd. Not for: watching, or restarting what crashed;
that is the loop's decision.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil

from tandem.errors import ConfigError, RefusedError, WorldError
from tandem.processes import boot_id, life_of, session_of
from tandem.records import ENGINE_VARIABLES, STATE_FOLDER, Incarnation, Launch, Member
from tandem.supervisors import leftovers, run_record
from tandem.supervisors.run_record import RunRecord

LOG_BYTES_MAX = 20_000_000
"""A log larger than this is set aside as `.1` at the next start."""
TURN_TIMEOUT_S = 60.0
"""How long a start or stop waits for another process that is starting or stopping this member."""
KILL_TIMEOUT_S = 5.0
POLL_S = 0.02
RUN_VARIABLE = "TANDEM_RUN"

_children: dict[int, subprocess.Popen[bytes]] = {}
"""What this process started and has not reaped: dropping a `Popen` that runs would warn."""
ENDED_MAX = 64
_ended: dict[int, int] = {}
"""Exit codes of the last processes that this one started and reaped, by pid."""


class LocalSupervisor:
    """Implements `ports.Supervisor` for processes on this host."""

    name = "local"

    def __init__(self, root: Path) -> None:
        """`root` is the folder of `tandem.toml`; nothing is written before the first start."""
        self._root = root
        self._run = root / STATE_FOLDER / "run"
        self._logs = root / STATE_FOLDER / "logs"

    async def start(self, member: Member) -> Incarnation:
        """Start it as it was last launched, unless its configuration has changed since.

        Starting what runs returns what runs. Raises `WorldError` when a port is taken, the
        executable is missing, or something of its last life is left.
        """
        async with self._turn(member):
            return self._start(member, None)

    async def restart_with(self, member: Member, launch: Launch, grace_s: float) -> Incarnation:
        """Stop it and start it in another way; later starts repeat that way."""
        async with self._turn(member):
            await self._stop(member, grace_s)
            return self._start(member, launch)

    async def stop(self, member: Member, grace_s: float) -> None:
        """SIGTERM to its group, at most `grace_s`, SIGKILL; its shared memory is unlinked.

        Raises `WorldError` when it survives SIGKILL, or belongs to another user.
        """
        async with self._turn(member):
            await self._stop(member, grace_s)

    async def inspect(self, member: Member) -> Incarnation | None:
        """The present life of a member that this supervisor started, or None."""
        record = run_record.read(self._path(member))
        return None if record is None else self._life(member, record)

    async def residue(self, member: Member) -> tuple[str, ...]:
        """Processes, ports and shared memory that are still held: one sentence each."""
        found = []
        record = run_record.read(self._path(member))
        for process in [] if record is None else _session(record):
            with contextlib.suppress(psutil.Error):
                found.append(
                    f"pid {process.pid} ({process.name()}) of {member.name}'s process group "
                    "still runs"
                )
        found += await self.obstacles(member)
        if record is not None and record.boot == boot_id():
            found += [
                f"{path} of {member.name} (pid {record.pid}) is still there"
                for path in leftovers.segments_of({record.pid})
            ]
        return tuple(found)

    async def obstacles(self, member: Member) -> tuple[str, ...]:
        """Its ports that somebody listens on, each with its holder."""
        return tuple(
            f"port {port} of {member.name} is held by {holder}"
            for port, holder in leftovers.taken_ports(member)
        )

    def log_path(self, member: Member) -> str | None:
        """Where its output goes."""
        return str(self._logs / f"{member.name}.log")

    def exit_code(self, pid: int) -> int | None:
        """How a process that this very Tandem started ended; negative: by that signal."""
        _reap(pid)
        return None if pid in _children else _ended.get(pid)

    def processes(self, member: Member) -> tuple[int, ...]:
        """The pids of its living processes, the leader first."""
        record = run_record.read(self._path(member))
        return () if record is None else tuple(each.pid for each in _session(record))

    def launched(self, member: Member) -> Launch | None:
        """How it was last started, or None when it never was."""
        record = run_record.read(self._path(member))
        return None if record is None else record.launched

    def forget(self, member: Member) -> None:
        """Drop how it was last started: the next start is as configured.

        Raises `RefusedError` while it runs.
        """
        record = run_record.read(self._path(member))
        if record is None:
            return
        if _session(record):
            raise RefusedError(
                f"{member.name} still runs, so how it was started is kept.",
                next_step="Stop it first: `tandem down`.",
            )
        self._path(member).unlink(missing_ok=True)

    # Starting.

    def _start(self, member: Member, given: Launch | None) -> Incarnation:
        before = run_record.read(self._path(member))
        if before is not None:
            if life := self._life(member, before):
                return life
            self._refuse_leftovers(member, before)
        record = self._planned(member, before, given)
        for port, holder in leftovers.taken_ports(member):
            raise WorldError(
                f"{member.name} cannot start: port {port} is held by {holder}.",
                next_step="Stop that process, or give the member another port in tandem.toml.",
            )
        run_record.write(self._path(member), record)
        try:
            child = self._spawn(member, record)
        except BaseException:  # an interruption too: what did not start has no record
            self._put_back(member, before)
            raise
        life = life_of(child.pid)
        if life is None:
            status = child.wait()
            self._put_back(member, before)
            raise WorldError(
                f"{member.name} ended at once with status {status}.",
                next_step=f"Read the end of {self.log_path(member)}.",
            )
        _children[child.pid] = child
        # Without its pid on a full disk it is found by its mark.
        self._keep(member, _of_life(record, life))
        return life

    def _planned(self, member: Member, before: RunRecord | None, given: Launch | None) -> RunRecord:
        configured = member.launch or (before.configured if before else None) or given
        if configured is None:
            raise ConfigError(
                f"Nothing says how to start {member.name}: it has no argv.",
                next_step=f"Add argv to the [[member]] {member.name} in tandem.toml.",
            )
        again = before is not None and before.configured == configured
        engine = {
            name: value for name, value in os.environ.items() if name.startswith(ENGINE_VARIABLES)
        }
        return RunRecord(
            format=run_record.FORMAT,
            member=member.name,
            run=secrets.token_hex(8),
            configured=configured,
            launched=given or (before.launched if before and again else configured),
            inherited=before.inherited if before and again else engine,
            started_by=f"{Path(sys.argv[0]).name} (pid {os.getpid()})",
            boot=boot_id(),
        )

    def _put_back(self, member: Member, before: RunRecord | None) -> None:
        if before is None:
            self._path(member).unlink(missing_ok=True)
        else:
            run_record.write(self._path(member), before)

    def _refuse_leftovers(self, member: Member, before: RunRecord) -> None:
        if left := _session(before):
            pids = ", ".join(str(process.pid) for process in left)
            raise WorldError(
                f"{member.name} died and left processes behind: pid {pids}.",
                next_step="Stop it before starting it: `tandem down` ends its whole group.",
            )

    def _spawn(self, member: Member, record: RunRecord) -> subprocess.Popen[bytes]:
        launch = record.launched
        plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ENGINE_VARIABLES)
        }
        cwd = self._root / launch.cwd
        if not cwd.is_dir():
            raise WorldError(
                f"{member.name} cannot start: its working directory {cwd} does not exist.",
                next_step="Make it, or correct cwd in tandem.toml.",
            )
        with self._open_log(member) as log:
            try:
                return subprocess.Popen(
                    launch.argv,
                    cwd=cwd,
                    env={**plain, **record.inherited, **launch.env, RUN_VARIABLE: record.run},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise WorldError(
                    f"{member.name} cannot start: {launch.argv[0]} ({error.strerror}).",
                    next_step="Install it, or correct argv in tandem.toml.",
                ) from None

    def _open_log(self, member: Member) -> contextlib.AbstractContextManager[int]:
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._logs / f"{member.name}.log"
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.replace(path.with_suffix(".log.1"))
        return _opened(path)

    # Stopping.

    async def _stop(self, member: Member, grace_s: float) -> None:
        record = run_record.read(self._path(member))
        if record is None:
            return
        if record.pid == 0 and (life := self._life(member, record)):
            record = _of_life(record, life)  # it was started while we died
        pids = {record.pid, *(process.pid for process in _session(record))}
        try:
            if not await self._ended(record, signal.SIGTERM, grace_s):
                await self._ended(record, signal.SIGKILL, KILL_TIMEOUT_S)
        except PermissionError:
            raise WorldError(
                f"{member.name} (pid {record.pid}) belongs to another user and was not stopped.",
                next_step="Run the command as that user.",
            ) from None
        if left := _session(record):
            states = ", ".join(f"pid {each.pid} is in state {each.status()}" for each in left)
            raise WorldError(
                f"{member.name} survives SIGKILL: {states}.",
                next_step="A process in disk sleep waits for a driver: see `dmesg`.",
            )
        if record.pid and record.boot == boot_id():
            # Its owner is gone: a segment left after SIGKILL is memory that nobody frees.
            for path in leftovers.segments_of(pids):
                path.unlink(missing_ok=True)

    async def _ended(self, record: RunRecord, how: signal.Signals, timeout_s: float) -> bool:
        """Signal everything of a life, then wait; whether nothing is left."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        signalled: set[int] = set()
        while left := _session(record):
            for process in left:
                # What it forks while it dies is told as well; nobody is told twice.
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, how)
            if loop.time() >= ends_at:
                return False
            await asyncio.sleep(POLL_S)
        return True

    # Who lives.

    def _life(self, member: Member, record: RunRecord) -> Incarnation | None:
        if record.boot != boot_id():
            return None
        if record.pid:
            _reap(record.pid)
            life = life_of(record.pid)
            return life if life is not None and life.id == record.incarnation else None
        found = _marked(record.run)
        if found is not None:
            self._keep(member, _of_life(record, found))
        return found

    def _keep(self, member: Member, record: RunRecord) -> None:
        """Write down which life it is, if the disk lets us: it is found and stopped without."""
        with contextlib.suppress(OSError):
            run_record.write(self._path(member), record)

    def _path(self, member: Member) -> Path:
        return self._run / f"{member.name}.json"

    @contextlib.asynccontextmanager
    async def _turn(self, member: Member) -> AsyncIterator[None]:
        """One start or stop of a member at a time, whichever process asks."""
        self._run.mkdir(mode=0o700, parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + TURN_TIMEOUT_S
        with _opened(self._run / f"{member.name}.lock") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if loop.time() >= ends_at:
                        raise RefusedError(
                            f"Another process has been starting or stopping {member.name} for "
                            f"{TURN_TIMEOUT_S:.0f} s.",
                            next_step="See `tandem status`, and wait for it to end.",
                        ) from None
                await asyncio.sleep(POLL_S)
            yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _of_life(record: RunRecord, life: Incarnation) -> RunRecord:
    return msgspec.structs.replace(
        record, pid=life.pid or 0, incarnation=life.id, started_at=life.started_at
    )


def _session(record: RunRecord) -> list[psutil.Process]:
    """The living processes of one life, its leader first; empty when the pid was reused."""
    if not record.pid or record.boot != boot_id():
        return []
    _reap(record.pid)
    life = life_of(record.pid)
    if life is not None and life.id != record.incarnation:
        return []  # a pid is reused only after its whole session is gone
    return session_of(record.pid)


def _reap(pid: int) -> None:
    """Collect a child of ours that ended; a zombie of another parent counts as gone anyway."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]
        _ended.pop(pid, None)
        _ended[pid] = child.returncode
        if len(_ended) > ENDED_MAX:
            del _ended[next(iter(_ended))]


def _marked(run: str) -> Incarnation | None:
    """The life whose environment says it is this run: we died before we could write its pid."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            leads = os.getsid(process.pid) == process.pid
            if leads and process.environ().get(RUN_VARIABLE) == run:
                return life_of(process.pid)
    return None

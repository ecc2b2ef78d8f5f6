"""Locks between processes of one deployment, held by the kernel: a crash lets go by itself.

For: one repair (or `up`, or `watch`) at a time. Not for: threads of one process.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tandem.errors import RefusedError

PATIENCE_S = 0.04


@contextlib.contextmanager
def held(path: Path, name: str) -> Iterator[None]:
    """Hold the lock, or raise `RefusedError` naming who does, after `PATIENCE_S` at most."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _taken(file):
            raise RefusedError(
                f"`{name}` is already under way in {_holder(file)}.",
                next_step="Wait for it to end, or end it; `tandem status` says how it all stands.",
            )
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        # The file stays: removing it would let two processes lock two files of one name.
        yield
    finally:
        os.close(file)


def _taken(file: int) -> bool:
    """Take the lock; whoever only asks for its holder has it for a moment, so not at one try."""
    for wait_s in (PATIENCE_S / 4, PATIENCE_S / 4, PATIENCE_S / 2, 0.0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(wait_s)
        else:
            return True
    return False


def holder_of(path: Path) -> int | None:
    """The pid that holds this lock now, or None."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(file)
    else:
        return None
    finally:
        os.close(file)


def _pid(file: int) -> int:
    written = os.pread(file, 32, 0).strip()
    return int(written) if written.isdigit() else 0


def _holder(file: int) -> str:
    pid = _pid(file)
    with contextlib.suppress(psutil.Error):
        return f"pid {pid} ({_command(psutil.Process(pid))})"
    return f"pid {pid}" if pid else "another process"


def _command(process: psutil.Process) -> str:
    """`tandem up` where it is one of our words, else the program's name."""
    words = process.cmdline()
    for place, word in enumerate(words[:-1]):
        if Path(word).name == "tandem":  # the script, or what follows `python -m`
            return f"tandem {words[place + 1]}"
    return process.name()

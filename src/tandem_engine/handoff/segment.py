"""A segment: the file of slots in shared memory that a decode owns and prefills map.

The first page names the owner; then comes one control block of 64-bit words per slot, each word
written by one side only; then the slots, page aligned. The owner holds a lock on the file for as
long as it lives, so whoever finds it unlocked may sweep it.

For: the file's life and the meaning of its words.
Not for: what the two sides do with them (`shm.py`).
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import time
from pathlib import Path
from typing import Final

from tandem_engine.handoff import HandoffError

FOLDER: Final = Path("/dev/shm")

# The words of a control block. Written by the decode:
FENCE: Final = 0
"""The newest generation given out for this slot, or reserved for nobody."""
ROOM: Final = 1
"""For people who look."""
OUTCOMES: Final = 8
"""The first of the newest outcomes: generation * 2 + consumed."""
OUTCOMES_KEPT: Final = 16
# Written by the prefill:
WRITING: Final = 2
"""The generation being written, 0 when none is."""
READY: Final = 3
"""The generation last written whole."""
READY_BYTES: Final = 4
FAILED: Final = 5
"""The generation last given up."""

_NAME: Final = re.compile(r"tandem-kv-[0-9A-Za-z-]{1,64}")
_PAGE: Final = 4096
_OWNER: Final = struct.Struct("<8sIIQQ")
"""Magic, layout version, owner's pid, slots, bytes of a slot."""
_MAGIC: Final = b"TANDEMSG"
_LAYOUT: Final = 1
_UNFINISHED_S: Final = 60.0
_BLOCK_WORDS: Final = OUTCOMES + OUTCOMES_KEPT
_BLOCK_BYTES: Final = _BLOCK_WORDS * 8


class SegmentMemory:
    """A mapped segment: its words and its slots."""

    def __init__(self, memory: mmap.mmap, slots: int, slot_bytes: int) -> None:
        """Use `create_segment` or `open_segment`."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._view = memoryview(memory)
        self._words = self._view[_PAGE : _PAGE + slots * _BLOCK_BYTES].cast("Q")

    def get(self, slot: int, word: int) -> int:
        """Read one word of a slot's control block."""
        return self._words[slot * _BLOCK_WORDS + word]

    def set(self, slot: int, word: int, value: int) -> None:
        """Write one word of a slot's control block: one aligned store."""
        self._words[slot * _BLOCK_WORDS + word] = value

    def slot(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        start = _slots_offset(self.slots) + slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._view.release()
        # A view that somebody still holds keeps the pages until it goes.
        with contextlib.suppress(BufferError):
            self._memory.close()


class SegmentFile:
    """The owner's hold on its file: the lock that says "alive", and the unlinking."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use `create_segment`."""
        self.path = path
        self._descriptor = descriptor

    def close(self) -> None:
        """Unlink the file and let go of the lock."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def create_segment(
    agent_id: str, *, slots: int, slot_bytes: int, folder: Path = FOLDER
) -> tuple[SegmentFile, SegmentMemory]:
    """Create, lock and map a segment, every page reserved; raises `HandoffError`."""
    path = folder / f"tandem-kv-{agent_id}"
    if not _NAME.fullmatch(path.name):
        raise HandoffError(f"the agent id {agent_id!r} is not letters, digits and dashes")
    slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
    size_bytes = _slots_offset(slots) + slots * slot_bytes
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HandoffError(
            f"{path} cannot be created ({error.strerror}); hand over by TCP on this machine"
        ) from error
    try:
        # The kernel drops the lock with the process, whatever its end.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Reserve every page now: a full /dev/shm would be a SIGBUS in the middle of a write.
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.ENOMEM}:
            raise HandoffError(
                f"{path} cannot be set up ({error.strerror}); hand over by TCP on this machine"
            ) from error
        raise HandoffError(
            f"{folder} has no room for {slots} slots of {slot_bytes} bytes; "
            "ask for fewer slots or a shorter context, or enlarge it"
        ) from error
    # Last, so that whoever finds it finds a whole segment.
    _OWNER.pack_into(memory, 0, _MAGIC, _LAYOUT, os.getpid(), slots, slot_bytes)
    return SegmentFile(path, descriptor), SegmentMemory(memory, slots, slot_bytes)


def open_segment(path: Path, *, folder: Path = FOLDER) -> SegmentMemory:
    """Map another process's segment; raises `HandoffError` for anything that is not one."""
    if path.parent != folder or not _NAME.fullmatch(path.name):
        raise HandoffError(f"{path} is no segment of {folder}/tandem-kv-...; not opened")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise HandoffError(
            f"{path} cannot be opened ({error.strerror}); its decode is gone, or another user's"
        ) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size < _PAGE:
            raise HandoffError(f"{path} is no segment: {facts.st_size} bytes")
        owner = os.pread(descriptor, _OWNER.size, 0)
        magic, layout, _pid, slots, slot_bytes = _OWNER.unpack(owner)
        expected_bytes = _slots_offset(slots) + slots * slot_bytes
        if (magic, layout, facts.st_size) != (_MAGIC, _LAYOUT, expected_bytes):
            raise HandoffError(
                f"{path} is no segment of layout {_LAYOUT}; run both sides from one version"
            )
        memory = mmap.mmap(descriptor, facts.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    return SegmentMemory(memory, slots, slot_bytes)


def sweep(folder: Path = FOLDER) -> list[Path]:
    """Unlink the segments whose owner is dead; the paths removed. Never waits."""
    removed = []
    for path in sorted(folder.glob("tandem-kv-*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone since
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file without its first page may be in the middle of its creation.
            finished = os.pread(descriptor, len(_MAGIC), 0) == _MAGIC
            age_s = time.time() - os.fstat(descriptor).st_mtime
            if finished or age_s > _UNFINISHED_S:
                path.unlink(missing_ok=True)
                removed.append(path)
        except OSError:
            continue  # the owner holds the lock: alive
        finally:
            os.close(descriptor)
    return removed


def _slots_offset(slots: int) -> int:
    return _PAGE + -(-slots * _BLOCK_BYTES // _PAGE) * _PAGE

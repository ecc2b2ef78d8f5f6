"""What a stopped member may leave behind: ports and shared memory, each with who holds it.

For: the gate that must see a member gone before the next one starts. Not for: killing.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tandem.processes import can_bind, holders
from tandem.records import Member

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "tandem-kv-*"
_OWNER = struct.Struct("<8sII")
"""How a KV segment of the embedded engine begins: magic, layout version, its owner's pid."""
_MAGIC = b"TANDEMSG"


def ports_of(member: Member) -> list[tuple[str, int]]:
    """The (host, port) pairs a member listens on, by what its configuration says."""
    url = urlsplit(member.url)
    host = url.hostname or "127.0.0.1"
    found = {(host, url.port), (host, member.bootstrap_port)}
    if member.metrics_url is not None:
        metrics = urlsplit(member.metrics_url)
        found.add((metrics.hostname or host, metrics.port))
    return sorted((host, port) for host, port in found if port is not None)


def taken_ports(member: Member) -> Iterator[tuple[int, str]]:
    """Each port of a member that somebody listens on, with who that is."""
    busy = {port for host, port in ports_of(member) if not can_bind(host, port)}
    known = holders(busy) if busy else []
    for port in sorted(busy):
        who = [str(holder) for holder in known if holder.port == port]
        yield port, " and ".join(who) or "a connection, or a process this user may not see"


def segments_of(pids: set[int]) -> list[Path]:
    """KV segments in shared memory whose owner has, or had, one of these pids."""
    return [path for path in sorted(SHARED_MEMORY.glob(SEGMENTS)) if _owner(path) in pids]


def _owner(path: Path) -> int | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        head = os.read(file, _OWNER.size)
    finally:
        os.close(file)
    if len(head) < _OWNER.size:
        return None
    magic, _, pid = _OWNER.unpack(head)
    return int(pid) if magic == _MAGIC else None

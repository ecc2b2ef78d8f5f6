"""TCP connections between the members of this host: who has opened how many to whom.

For: whether a decode still holds its connections to a prefill, and a router to its workers.
Not for: what flows over them; connections to members of other hosts are known by their address.

Read from `/proc/PID/net/tcp` once per network namespace, and from the open files of each member's
processes; bounded in bytes and files, and every ten seconds.
"""

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tandem.collect.families import Families
from tandem.collect.incarnations import Incarnations
from tandem.ports import Harvest
from tandem.records import Member, Observation, Role, Value
from tandem.records import vocabulary as v

EVERY_S = 10.0
TABLE_BYTES_MAX = 4 * 1024 * 1024
"""Of one namespace's table: some 25,000 connections."""
FILES_MAX = 4096
"""Open files of one member that are looked at."""
PAIRS_MAX = 512

ESTABLISHED, LISTENING = "01", "0A"
End = tuple[str, int]


class Link(NamedTuple):
    """One line of a table of connections; addresses are as the kernel writes them, in hex."""

    here: End
    there: End
    state: str
    inode: int


class Denied(Exception):  # noqa: N818 - it says why something could not be seen
    """Why the connections of a member cannot be seen."""


class SocketSource:
    """All members of this host at once: a connection has two ends."""

    name = "sockets"
    interval_s = EVERY_S
    timeout_s = 5.0

    def __init__(
        self,
        members: Sequence[Member],
        incarnations: Incarnations,
        families: Families,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`incarnations` says which members have a process here."""
        self._members = tuple(members)
        self._incarnations = incarnations
        self._families = families
        self._now = now

    async def collect(self) -> Harvest:
        """Look once, in a thread."""
        return Harvest(tuple(await asyncio.to_thread(lambda: tuple(self._look()))))

    def _look(self) -> Iterator[Observation]:
        at = self._now()
        owned: dict[str, list[Link]] = {}
        tables: dict[str, list[Link]] = {}
        for member in self._members:
            pid = self._incarnations.pid(member.name)
            if pid is None:
                continue
            try:
                space = _namespace(pid)
                if space not in tables:
                    tables[space] = _links(pid)
                inodes = _inodes(self._families.of(pid))
                owned[member.name] = [link for link in tables[space] if link.inode in inodes]
            except Denied as why:
                yield self._row(at, member.name, None, missing=str(why))
        yield from self._counted(owned, at)

    def _counted(self, owned: dict[str, list[Link]], at: float) -> Iterator[Observation]:
        """Per member all its connections, then those it opened to each other member."""
        holders = {
            link.here + link.there: name for name, links in owned.items() for link in links
            if link.state == ESTABLISHED
        }  # fmt: skip
        doors = _doors(self._members)
        pairs = 0
        for name, links in owned.items():
            listens = {link.here[1] for link in links if link.state == LISTENING}
            ours = [link for link in links if link.state == ESTABLISHED]
            yield self._row(at, name, len(ours))
            opened = Counter(
                holders.get(link.there + link.here) or doors.get(link.there[1], "")
                for link in ours
                if link.here[1] not in listens
            )
            for other in self._expected(name) | {one for one in opened if one and one != name}:
                pairs += 1
                if pairs <= PAIRS_MAX:
                    yield self._row(at, name, opened[other], label=other)

    def _expected(self, name: str) -> set[str]:
        """Whom a member of its role connects to: nought is worth a row there."""
        roles = {one.name: one.role for one in self._members}
        wanted = {
            Role.ROUTER: (Role.PREFILL, Role.DECODE),
            Role.DECODE: (Role.PREFILL,),
            Role.PREFILL: (),
        }[roles[name]]
        return {one.name for one in self._members if one.role in wanted}

    def _row(
        self, at: float, subject: str, value: Value, *, label: str = "", missing: str | None = None
    ) -> Observation:
        return Observation(
            source="process",
            subject=subject,
            name=v.SOCKETS,
            at=at,
            label=label,
            value=value,
            missing=missing,
            incarnation=self._incarnations.of(subject),
        )


def _doors(members: Iterable[Member]) -> dict[int, str]:
    """The ports that belong to one member alone, whatever its host: for ends that are elsewhere."""
    found: dict[int, set[str]] = defaultdict(set)
    for member in members:
        ports = [urlsplit(url).port for url in (member.url, member.metrics_url) if url]
        for port in [*ports, member.bootstrap_port]:
            if port is not None:
                found[port].add(member.name)
    return {port: min(names) for port, names in found.items() if len(names) == 1}


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError as error:
        raise Denied(f"its network cannot be seen: {error.strerror}") from None


def _links(pid: int) -> list[Link]:
    """Every TCP connection of the network namespace of a process."""
    found: list[Link] = []
    for table in ("tcp", "tcp6"):
        try:
            with Path(f"/proc/{pid}/net/{table}").open("rb") as file:
                text = file.read(TABLE_BYTES_MAX).decode("ascii", "replace")
        except OSError:
            continue
        if len(text) >= TABLE_BYTES_MAX:
            raise Denied(f"there are more connections than {TABLE_BYTES_MAX} bytes hold")
        for line in text.splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] in (ESTABLISHED, LISTENING):
                found.append(Link(_end(words[1]), _end(words[2]), words[3], int(words[9])))
    return found


def _end(text: str) -> End:
    """An address and a port; an IPv4 address reads the same in the table of IPv6."""
    address, _, port = text.partition(":")
    mapped = "0000000000000000FFFF0000"
    return address.removeprefix(mapped), int(port, 16)


def _inodes(pids: Sequence[int]) -> set[int]:
    """The sockets that these processes hold open. Raises `Denied` when the first is not ours."""
    found: set[int] = set()
    looked = 0
    for number, pid in enumerate(pids):
        try:
            with os.scandir(f"/proc/{pid}/fd") as files:
                for file in files:
                    looked += 1
                    if looked > FILES_MAX:
                        raise Denied(f"it has more than {FILES_MAX} open files")
                    try:
                        target = os.readlink(file.path)  # noqa: PTH115 - thousands of them
                    except OSError:
                        continue
                    if target.startswith("socket:["):
                        found.add(int(target[8:-1]))
        except OSError as error:
            if number == 0:
                raise Denied(
                    f"its open files are not ours to see ({error.strerror}): run Tandem as the "
                    "member's user, or as root"
                ) from None
    return found


__all__ = ["SocketSource"]

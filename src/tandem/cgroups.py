"""What a process's control group tells: the systemd unit and the container it belongs to.

For: finding both without being told. Not for: asking systemd or an engine whether it is so.
Source: cgroups(7); the paths of systemd, Docker, Podman and containerd, whichever drives them.
"""

import re
from pathlib import Path
from typing import NamedTuple

READ_BYTES_MAX = 64 * 1024

_CONTAINER_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_MANAGER = re.compile(r"user@(\d+)\.service")


class Service(NamedTuple):
    """A unit, and whose systemd has it: None is the system's, a number that user's own."""

    unit: str
    uid: int | None = None


class Place(NamedTuple):
    """Where a process belongs; what does not show is None."""

    service: Service | None = None
    container_id: str | None = None


def place_of(pid: int) -> Place:
    """The place of a living process; an empty one when it is gone or not ours to see."""
    try:
        with Path(f"/proc/{pid}/cgroup").open("rb") as file:
            return place_in(file.read(READ_BYTES_MAX).decode(errors="replace"))
    except OSError:
        return Place()


def place_in(text: str) -> Place:
    """The place that the text of `/proc/PID/cgroup` tells, in either version or both at once."""
    service: Service | None = None
    container_id: str | None = None
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Other hierarchies of version 1 may be grouped by somebody else.
        if controllers in ("", "name=systemd"):
            service = service or _service(path)
        found = _CONTAINER_ID.findall(path)
        if found:
            container_id = container_id or found[-1]
    return Place(service, container_id)


def _service(path: str) -> Service | None:
    """The innermost service of a path; a user's manager is not one of its own."""
    uid: int | None = None
    found: Service | None = None
    for part in path.split("/"):
        manager = _MANAGER.fullmatch(part)
        if manager:
            uid, found = int(manager[1]), None
        elif part.endswith(".service"):
            # A leading underscore keeps a name apart from the kernel's own files.
            found = Service(part.removeprefix("_"), uid)
    return found


__all__ = ["Place", "Service", "place_in", "place_of"]

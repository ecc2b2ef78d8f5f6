"""What systemd is told: that a watch is up, that a turn ended, how it stands, that it ends.

For: the datagrams of `sd_notify(3)` over `NOTIFY_SOCKET`, with the standard library alone.
Not for: deciding when to send one (`attendance.py`).
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping

from tandem.visible import one_line

SOCKET_VARIABLE = "NOTIFY_SOCKET"
VARIABLES = (SOCKET_VARIABLE, "WATCHDOG_USEC", "WATCHDOG_PID")
STATUS_CHARACTERS = 200


class Notifier:
    """Sends to the service manager, or to nobody when none started us; never raises, never waits.

    A datagram that systemd cannot take now is lost: the next turn sends another.
    """

    def __init__(self, address: str | None = None) -> None:
        """`address` is a socket's path, or its abstract name after `@`; None sends nothing."""
        self._address = _place(address)

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """The one of this environment, whose variables are taken out: they are not our children's.

        A member that a repair starts must not be able to speak for the watch.
        """
        address = environment.get(SOCKET_VARIABLE)
        for name in VARIABLES:
            environment.pop(name, None)
        return cls(address)

    @property
    def listened_to(self) -> bool:
        """Whether anybody listens."""
        return self._address is not None

    def send(self, *lines: str) -> bool:
        """Send assignments such as `READY=1` as one datagram; whether it was taken."""
        if self._address is None or not lines:
            return False
        with contextlib.suppress(OSError):
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            with socket.socket(socket.AF_UNIX, kind) as sender:
                sender.connect(self._address)
                data = "\n".join(lines).encode()
                return sender.send(data) == len(data)
        return False


def status(sentence: str) -> str:
    """The assignment that `systemctl status` shows: one line, bounded."""
    return f"STATUS={one_line(sentence)[:STATUS_CHARACTERS]}"


def _place(address: str | None) -> bytes | None:
    """The address as `connect` takes it; None for one that is no Unix socket."""
    if not address or address[0] not in "/@" or len(address) < 2:
        return None
    name = os.fsencode(address)
    return b"\0" + name[1:] if address[0] == "@" else name


__all__ = ["Notifier", "status"]

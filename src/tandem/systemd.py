"""systemd's own word on its units, over D-Bus: one thin client for whoever asks or acts.

For: the source of units, and whatever supervises members through systemd. Reading needs no rights.
Not for: what a state means, or which unit is whose.
Source: org.freedesktop.systemd1(5); names of properties are systemd's.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dbus_fast import BusType, DBusError, Message, MessageType, Variant
from dbus_fast.aio import MessageBus
from dbus_fast.errors import AuthError, InvalidAddressError

from tandem.errors import WorldError

SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"
TIMEOUT_S = 3.0
"""How long one answer may take; systemd's own answers take milliseconds."""
ENDS_MAX = 32
"""Ends of main processes remembered of one unit between two looks."""

_SERVICE_NAME = "org.freedesktop.systemd1"
_ROOT = "/org/freedesktop/systemd1"
_UNITS = f"{_ROOT}/unit/"
_MANAGER = f"{_SERVICE_NAME}.Manager"
_UNIT = f"{_SERVICE_NAME}.Unit"
_SERVICE = f"{_SERVICE_NAME}.Service"
_PROPERTIES = "org.freedesktop.DBus.Properties"

_EXITED, _KILLED, _DUMPED = 1, 2, 3
"""`CLD_EXITED`, `CLD_KILLED`, `CLD_DUMPED`, as in wait(2)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """How one main process of a unit ended."""

    at: float
    pid: int
    code: int
    """Its exit code; negative when a signal ended it."""
    how: str
    """`exit code 3`, `killed by SIGKILL`, `killed by SIGSEGV (core dumped)`."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One service as systemd has it now; times are unix seconds, None where nothing happened."""

    name: str
    loaded: str
    """`loaded`, `not-found`, `masked`, `bad-setting`, ..."""
    active: str
    sub: str
    result: str
    restarts: int
    main_pid: int | None
    started_at: float | None
    ended: Ended | None
    """How the last main process ended, while no new one has begun."""
    invocation: str
    files: tuple[str, ...]
    """The unit file, then its drop-ins."""
    reload_needed: bool


def user_bus(uid: int) -> str:
    """Where the bus of a user's own systemd is."""
    folder = os.environ.get("XDG_RUNTIME_DIR") if uid == os.getuid() else None
    return f"unix:path={folder or f'/run/user/{uid}'}/bus"


class Systemd:
    """One systemd, the system's or a user's; connects when first asked, and again after a break."""

    def __init__(self, address: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """`address` is a D-Bus address; without one, the system bus."""
        self.address = address or os.environ.get("DBUS_SYSTEM_BUS_ADDRESS", SYSTEM_BUS)
        self._timeout_s = timeout_s
        self._bus: MessageBus | None = None
        self._connecting = asyncio.Lock()
        self._followed: dict[str, str] = {}
        self._ends: dict[str, deque[Ended]] = {}

    async def unit(self, name: str) -> Unit:
        """A service as it is now; one that systemd does not know is `not-found`.

        Raises `WorldError` when systemd cannot be asked.
        """
        path = _path(name)
        of_unit, of_service = await asyncio.gather(
            self._properties(path, _UNIT), self._properties(path, _SERVICE)
        )
        return _unit_from(name, of_unit, of_service)

    async def follow(self, name: str) -> None:
        """Remember from now on how main processes of a unit end; see `ended`.

        A restart that is over between two looks leaves no other trace. Raises `WorldError`.
        """
        path = _path(name)
        if path in self._followed and self._connected is not None:
            return
        rule = (
            f"type='signal',sender='{_SERVICE_NAME}',interface='{_PROPERTIES}',"
            f"member='PropertiesChanged',path='{path}'"
        )
        await self._call(
            Message(
                destination="org.freedesktop.DBus",
                path="/org/freedesktop/DBus",
                interface="org.freedesktop.DBus",
                member="AddMatch",
                signature="s",
                body=[rule],
            )
        )
        if not self._followed:
            # systemd tells of changes only while somebody asked to be told.
            await self.manage("Subscribe")
        self._followed[path] = name

    def ended(self, name: str) -> tuple[Ended, ...]:
        """The ends seen since the last call, oldest first."""
        seen = self._ends.pop(name, deque())
        return tuple(seen)

    async def manage(self, method: str, signature: str = "", *arguments: object) -> list[object]:
        """Call a method of systemd's manager (`StartUnit`, `Reload`) and give its answer.

        Raises `WorldError` with systemd's own words when it refuses.
        """
        return await self._call(
            Message(
                destination=_SERVICE_NAME,
                path=_ROOT,
                interface=_MANAGER,
                member=method,
                signature=signature,
                body=list(arguments),
            )
        )

    async def close(self) -> None:
        """Leave the bus."""
        bus, self._bus = self._bus, None
        self._followed.clear()
        if bus is not None and bus.connected:
            bus.disconnect()
            left: asyncio.Future[None] = asyncio.ensure_future(
                bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
            )
            await asyncio.wait([left], timeout=1.0)

    @property
    def _connected(self) -> MessageBus | None:
        return self._bus if self._bus is not None and self._bus.connected else None

    async def _properties(self, path: str, interface: str) -> Mapping[str, Variant]:
        (found,) = await self._call(
            Message(
                destination=_SERVICE_NAME,
                path=path,
                interface=_PROPERTIES,
                member="GetAll",
                signature="s",
                body=[interface],
            )
        )
        return found if isinstance(found, dict) else {}

    async def _call(self, message: Message) -> list[object]:
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await (await self._connect()).call(message)
        except TimeoutError:
            await self.close()
            raise WorldError(
                f"systemd did not answer within {self._timeout_s:g} s.",
                next_step="See whether `systemctl status` answers.",
            ) from None
        except (OSError, EOFError, AuthError, DBusError, InvalidAddressError) as error:
            await self.close()
            raise WorldError(
                f"there is no systemd to ask at {self.address}: {error}.",
                next_step="Run Tandem on the host itself, where systemd is.",
            ) from None
        if reply.message_type is MessageType.ERROR:
            told = reply.body[0] if reply.body else "no reason given"
            raise WorldError(
                f"systemd refused: {told} ({reply.error_name}).",
                next_step="Give this user the right, or run Tandem as root.",
            )
        return list(reply.body)

    async def _connect(self) -> MessageBus:
        async with self._connecting:
            if (bus := self._connected) is not None:
                return bus
            self._followed.clear()
            bus = MessageBus(bus_address=self.address, bus_type=BusType.SYSTEM)
            await bus.connect()
            bus.add_message_handler(self._hear)
            self._bus = bus
            return bus

    def _hear(self, message: Message) -> None:
        """Keep the end of a main process that a signal tells of."""
        if message.message_type is not MessageType.SIGNAL or not message.body:
            return
        name = self._followed.get(message.path or "")
        if name is None or message.body[0] != _SERVICE:
            return
        end = _end_from(message.body[1])
        if end is None:
            return
        seen = self._ends.setdefault(name, deque(maxlen=ENDS_MAX))
        if end not in seen:
            seen.append(end)


def _path(unit: str) -> str:
    """A unit's object: what is no letter or digit is escaped, a leading digit as well."""
    escaped = "".join(
        character
        if character.isascii() and (character.isalpha() or (character.isdigit() and at))
        else "".join(f"_{byte:02x}" for byte in character.encode())
        for at, character in enumerate(unit)
    )
    return _UNITS + escaped


def _value(found: Mapping[str, Variant], name: str, kind: Callable[[], T]) -> T:
    """A property of the kind wanted; what is missing, or of another kind, is the kind's zero."""
    variant = found.get(name)
    value = None if variant is None else variant.value
    zero = kind()
    return value if isinstance(value, type(zero)) else zero


def _seconds(found: Mapping[str, Variant], name: str) -> float | None:
    microseconds = _value(found, name, int)
    return microseconds / 1e6 if microseconds else None


def _end_from(found: Mapping[str, Variant]) -> Ended | None:
    code, status = _value(found, "ExecMainCode", int), _value(found, "ExecMainStatus", int)
    at = _seconds(found, "ExecMainExitTimestamp")
    if at is None or code not in (_EXITED, _KILLED, _DUMPED):
        return None
    signed = status if code == _EXITED else -status
    return Ended(at, _value(found, "ExecMainPID", int), signed, _how(code, status))


def _how(code: int, status: int) -> str:
    if code == _EXITED:
        return f"exit code {status}"
    try:
        name = signal.Signals(status).name
    except ValueError:
        name = f"signal {status}"
    return f"killed by {name}" + (" (core dumped)" if code == _DUMPED else "")


def _unit_from(
    name: str, of_unit: Mapping[str, Variant], of_service: Mapping[str, Variant]
) -> Unit:
    files = [_value(of_unit, "FragmentPath", str), *_value(of_unit, "DropInPaths", list)]
    return Unit(
        name=_value(of_unit, "Id", str) or name,
        loaded=_value(of_unit, "LoadState", str),
        active=_value(of_unit, "ActiveState", str),
        sub=_value(of_unit, "SubState", str),
        result=_value(of_service, "Result", str),
        restarts=_value(of_service, "NRestarts", int),
        main_pid=_value(of_service, "MainPID", int) or None,
        started_at=_seconds(of_service, "ExecMainStartTimestamp"),
        ended=_end_from(of_service),
        invocation=_value(of_unit, "InvocationID", bytes).hex(),
        files=tuple(path for path in files if path),
        reload_needed=_value(of_unit, "NeedDaemonReload", bool),
    )


__all__ = ["Ended", "Systemd", "Unit", "user_bus"]

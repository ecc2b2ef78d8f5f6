"""A container engine's word on its containers: the Docker Engine API over its socket.

For: the source of containers, and whatever supervises members through an engine. Podman's service
speaks the same. Not for: what a state means, or which container is whose.
Source: Docker Engine API, `GET /containers/{id}/json`. Paths carry no version: an engine then
answers in its own, while Docker 29 refuses versions below 1.44 and Podman 4 knows none above 1.41.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import msgspec

from tandem.errors import WorldError
from tandem.fetch import fetch

TIMEOUT_S = 3.0
BODY_BYTES_MAX = 4 * 1024 * 1024
"""An inspected container has some kilobytes."""
DOCKER_GROUP = "Add this user to the group `docker`, or run Tandem as root."
EVENTS_MAX = 256
"""Docker itself remembers no more."""
_BASE = "http://engine"
_NEVER = "0001-01-01"
"""How Go writes a time that has not come."""


class Exit(NamedTuple):
    """One end of a container's main process."""

    at: float
    code: int


@dataclass(frozen=True, slots=True)
class Container:
    """One container as its engine has it now; times are unix seconds."""

    id: str
    name: str
    state: str
    """`created`, `running`, `paused`, `restarting`, `removing`, `exited` or `dead`."""
    pid: int | None
    """Of its main process on the host, while it runs."""
    exit_code: int | None
    """Of its last end; None before the first, and again while it runs: engines forget it then."""
    error: str
    oom_killed: bool
    restarts: int
    started_at: float | None
    finished_at: float | None
    health: str | None
    """`starting`, `healthy`, `unhealthy`; None without a health check."""
    image: str
    image_id: str
    tty: bool
    """Whether it has a terminal: its log is then one stream, without frames."""


class _Health(msgspec.Struct, rename="pascal"):
    status: str = ""


class _State(msgspec.Struct, rename="pascal"):
    status: str = ""
    pid: int = 0
    exit_code: int = 0
    error: str = ""
    oom_killed: bool = msgspec.field(default=False, name="OOMKilled")
    started_at: str = ""
    finished_at: str = ""
    health: _Health | None = None


class _Config(msgspec.Struct, rename="pascal"):
    image: str = ""
    tty: bool = False


class _Inspected(msgspec.Struct, rename="pascal"):
    id: str
    name: str = ""
    state: _State = msgspec.field(default_factory=_State)
    restart_count: int = 0
    image: str = ""
    config: _Config = msgspec.field(default_factory=_Config)


class _Actor(msgspec.Struct, rename="pascal"):
    attributes: dict[str, str] = {}


class _Event(msgspec.Struct):
    action: str = msgspec.field(default="", name="Action")
    actor: _Actor = msgspec.field(default_factory=_Actor, name="Actor")
    time_ns: int = msgspec.field(default=0, name="timeNano")


class _Refusal(msgspec.Struct):
    message: str = ""


def socket_paths(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Where an engine may listen on this host, likeliest first.

    A `DOCKER_HOST` over ssh or TCP is another host's engine and not asked.
    """
    named = environment.get("DOCKER_HOST", "")
    run = environment.get("XDG_RUNTIME_DIR")
    found = [named.removeprefix("unix://")] if named.startswith("unix://") else []
    found.append("/var/run/docker.sock")
    if run:
        found += [f"{run}/docker.sock", f"{run}/podman/podman.sock"]
    found.append("/run/podman/podman.sock")
    return tuple(dict.fromkeys(found))


def elsewhere(environment: Mapping[str, str]) -> str | None:
    """The `DOCKER_HOST` that is not asked because it is no socket of this host, without secrets."""
    named = environment.get("DOCKER_HOST", "")
    if not named or named.startswith("unix://"):
        return None
    return f"{urlsplit(named).scheme or 'unknown'}://..."


class ContainerEngine:
    """One engine behind one socket."""

    def __init__(self, path: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """`path` is its unix socket; nothing is opened before the first question."""
        self.path = path
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    def there(self) -> bool:
        """Whether the socket exists; that somebody answers is another matter."""
        return os.path.exists(self.path)  # noqa: PTH110 - a path that may not be entered is False

    async def container(self, name_or_id: str) -> Container | None:
        """A container as it is now, None when this engine has none of that name.

        Raises `WorldError` when the engine cannot be asked.
        """
        status, body = await self.ask(f"/containers/{quote(name_or_id, safe='')}/json")
        if status == 404:
            return None
        if status != 200:
            raise WorldError(
                f"The engine at {self.path} answered HTTP {status}: {_refusal(body)}.",
                next_step="See whether `docker inspect` or `podman inspect` answers.",
            )
        try:
            return _container(msgspec.json.decode(body, type=_Inspected))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WorldError(
                f"The engine at {self.path} described {name_or_id} in another way: {error}.",
                next_step="Please report it with the engine's version.",
            ) from None

    async def exit_codes(self, container_id: str, *, since: float, until: float) -> list[Exit]:
        """How a container ended between two times, oldest first, as far as its engine remembers.

        An engine answers when `until` has come: Podman loses events where that is in the past.
        Raises `WorldError` when it cannot be asked.
        """
        filters = msgspec.json.encode({"type": ["container"], "container": [container_id]})
        query = urlencode({"since": int(since), "until": int(until), "filters": filters})
        status, body = await self.ask(f"/events?{query}")
        if status != 200:
            return []
        ends: list[Exit] = []
        for line in body.splitlines()[-EVENTS_MAX:]:
            try:
                told = msgspec.json.decode(line, type=_Event)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            told_code = told.actor.attributes
            code = told_code.get("exitCode") or told_code.get("containerExitCode") or ""
            if told.action in ("die", "died") and code.isdigit():
                ends.append(Exit(told.time_ns / 1e9, int(code)))
        return ends

    async def follow(
        self, container_id: str, *, since: float | None, tail: int
    ) -> aiohttp.ClientResponse:
        """What a container writes, each line with its time, as a stream until it ends.

        From just after `since`, else from the last `tail` lines on. Close the response.
        Raises `WorldError` when the engine will not give it.
        """
        query = {"follow": "1", "stdout": "1", "stderr": "1", "timestamps": "1"}
        query |= {"tail": str(tail)} if since is None else {"since": f"{since:.6f}"}
        path = f"/containers/{quote(container_id, safe='')}/logs?{urlencode(query)}"
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._opened().get(
                    f"{_BASE}{path}", timeout=aiohttp.ClientTimeout(total=None)
                )
                if response.status == 200:
                    return response
                body = await response.content.read(BODY_BYTES_MAX)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unanswered(str(error) or type(error).__name__) from None
        response.close()
        raise WorldError(
            f"The engine at {self.path} gives no log: {_refusal(body)}.",
            next_step="Give the container a log driver that can be read, or the member a `log`.",
        )

    async def ask(
        self, path: str, *, json: Mapping[str, object] | None = None
    ) -> tuple[int, bytes]:
        """GET a path of the API, or POST it when `json` is given: status and body.

        Raises `WorldError` when nobody answers.
        """
        got = await fetch(
            self._opened(),
            f"{_BASE}{path}",
            timeout_s=self._timeout_s,
            json=json,
            body_bytes_max=BODY_BYTES_MAX,
        )
        if got.status is None:
            raise self._unanswered(got.why_not)
        return got.status, got.body

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self.path, force_close=True), trust_env=False
            )
        return self._session

    def _unanswered(self, why: str) -> WorldError:
        if self.there() and not os.access(self.path, os.R_OK | os.W_OK):
            return WorldError(f"{self.path} is not ours to open.", next_step=DOCKER_GROUP)
        return WorldError(
            f"The engine at {self.path} gave no answer: {why}.",
            next_step="Start it: `systemctl start docker`, or `podman.socket`.",
        )

    async def close(self) -> None:
        """Close what is open."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _container(told: _Inspected) -> Container:
    state = told.state
    finished_at = _seconds(state.finished_at)
    return Container(
        id=told.id,
        name=told.name.removeprefix("/"),
        state=state.status,
        pid=state.pid or None,
        exit_code=None if finished_at is None or state.pid else state.exit_code,
        error=state.error,
        oom_killed=state.oom_killed,
        restarts=told.restart_count,
        started_at=_seconds(state.started_at),
        finished_at=finished_at,
        # Podman gives an empty health, Docker `none` or nothing at all.
        health=state.health.status if state.health and state.health.status not in _NONE else None,
        image=told.config.image,
        image_id=told.image,
        tty=told.config.tty,
    )


_NONE = ("", "none")


def _seconds(text: str) -> float | None:
    """The unix seconds of a Go time, which may have nine digits of fraction."""
    if not text or text.startswith(_NEVER):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _refusal(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).message[:300] or "no reason given"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "no reason given"


__all__ = ["Container", "ContainerEngine", "Exit", "elsewhere", "socket_paths"]

"""One bounded HTTP question, answered with a reply or with the reason why there is none.

For: adapters that talk to engines and routers; failing to reach something is a value here, never an
exception, because it becomes an observation. Not for: retries, or what a reply means.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

BODY_BYTES_MAX = 16 * 1024 * 1024
"""More than any reply we ask for; a longer one is refused, not kept."""
PAGE_BYTES_MAX = 8 * 1024 * 1024
"""Of a metrics page, which is read once a second; what stands beyond is named missing."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """How one question ended: a status with a body, or `problem`: one clause saying why not."""

    status: int | None
    body: bytes
    latency_s: float
    problem: str | None = None
    refused: bool = False
    """Nobody listens there: a definite answer, unlike silence."""
    timed_out: bool = False
    cut: bool = False
    """There was more than `body`: its beginning was asked for, up to a bound."""

    @property
    def ok(self) -> bool:
        """Whether it was answered with 200."""
        return self.status == 200

    @property
    def why_not(self) -> str:
        """One clause for an observation's `missing`: the problem, or the unwelcome status."""
        return self.problem or f"answered HTTP {self.status}"


def session() -> aiohttp.ClientSession:
    """The session for watching: a fresh connection each time, no proxy, no cap on how many.

    A kept connection would hide that a process no longer accepts, and would race with servers that
    close idle ones after 5 s (SGLang, vLLM).
    """
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    return aiohttp.ClientSession(connector=connector, trust_env=False)


async def fetch(
    client: aiohttp.ClientSession,
    url: str,
    *,
    timeout_s: float,
    json: Mapping[str, object] | None = None,
    form: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    body_bytes_max: int = BODY_BYTES_MAX,
    cut: bool = False,
) -> Fetched:
    """GET a URL, or POST it when `json` or `form` is given; bounded in time and size.

    A longer body is refused, or with `cut` read to the bound. What is compressed is bounded as it
    comes out.
    """
    began = time.monotonic()

    def unanswered(problem: str, *, refused: bool = False, timed_out: bool = False) -> Fetched:
        return Fetched(None, b"", time.monotonic() - began, problem, refused, timed_out)

    try:
        async with client.request(
            "GET" if json is None and form is None else "POST",
            url,
            json=json,
            data=form,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 18):
                body += chunk
                if len(body) <= body_bytes_max:
                    continue
                if not cut:
                    return unanswered(f"sent more than {body_bytes_max} bytes")
                read = bytes(body[:body_bytes_max])
                return Fetched(response.status, read, time.monotonic() - began, cut=True)
            return Fetched(response.status, bytes(body), time.monotonic() - began)
    except TimeoutError:
        return unanswered(f"no answer within {timeout_s:g} s", timed_out=True)
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        problem = "connection refused" if refused else f"cannot connect: {error.os_error}"
        return unanswered(problem, refused=refused)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return unanswered(f"connection broke: {str(error) or type(error).__name__}")


async def cancelled(task: "asyncio.Task[Fetched]") -> None:
    """Cancel a question and wait until its connection is closed."""
    task.cancel()
    await asyncio.wait([task], timeout=5.0)


def host_of(url: str) -> str:
    """The host part of a URL, without brackets."""
    return urlsplit(url).hostname or ""


def address(url: str) -> str:
    """A URL reduced to `scheme://host:port`, for comparing: case, path and loopback names aside.

    What is no URL is compared as it is.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        return url
    host = (parts.hostname or "").lower()
    host = "127.0.0.1" if host in ("localhost", "::1", "0.0.0.0") else host  # noqa: S104
    return f"{parts.scheme.lower()}://{host}:{port or (443 if parts.scheme == 'https' else 80)}"


__all__ = ["PAGE_BYTES_MAX", "Fetched", "address", "cancelled", "fetch", "host_of", "session"]

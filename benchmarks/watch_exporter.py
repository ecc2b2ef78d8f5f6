"""Many engines that are none: pages recorded from the embedded engine, served on many ports.

`watch_exporter.py FILE PREFILLS PORT...`: the pages of FILE (see `record`) on every port.
The pages are those of a toy pair that served requests, padded to the volume a tensor-parallel
engine has in production: every histogram once more for each further rank.

For: the cost of looking at many members. Not for: anything that has to be true of them.
"""

import asyncio
import json
import sys
from pathlib import Path

from fleet import Pair, running, worker

RANKS = 8
"""Tensor-parallel ranks of an engine in production: each has its own histograms."""
PATHS = ("/metrics", "/v1/loads?include=core,disagg", "/server_info", "/health")
Pages = dict[str, dict[str, str]]


async def record() -> Pages:
    """The pages of a prefill and of a decode that served twenty requests."""
    pair = Pair(worker("prefill", "toy"), worker("decode", "toy"))
    pages: Pages = {}
    async with running(pair.prefill, pair.decode) as http:
        for number in range(20):
            await pair.stream(http, list(range(40, 60 + number)), 8)
        for role, process in (("prefill", pair.prefill), ("decode", pair.decode)):
            pages[role] = {}
            for path in PATHS:
                async with http.get(process.url + path) as reply:
                    pages[role][path] = await reply.text()
            pages[role]["/metrics"] = padded(pages[role]["/metrics"])
    return pages


def padded(page: str) -> str:
    """The page with the histograms of every rank, in the order of the text format."""
    lines: list[str] = []
    block: list[str] = []
    for line in [*page.splitlines(), "# HELP"]:
        if line.startswith("# HELP") and block:
            lines += block
            if any("_bucket{" in one for one in block):
                samples = [one for one in block if not one.startswith("#")]
                lines += [_of_rank(one, rank) for rank in range(1, RANKS) for one in samples]
            block = []
        block.append(line)
    return "\n".join(lines) + "\n"


def _of_rank(line: str, rank: int) -> str:
    if 'tp_rank="0"' in line:
        return line.replace('tp_rank="0"', f'tp_rank="{rank}"')
    return line.replace("{", f'{{moe_ep_rank="{rank}",', 1)


class Served(asyncio.Protocol):
    """One connection: a known path gets its page, any other 404."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        """`answers` by request target."""
        self._answers = answers
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole; none has a body."""
        self._rest += data
        while b"\r\n\r\n" in self._rest:
            head, _, self._rest = self._rest.partition(b"\r\n\r\n")
            target = head.split(b" ", 2)[1]
            self._transport.write(self._answers.get(target, NOT_FOUND))  # type: ignore[attr-defined]


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


def _answers(pages: dict[str, str]) -> dict[bytes, bytes]:
    found = {}
    for path, text in pages.items():
        kind = b"text/plain" if path in ("/metrics", "/health") else b"application/json"
        body = text.encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        found[path.encode()] = head % (kind, len(body)) + body
    return found


async def serve(pages: Pages, prefills: int, ports: list[int]) -> None:
    """Listen on every port until ended; the first are prefills."""
    loop = asyncio.get_running_loop()
    answers = {role: _answers(of_role) for role, of_role in pages.items()}
    for number, port in enumerate(ports):
        role = "prefill" if number < prefills else "decode"
        mine = answers[role]
        await loop.create_server(lambda mine=mine: Served(mine), "127.0.0.1", port, backlog=64)
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(
        serve(
            json.loads(Path(sys.argv[1]).read_text()),
            int(sys.argv[2]),
            [int(p) for p in sys.argv[3:]],
        )
    )

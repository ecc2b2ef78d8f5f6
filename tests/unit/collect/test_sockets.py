"""Who has opened how many connections to whom, as the kernel's tables say it."""

import asyncio
import sys

import pytest

from tandem.collect.families import Families
from tandem.collect.incarnations import Incarnations
from tandem.collect.sockets import SocketSource
from tandem.processes import life_of
from tandem.records import Member, Role

LISTENS = """
import os, select, socket, sys
listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
six = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
os.write(1, " ".join(str(one.getsockname()[1]) for one in [*listeners, six]).encode() + b"\\n")
held = []
while True:
    ready, _, _ = select.select([*listeners, six, sys.stdin], [], [])
    if sys.stdin in ready:
        break
    held += [one.accept() for one in ready]
"""
CONNECTS = """
import os, socket, sys
links = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
if os.fork() == 0:
    links.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    os.write(1, b"connected\\n")
sys.stdin.read()
"""


class Started:
    """A process whose words on stdout were read."""

    def __init__(self, process, said):
        self.process, self.said = process, said


async def start(stack, code, *arguments):
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdin=pipe, stdout=pipe
    )
    stack.append(process)
    line = await asyncio.wait_for(process.stdout.readline(), 10.0)
    return Started(process, line.split())


@pytest.fixture
async def running():
    """Processes of a test, ended after it: they read their stdin to its end."""
    processes = []
    yield processes
    for process in processes:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10.0)


def member(name, role, port=1):
    return Member(name=name, role=role, url=f"http://127.0.0.1:{port}", engine="sglang")


def source_of(*pairs):
    lives = Incarnations()
    for one, pid in pairs:
        lives.saw(one.name, None if pid is None else life_of(pid))
    return SocketSource([one for one, _ in pairs], lives, Families())


async def look(source):
    harvest = await source.collect()
    return {(one.subject, one.label): one for one in harvest.observations}


async def test_connections_are_counted_by_who_opened_them(running):
    """Two to known and unknown ports, one over IPv6's table, one of a child: all the decode's."""
    listens = await start(running, LISTENS)
    connects = await start(running, CONNECTS, *(port.decode() for port in listens.said))
    prefill, decode = member("p", Role.PREFILL, int(listens.said[0])), member("d", Role.DECODE)
    source = source_of((prefill, listens.process.pid), (decode, connects.process.pid))
    async with asyncio.timeout(10.0):
        while (seen := await look(source))["p", ""].value < 4:
            await asyncio.sleep(0)

    assert {key: one.value for key, one in seen.items()} == {
        ("p", ""): 4,
        ("d", ""): 4,
        ("d", "p"): 4,
    }


async def test_a_decode_without_a_connection_says_nought(running):
    """Where a member of its role would have one, none is worth a row."""
    listens = await start(running, LISTENS)
    other = await start(running, LISTENS)
    seen = await look(
        source_of(
            (member("p", Role.PREFILL), listens.process.pid),
            (member("d", Role.DECODE), other.process.pid),
            (member("gone", Role.DECODE), None),
        )
    )

    assert {key: one.value for key, one in seen.items()} == {
        ("p", ""): 0,
        ("d", ""): 0,
        ("d", "p"): 0,
    }


@pytest.mark.parametrize(
    ("bound", "why"), [("FILES_MAX", "open files"), ("TABLE_BYTES_MAX", "more connections than")]
)
async def test_too_much_is_a_reason(running, monkeypatch, bound, why):
    """Beyond a bound nothing is counted, and the row says which."""
    monkeypatch.setattr(f"tandem.collect.sockets.{bound}", 1)
    listens = await start(running, LISTENS)
    seen = await look(source_of((member("p", Role.PREFILL), listens.process.pid)))

    assert why in seen["p", ""].missing


async def test_a_process_that_is_gone_is_a_reason(running):
    """What ended between two looks raises nothing."""
    listens = await start(running, LISTENS)
    source = source_of((member("p", Role.PREFILL), listens.process.pid))
    listens.process.stdin.close()
    await listens.process.wait()
    seen = await look(source)

    assert "cannot be seen" in seen["p", ""].missing

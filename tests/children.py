"""A small HTTP server as a member, for tests of supervisors: started, stopped, killed for real."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys

import msgspec

from tandem.records import Launch, Member, Role

DEADLINE_S = 10.0

CHILD = """
import os, signal, socket, subprocess, sys
port, *flags = sys.argv[1:]
if "stubborn" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "helper" in flags:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    helper = subprocess.Popen([sys.executable, "-c", code], start_new_session=False)
server = socket.create_server(("127.0.0.1", int(port)))
print("listening", os.environ.get("SGLANG_FLAVOUR", "plain"), *flags, flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    connection.close()
    if "crash" in flags:
        os._exit(3)
"""


async def until(condition):
    """Wait until a condition holds, at most `DEADLINE_S`."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def answers(member):
    port = int(member.url.rpartition(":")[2])
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as link:
        link.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return link.recv(16).startswith(b"HTTP")
    return False


WITH_PATH = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def starting(member, root, then="pass"):
    """A command of its own that starts a member, and then does something."""
    code = (
        "import asyncio, sys, msgspec; from pathlib import Path;"
        "from tandem.records import Member;"
        "from tandem.supervisors.local import LocalSupervisor;"
        "member = msgspec.json.decode(sys.argv[2], type=Member);"
        f"asyncio.run(LocalSupervisor(Path(sys.argv[1])).start(member)); {then}"
    )
    return [sys.executable, "-c", code, str(root), msgspec.json.encode(member).decode()]


def member_of(folder, *flags, port=None, **launch):
    """A decode whose process answers HTTP; `flags` are words of `CHILD`."""
    child = folder / "child.py"
    child.write_text(CHILD)
    port = port or free_port()
    argv = (sys.executable, str(child), str(port), *flags)
    return Member(
        name="decode-0",
        role=Role.DECODE,
        url=f"http://127.0.0.1:{port}",
        engine="sglang",
        supervisor="local",
        launch=Launch(**{"argv": argv, "cwd": str(folder), **launch}),
    )


def end_all(folder):
    """Kill whatever the run records of a folder still name."""
    for path in (folder / ".tandem" / "run").glob("*.json"):
        pid = json.loads(path.read_text()).get("pid", 0)
        with contextlib.suppress(ProcessLookupError):
            if pid and os.getsid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)

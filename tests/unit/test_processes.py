"""Who listens where is found out once for all members that are looked for at one time."""

import contextlib
import os
import socket

import psutil

from tandem import processes


def test_members_looked_for_together_cost_one_reading(monkeypatch):
    """Every open file of the host is read once for fifty ports, and again for a newer one."""
    read = []
    real = psutil.net_connections

    def counted(kind):
        read.append(kind)
        return real(kind=kind)

    monkeypatch.setattr(processes.psutil, "net_connections", counted)
    monkeypatch.setattr(processes, "SHARED_S", 60.0)
    monkeypatch.setattr(processes, "_SEEN", processes._Listeners())
    with contextlib.ExitStack() as stack:
        ports = []
        for number in range(51):
            held = stack.enter_context(socket.socket())
            if number == 50:
                lives = {processes.listening_life("127.0.0.1", one).pid for one in ports}
                before = len(read)
            held.bind(("127.0.0.1", 0))
            held.listen()
            ports.append(held.getsockname()[1])
        newest = processes.listening_life("127.0.0.1", ports[-1])

    assert (lives, before) == ({os.getpid()}, 1)
    assert (newest.pid, len(read)) == (os.getpid(), 2)
    assert processes.listening_life("127.0.0.1", ports[0]) is None

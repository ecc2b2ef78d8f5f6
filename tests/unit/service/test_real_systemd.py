"""The shipped unit under a real systemd: up when it has looked, restarted when it hangs or dies."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

import tidy
from booted import Booted, hidden_trees
from tandem.config import load
from tandem.exports import watch_unit

pytestmark = [pytest.mark.needs("systemd"), pytest.mark.timeout(180)]

STACKS = "stacks.service"
UNIT = "tandem-watch.service"
UNTIL_S = 60.0
PAIR = """
[deployment]
name = "pair"
[watch]
interval_s = 0.2
[[member]]
name = "prefill-0"
role = "prefill"
url = "http://127.0.0.1:9"
bootstrap_port = 7
[[member]]
name = "decode-0"
role = "decode"
url = "http://127.0.0.1:11"
"""
HANGS = """
import asyncio, os, sys, time
from tandem import loop
from tandem.collect import Collector
from tandem.__main__ import main

real = Collector.tick

async def tick(self, patience_s=0.6):
    while os.path.exists("/run/pair/hang"):
        time.sleep(0.1)
    return await real(self, patience_s)

ends = loop._Watcher.end

async def end(self):
    await asyncio.sleep(3.0 if os.path.exists("/run/pair/slowly") else 0.0)
    await ends(self)

Collector.tick, loop._Watcher.end = tick, end
sys.exit(main(["watch", "--config", "/run/pair/tandem.toml"]))
"""
"""A watch that hangs in the middle of a turn while a file is there, and ends slowly by another."""
QUICKER = """
[Service]
Environment=PYTHONPATH={source}
ExecStart=
ExecStart={python} /run/pair/hangs.py
WatchdogSec=2
TimeoutAbortSec=1
RestartSec=100ms
"""
"""The same unit with shorter waits, that program, and this tree instead of a package."""


@pytest.fixture(scope="module")
def booted():
    """Boot a systemd with the exported unit of a pair that answers nothing."""
    machine = Booted()
    try:
        folder = machine.root / "run/pair"
        folder.mkdir()
        (folder / "tandem.toml").write_text(PAIR)
        settings = load(folder / "tandem.toml")
        text = watch_unit(settings, config=folder / "tandem.toml", python=sys.executable)
        # As it is called in there.
        text = text.replace(str(machine.root), "")
        if hidden_trees():  # what runs is itself below /tmp
            text = text.replace("PrivateTmp=yes", "PrivateTmp=no")
        machine.write(UNIT, text)
        machine.text = text
        (folder / "hangs.py").write_text(HANGS)
        quicker = QUICKER.format(source=tidy.ROOT / "src", python=sys.executable)
        machine.write(f"{UNIT}.d/quicker.conf", quicker)
        yield machine
    finally:
        machine.close()


def shown(machine):
    """What systemd knows of the service."""
    names = "ActiveState,StatusText,MainPID,NRestarts,Result"
    lines = machine.run("systemctl", "show", f"--property={names}", UNIT).splitlines()
    return dict(line.split("=", 1) for line in lines)


async def until(machine, **wanted):
    """Wait until systemd shows these; gives all of it."""
    async with asyncio.timeout(UNTIL_S):
        while any((seen := shown(machine))[name] != value for name, value in wanted.items()):
            await asyncio.sleep(0.05)
    return seen


class TestService:
    """Its life, in order: one systemd serves all of it."""

    async def test_its_life_under_systemd(self, booted):
        """Started, hung, killed and stopped: it looks again each time, and ends without failing."""
        booted.run("systemctl", "start", UNIT)
        up = shown(booted)
        hang = booted.root / "run/pair/hang"
        hang.touch()
        await until(booted, NRestarts="1")
        hang.unlink()
        again = await until(booted, ActiveState="active")
        booted.run("kill", "-KILL", again["MainPID"])
        third = await until(booted, NRestarts="2", ActiveState="active")
        (booted.root / "run/pair/slowly").touch()
        booted.run("systemctl", "stop", UNIT)
        ended = shown(booted)
        journal = booted.run("journalctl", "--unit", UNIT, "--output=cat")
        events = (booted.root / "run/pair/.tandem/state.sqlite").exists()

        # `start` came back when READY was told, after a turn: the status is of that turn.
        assert up["ActiveState"] == "active"
        assert up["StatusText"] == "pair: watched, nothing found"
        assert len({one["MainPID"] for one in (up, again, third)}) == 3
        # Longer than the watchdog: while it ends nobody waits for turns.
        assert (ended["ActiveState"], ended["Result"]) == ("inactive", "success")
        assert events
        assert "Fatal Python error: Aborted" in journal
        assert 'File "/run/pair/hangs.py", line 11 in tick' in journal  # where it hung

    def test_in_its_bounds_stacks_can_be_taken(self, booted):
        """The hardening lets py-spy look into another process of the same user."""
        booted.write(
            "engine.service",
            f"[Service]\nExecStart={sys.executable} -c 'import time; time.sleep(999)'\n",
        )
        booted.run("systemctl", "start", "engine.service")
        pid = booted.run("systemctl", "show", "--property=MainPID", "--value", "engine.service")
        spy = Path(sys.executable).with_name("py-spy")
        text = re.sub(
            r"(?m)^ExecStart=.*$", f"ExecStart={spy} dump --pid {pid.strip()}", booted.text
        )
        text = (
            re.sub(r"(?m)^(Type|WatchdogSec|Restart)=.*$", "", text) + "\n[Service]\nType=oneshot\n"
        )
        booted.write(STACKS, text)
        booted.run("systemctl", "start", STACKS)

        assert "<module>" in booted.run("journalctl", "--unit", STACKS, "--output=cat")

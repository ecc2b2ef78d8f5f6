"""A whole systemd, booted in namespaces of its own: for tests of whatever speaks to the real one.

For: units that start, fail and restart, a bus and a journal, without touching this machine's own.
Not for: a machine without root or `unshare`: mark the test `needs("systemd")`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import tidy

BOOT_S = 30.0
HIDDEN = {Path("/tmp"), Path("/var/tmp")}  # noqa: S108 - named, and nothing is put there
NAMESPACES = ("--pid", "--mount", "--fork", "--mount-proc", "--cgroup")

# Everything that the booted systemd clears or writes is hidden behind memory first: /tmp and
# /var/tmp are emptied at boot, and a persistent journal would be the machine's own.
# What units run from there (a clone below /tmp) is shown again, read-only: it must not be emptied.
SCRIPT = """
set -eu
mount --make-rprivate /
mount -t tmpfs none /mnt
number=0
for tree in "$@"; do
  number=$((number + 1))
  mkdir "/mnt/$number"
  mount --bind "$tree" "/mnt/$number"
  mount -o remount,ro,bind "/mnt/$number"
done
for folder in /tmp /var/tmp /run /var/log; do mount -t tmpfs none "$folder"; done
number=0
for tree in "$@"; do
  number=$((number + 1))
  mkdir -p "$tree"
  mount --bind "/mnt/$number" "$tree"
  mount -o remount,ro,bind "$tree"
done
mkdir -p /run/systemd/system /run/dbus
exec /usr/lib/systemd/systemd --system --unit=basic.target --log-target=journal --show-status=no
"""


def hidden_trees() -> list[str]:
    """The trees that units run from and that lie in a folder which is hidden."""
    trees = {tidy.ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    outer = [one for one in trees if not trees.intersection(one.parents)]
    return sorted(str(one) for one in outer if HIDDEN.intersection(one.parents))


class Booted:
    """One booted systemd; `root` is its file system as this process can reach it."""

    def __init__(self) -> None:
        """Boot, and wait until its bus answers."""
        self._outer = subprocess.Popen(
            ["unshare", *NAMESPACES, "bash", "-c", SCRIPT, "boot", *hidden_trees()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "container": "tandem-test"},
        )
        self.pid = 0
        try:
            self._wait(self._found, "no systemd started")
            self.root = Path("/proc", str(self.pid), "root")
            self._wait(self._answers, "its bus does not answer")
        except BaseException:
            self.close()
            raise

    @property
    def bus(self) -> str:
        """The D-Bus address of its system bus."""
        return f"unix:path={self.root}/run/dbus/system_bus_socket"

    @property
    def inside(self) -> list[str]:
        """What to put before a command that shall run inside."""
        return ["nsenter", "-t", str(self.pid), "-p", "-m", "-C"]

    def write(self, unit: str, text: str) -> Path:
        """Write a unit file, or `NAME.service.d/x.conf`, and let systemd read it."""
        path = self.root / "run/systemd/system" / unit
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        self.run("systemctl", "daemon-reload")
        return path

    def run(self, *words: str) -> str:
        """Run a command inside; what it printed."""
        return subprocess.run(
            [*self.inside, *words], capture_output=True, text=True, timeout=20, check=True
        ).stdout

    def close(self) -> None:
        """Kill it; its namespaces and all that is in them go with it."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._outer.kill()
        self._outer.wait(10)

    def _wait(self, there, otherwise: str) -> None:
        ends = time.monotonic() + BOOT_S
        while not there():
            if time.monotonic() > ends or self._outer.poll() is not None:
                raise RuntimeError(otherwise)
            time.sleep(0.05)

    def _found(self) -> bool:
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
        for pid in map(int, children.split()):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                self.pid = pid
        return bool(self.pid)

    def _answers(self) -> bool:
        if not (self.root / "run/dbus/system_bus_socket").exists():
            return False
        asked = [*self.inside, "systemctl", "show", "--property=Version"]
        return subprocess.run(asked, capture_output=True, timeout=20, check=False).returncode == 0

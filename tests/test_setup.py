"""The words of the `Makefile` and `.ci/run`: what a stranger meets before any of our code runs."""

import os
import re
import shutil
import subprocess

import pytest

import machine
import tidy


@pytest.fixture
def make(tmp_path):
    """Run `make` in a folder with our Makefile and pins, on a machine with a PATH of its own."""
    for file in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(tidy.ROOT / file, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("awk", "cat", "sed", "sh"):
        (programs / program).symlink_to(shutil.which(program))
    tool = shutil.which("make")

    def make(*words: str) -> subprocess.CompletedProcess[str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if "MAKE" not in name and name != "PYTHON"
        }
        return subprocess.run(
            [tool, *words],
            cwd=tmp_path,
            env=inherited | {"PATH": str(programs)},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    return make


class TestMake:
    """The set-up, as far as it goes without installing anything."""

    def test_alone_it_lists_the_words(self, make):
        """Every word the Makefile documents is listed, and nothing else is done."""
        documented = re.findall(
            r"^([a-z-]+):.*## ", (tidy.ROOT / "Makefile").read_text(), flags=re.MULTILINE
        )
        printed = make().stdout.splitlines()

        assert [line.split()[:2] for line in printed] == [["make", word] for word in documented]

    def test_without_python_it_says_so_in_one_sentence(self, make, tmp_path):
        """A machine without Python 3.11 is told what to install, and no half `.venv` is left."""
        failed = make("setup")

        assert failed.returncode != 0
        assert failed.stdout + failed.stderr.partition("make: ***")[0] == (
            "no Python >= 3.11 with venv in: python3 python3.14 python3.13 python3.12 python3.11. "
            "Install one (Debian: apt-get install python3 python3-venv), "
            "or name one: make PYTHON=/path/to/python\n"
        )
        assert not (tmp_path / ".venv").exists()

    def test_what_is_set_up_is_left_alone(self, make, tmp_path):
        """A stamp of this very folder, newer than the pins, means there is nothing to do."""
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / ".stamp").write_text(f"{tmp_path}\n")

        assert make("setup").returncode == 0

    def test_a_moved_clone_is_set_up_again(self, make, tmp_path):
        """Scripts that point at the clone's old place are not trusted."""
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / ".stamp").write_text("/elsewhere\n")

        assert "no Python >= 3.11" in make("setup").stderr


def test_ci_promises_only_what_is_known():
    """The names in `.ci/run` are probes, so none of its promises is empty."""
    script = (tidy.ROOT / ".ci" / "run").read_text()
    names = re.findall(r"^export TANDEM_REQUIRE=(\S+)$", script, flags=re.MULTILINE)

    assert [machine.promised(each) <= machine.PROBES.keys() for each in names] == [True]

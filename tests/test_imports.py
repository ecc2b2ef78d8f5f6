"""The direction of imports holds, and `.importlinter` is seen to catch what breaks it."""

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tidy

PURE = "Judgement is pure: no clock, I/O or randomness"
PRODUCT = "The product does not know the embedded engine"
ENGINE = "The embedded engine does not know the product"
MODES = "A failure mode is found by looking, never named"
MODES_APART = "Failure modes know nothing of each other"
SOURCES_APART = "Sources know nothing of each other"
ONE_MODE = "import tandem.failures.degraded_pair_after_decode_restarts"
PLUG_INS = "Only wiring imports plug-ins"
DRILLS = "Only the command line reaches the drills, which alone know what was injected"
RANKS = "Imports go to lower ranks only, never sideways"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over a tree that has `.importlinter` and `src/`."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def copy(tmp_path):
    """A copy of the tree's Python and its contracts, to plant a violation in."""
    shutil.copytree(
        tidy.ROOT / "src",
        tmp_path / "src",
        ignore=lambda folder, names: [
            name
            for name in names
            if name == "__pycache__" or not (name.endswith(".py") or Path(folder, name).is_dir())
        ],
    )
    shutil.copy(tidy.ROOT / ".importlinter", tmp_path)
    return tmp_path


class TestImports:
    """The contracts over the tree as it is."""

    def test_the_tree_keeps_every_contract(self):
        """No import goes up, sideways or out of judgement into the world."""
        found = lint_imports(tidy.ROOT)

        assert found.returncode == 0, found.stdout

    def test_every_pure_module_is_under_the_contract(self):
        """What judges is listed in `.importlinter` as soon as it exists."""
        contracts = configparser.ConfigParser()
        contracts.read(tidy.ROOT / ".importlinter")
        listed = contracts["importlinter:contract:pure"]["source_modules"].split()
        package = tidy.ROOT / "src" / "tandem"
        exist = [
            f"tandem.{name}"
            for name in tidy.PURE_NAMES
            if (package / name).is_dir() or (package / f"{name}.py").exists()
        ]

        assert sorted(listed) == sorted(exist)

    @pytest.mark.parametrize(
        ("contract", "path", "line"),
        [
            (RANKS, "tandem/errors.py", "import tandem.records"),
            (RANKS, "tandem/records/change.py", "import tandem.facts"),
            (RANKS, "tandem/stray.py", "import tandem.errors"),
            (PURE, "tandem/facts.py", "import time"),
            (PURE, "tandem/records/change.py", "def f():\n    import uuid"),
            (
                "The product does not know the embedded engine",
                "tandem/ports.py",
                "import tandem_engine",
            ),
            (
                "The embedded engine does not know the product",
                "tandem_engine/model.py",
                "import tandem",
            ),
            (
                "In the embedded engine imports go to lower ranks only",
                "tandem_engine/handoffs.py",
                "import tandem_engine.worker",
            ),
            (
                "The embedded engine has no circles",
                "tandem_engine/model.py",
                "import tandem_engine.wire\n\nimport tandem_engine.llama",
            ),
        ],
    )
    def test_a_planted_import_is_caught(self, copy, contract, path, line):
        """Each contract breaks by name when one line breaks it."""
        with (copy / "src" / path).open("a") as module:
            module.write(f"\n{line}\n")
        found = lint_imports(copy)

        assert found.returncode == 1
        assert f"{contract} BROKEN" in found.stdout.replace("\n", " ")

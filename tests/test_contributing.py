"""The worked example of CONTRIBUTING.md works: its files, put where it says, pass the checks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tidy

EXAMPLE = re.compile(
    r"\*\*\d\. Write `(\S+\.py)`.*?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE
)


@pytest.fixture
def example(tmp_path):
    """A copy of the tree with the example's files in it, and their paths."""
    for folder in ("src", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(tidy.ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("pyproject.toml", ".importlinter"):
        shutil.copy(tidy.ROOT / file, tmp_path)
    written = dict(EXAMPLE.findall((tidy.ROOT / "CONTRIBUTING.md").read_text()))
    for path, text in written.items():
        (tmp_path / path).write_text(text)
    return tmp_path, list(written)


def said(root: Path, program: str, *words: str) -> str:
    """What a program of our environment prints in a folder; fails when the program fails."""
    ran = subprocess.run(
        [Path(sys.executable).with_name(program), *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.timeout(60)
def test_the_worked_example_passes(example):
    """A mode and its test, as the page has them, are linted, typed, found and pass."""
    root, (mode, test) = example
    every = "tests/unit/failures/test_every_mode.py"

    said(root, "ruff", "check", mode, test)
    said(root, "ruff", "format", "--check", mode, test)
    said(root, "mypy", mode)
    ran = said(root, "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "-v", every, test)

    assert "test_its_page_has_every_heading[retraction-without-return] PASSED" in ran
    assert "test_requests_kept_out_of_a_full_pool_support_it PASSED" in ran

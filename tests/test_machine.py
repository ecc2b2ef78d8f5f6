"""The `needs` marker: a lack skips with its reason, and fails where it was promised away."""

import shutil
import subprocess
import sys

import pytest

import machine
import tidy

ONE_TEST = '''
import pytest

@pytest.mark.needs({name!r})
def test_it():
    """It runs."""
'''


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run one test that needs `name` under the project's own conftest, on a machine without it."""

    def run(name: str, *, require: str) -> str:
        for file in ("conftest.py", "machine.py"):
            shutil.copy(tidy.ROOT / "tests" / file, tmp_path)
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\npythonpath = .\nmarkers = needs(*names): what it needs\n"
        )
        (tmp_path / "test_it.py").write_text(ONE_TEST.format(name=name))
        monkeypatch.setenv("TANDEM_REQUIRE", require)
        monkeypatch.setenv("PATH", str(tmp_path))  # no program is on it
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_it.py"]
        found = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False
        )
        return found.stdout + found.stderr

    return run


class TestNeeds:
    """What the marker does with a machine that lacks `prometheus`."""

    def test_a_lack_skips_and_says_why(self, run):
        """Without a promise the test is skipped with the probe's reason."""
        printed = run("prometheus", require="")

        assert "needs prometheus: no `prometheus` on PATH" in printed
        assert "1 skipped" in printed

    def test_a_promised_lack_fails(self, run):
        """Under `TANDEM_REQUIRE` the same lack is a failure."""
        printed = run("prometheus", require="git,prometheus")

        assert "TANDEM_REQUIRE promises prometheus, but no `prometheus` on PATH" in printed
        assert "1 error" in printed

    def test_a_need_nobody_knows_fails(self, run):
        """A misspelt name in the marker cannot skip its test for ever."""
        assert "needs('promotheus'): known names are" in run("promotheus", require="")

    def test_a_promise_nobody_knows_ends_the_run(self, run):
        """A misspelt name in `TANDEM_REQUIRE` is refused before any test."""
        assert "TANDEM_REQUIRE names ['promotheus']" in run("git", require="promotheus")


class TestProbes:
    """The table itself."""

    @pytest.mark.parametrize("name", sorted(machine.PROBES))
    def test_a_probe_answers_none_or_a_reason(self, name):
        """Every probe gives None or a sentence, and raises nothing."""
        reason = machine.PROBES[name]()

        assert reason is None or len(reason) > 10

    @pytest.mark.needs("ptrace")
    def test_ptrace_that_is_there_is_seen(self):
        """Where the marker lets this run, the probe has dumped a real child."""
        assert machine.lacks("ptrace") is None

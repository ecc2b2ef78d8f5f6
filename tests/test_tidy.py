"""The house style is a test that fails: every rule over the tree, and every rule seen to catch.

Sizes, names and words are in `tidy.py`; what ruff is configured to catch is shown here as well, so
that a rule dropped from `pyproject.toml` is noticed.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import tidy
from tidy import Source

Rule = Callable[[Source], Iterator[str]]

PYTHON_RULES: tuple[Rule, ...] = (
    tidy.module_size,
    tidy.function_size,
    tidy.vague_name,
    tidy.broad_except,
    tidy.unit_last,
    tidy.impure,
)
TEST_RULES: tuple[Rule, ...] = (tidy.test_docstring, tidy.sleeping, tidy.raw_skip)
CODE_FILES = (".toml", ".sh", "Makefile", ".ci/run")
"""How the names of files end that are held to 100 columns here; ruff holds Python to them."""


@cache
def tree() -> tuple[Source, ...]:
    """Read every text file git tracks or would track; without git, every Python file."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tidy.ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    paths = listed.stdout.split("\0") if listed.returncode == 0 else []
    if not paths:
        found = (path for top in ("src", "tests") for path in (tidy.ROOT / top).rglob("*.py"))
        paths = [path.relative_to(tidy.ROOT).as_posix() for path in found]
    sources = []
    for path in paths:
        data = (tidy.ROOT / path).read_bytes() if (tidy.ROOT / path).is_file() else b"\0"
        if b"\0" not in data:
            sources.append(Source(path, data.decode()))
    return tuple(sources)


def violations(rules: tuple[Rule, ...], sources: list[Source]) -> list[str]:
    """Run rules over files: `path:line: what is wrong`, sorted."""
    return sorted(
        f"{source.path}:{wrong}" for source in sources for rule in rules for wrong in rule(source)
    )


class TestTree:
    """Every rule over everything that is committed."""

    def test_python_is_tidy(self, capsys):
        """Sizes, names, units, handlers and purity hold in every Python file."""
        sources = [source for source in tree() if source.path.endswith(".py")]
        long = {s.path: len(s.lines) for s in sources if len(s.lines) > tidy.MODULE_LINES_AIM}
        with capsys.disabled():
            longest = max(long, key=lambda path: long[path], default="none")
            print(  # noqa: T201
                f"\n{len(long)} of {len(sources)} modules are longer than the aim of "
                f"{tidy.MODULE_LINES_AIM} lines; longest is {longest} ({long.get(longest, 0)})"
            )

        assert violations(PYTHON_RULES, sources) == []

    def test_tests_are_tidy(self):
        """Every test states a truth, sleeps never, and skips only through `needs`."""
        sources = [source for source in tree() if source.in_tests()]

        assert violations(TEST_RULES, [s for s in sources if s.path != "tests/conftest.py"]) == []

    def test_no_line_is_too_wide(self):
        """Build, shell and configuration files stay within 100 columns."""
        sources = [source for source in tree() if source.path.endswith(CODE_FILES)]

        assert violations((tidy.columns,), sources) == []

    def test_nothing_private_is_committed(self):
        """No file names a machine's own paths or a package registry's host."""
        assert violations((tidy.private_words,), list(tree())) == []

    def test_the_lock_is_only_pins(self):
        """The lock has exact versions and no option, address or path."""
        lock = (tidy.ROOT / "requirements.lock").read_text().splitlines()
        pins = [line.partition("#")[0].strip() for line in lock]

        assert [pin for pin in pins if pin and not tidy.PIN.fullmatch(pin)] == []


LONG_BODY = "\n".join(["    x = 1"] * 60)

PLANTED: tuple[tuple[Rule, str, str, str], ...] = (
    # rule, path, a violation, its tidy twin
    (tidy.module_size, "src/tandem/x.py", "x = 1\n" * 501, "x = 1\n" * 500),
    (
        tidy.function_size,
        "src/tandem/x.py",
        f"def f():\n{LONG_BODY}\n",
        f'def f():\n    """Words\n\n    do not count.\n    """\n{LONG_BODY[10:]}\n',
    ),
    (tidy.vague_name, "src/tandem/utils.py", "", ""),
    (tidy.vague_name, "src/tandem/helpers/x.py", "", ""),
    (tidy.columns, "Makefile", "x" * 101, "x" * 100),
    (
        tidy.impure,
        "src/tandem/diagnose.py",
        "datetime.now(tz=UTC)",
        "f.fromtimestamp(0, UTC)",
    ),
    (tidy.impure, "src/tandem/report/x.py", "open('x')", "f.open"),
    (
        tidy.broad_except,
        "src/tandem/x.py",
        "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    g()",
        "try:\n    f()\nexcept Exception:  # noqa: BLE001 - a crash becomes a record\n    g()",
    ),
    (
        tidy.broad_except,
        "src/tandem/x.py",
        "try:\n    f()\nexcept (OSError, Exception):\n    g()",
        "try:\n    f()\n# Whatever it was, it becomes a record.\nexcept Exception:\n    g()",
    ),
    (
        tidy.broad_except,
        "src/tandem/x.py",
        "try:\n    f()\nexcept BaseException:\n    raise OSError",
        "try:\n    f()\nexcept BaseException:\n    g()\n    raise",
    ),
    (tidy.broad_except, "src/x.py", "try:\n    f()\nexcept:\n    g()", "f()"),
    (tidy.unit_last, "src/x.py", "def f(timeout: float): ...", "def f(timeout_s: float): ..."),
    (tidy.unit_last, "src/x.py", "deadline: float | None = 1", "deadline_s: float | None = 1"),
    (tidy.unit_last, "src/x.py", "max_age: int = 1", "age_s_max: int = 1"),
    (
        tidy.test_docstring,
        "tests/test_x.py",
        "def test_x():\n    pass",
        'def test_x():\n    """X is so.\n\n    And why.\n    """',
    ),
    (tidy.test_docstring, "tests/test_x.py", 'def test_x():\n    """Check x"""', "def x(): ..."),
    (tidy.sleeping, "tests/test_x.py", "time.sleep(1)", "clock.sleep(1)"),
    (
        tidy.sleeping,
        "tests/test_x.py",
        "while not done():\n    time.sleep(0.5)",
        "while not done():\n    time.sleep(0.01)",
    ),
    (tidy.sleeping, "tests/test_x.py", "await asyncio.sleep(x)", "await asyncio.sleep(0)"),
    (tidy.raw_skip, "tests/test_x.py", "pytest.skip('no')", "pytest.mark.needs('git')"),
    (tidy.raw_skip, "tests/test_x.py", "@pytest.mark.skipif(x)\ndef f(): ...", "skip = 1"),
    (tidy.private_words, "README.md", "cd /" + "work/x", "make the /workload"),
    (tidy.private_words, "README.md", "/" + "root/.venv", "/rooted"),
    (tidy.private_words, "README.md", "ls /" + "home/ada", "/homely"),
    (tidy.private_words, "x.toml", "https://py" + "pi.org/simple", "pip install tandem-pd"),
)


class TestRules:
    """A rule that catches nothing guards nothing."""

    @pytest.mark.parametrize(("rule", "path", "bad", "good"), PLANTED)
    def test_a_planted_violation_is_caught(self, rule, path, bad, good):
        """Each rule names a planted violation once and lets its tidy twin pass."""
        twin = path.replace("utils", "scan").replace("helpers", "scan")

        assert len(violations((rule,), [Source(path, bad)])) == 1
        assert violations((rule,), [Source(twin, good)]) == []

    def test_impurity_is_allowed_where_the_world_is(self):
        """Only the modules that judge are held to purity."""
        assert violations((tidy.impure,), [Source("src/tandem/store/x.py", "open('x')")]) == []

    @pytest.mark.parametrize(
        ("code", "bad"),
        [
            ("D100", "x = 1\n"),
            ("D101", '"""M."""\n\n\nclass C:\n    x = 1\n'),
            ("D102", '"""M."""\n\n\nclass C:\n    """C."""\n\n    def f(self) -> None: ...\n'),
            ("D103", '"""M."""\n\n\ndef f() -> None: ...\n'),
            ("S101", '"""M."""\n\nassert __name__\n'),
            ("S602", '"""M."""\n\nimport subprocess\n\nsubprocess.run("ls", shell=True)\n'),
            ("BLE001", '"""M."""\n\ntry:\n    x = 1\nexcept Exception:\n    x = 2\n'),
            ("FIX002", '"""M."""\n\n# TO' + "DO: later\n"),
            ("FIX001", '"""M."""\n\n# FIX' + "ME: later\n"),
            ("DTZ005", '"""M."""\n\nimport datetime\n\nx = datetime.datetime.now()\n'),
            ("E501", '"""M."""\n\nx = "' + "x" * 100 + '"\n'),
        ],
    )
    def test_ruff_is_configured_to_catch(self, code, bad):
        """What the linter is relied on for, it reports with the project's configuration."""
        ruff = Path(sys.executable).with_name("ruff")
        found = subprocess.run(
            [ruff, "check", "--output-format=concise", "--stdin-filename=src/tandem/x.py", "-"],
            cwd=tidy.ROOT,
            input=bad,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

        assert f" {code} " in found.stdout

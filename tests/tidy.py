"""The house rules that no linter knows, each as one small function over one file.

For: `test_tidy.py`, which runs every rule over the tree and shows each one catching a violation.
Not for: what ruff, mypy or import-linter already check (`pyproject.toml`, `.importlinter`).

A rule takes a `Source` and yields one `line: what is wrong` sentence per violation.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MODULE_LINES_AIM = 250
MODULE_LINES_STOP = 500
FUNCTION_LINES_STOP = 60
COLUMNS_STOP = 100
POLL_S_MAX = 0.05
VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"})

PURE_NAMES = (
    *("errors", "records", "series", "facts", "signs", "lost", "failures"),
    *("detect", "diagnose", "plan", "report"),
)
"""The modules of `tandem` that judge, or hold what is judged; `.importlinter` lists them too."""
PURE = re.compile(rf"src/tandem/({'|'.join(PURE_NAMES)})(\.py|/.*\.py)")

IMPURE_CALLS = frozenset({"open", "input", "print", "exec", "eval", "__import__", "breakpoint"})
CLOCK_CALLS = frozenset({"now", "today", "utcnow"})

UNIT = re.compile(r"_(s|ms|us|ns|hours|days|bytes|kb|mb|gb|tokens|ratio)(_(max|min))?$")
"""How a name that holds a quantity ends."""
QUANTITY = re.compile(
    r"(^|_)(timeout|deadline|delay|interval|duration|period|grace|elapsed|latency|age|ttl)(_|$)"
)

PIN = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*")
"""One line of the lock."""

# In pieces, so that this file may be held to its own rule.
MACHINE_PATHS = re.compile("/" + r"(work|root|home/[a-z]+|Users/[A-Za-z]+)(?![\w-])")
REGISTRY_HOSTS = re.compile(
    "|".join((r"py" + r"pi\.org", r"python" + r"hosted", r"deb\.deb" + "ian"))
)


@dataclass(frozen=True)
class Source:
    """One tracked text file: its path below the root, with `/`, and its text."""

    path: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines, without their ends."""
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of a Python file."""
        return ast.parse(self.text)

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def in_package(self) -> bool:
        """Whether the file ships: Python below `src/`."""
        return self.path.startswith("src/") and self.path.endswith(".py")

    def in_tests(self) -> bool:
        """Whether the file is a test or serves one."""
        return self.path.startswith("tests/") and self.path.endswith(".py")


def module_size(source: Source) -> Iterator[str]:
    """A module stops at 500 lines."""
    if len(source.lines) > MODULE_LINES_STOP:
        yield f"1: {len(source.lines)} lines; a module stops at {MODULE_LINES_STOP}: split it"


def function_size(source: Source) -> Iterator[str]:
    """A function stops at 60 lines, its docstring not counted."""
    for function in source.functions:
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if ast.get_docstring(function) is not None:
            said = function.body[0]
            lines -= (said.end_lineno or said.lineno) - said.lineno + 1
        if lines > FUNCTION_LINES_STOP:
            yield (
                f"{function.lineno}: {function.name} has {lines} lines; "
                f"a function stops at {FUNCTION_LINES_STOP}"
            )


def vague_name(source: Source) -> Iterator[str]:
    """A file is named for what is in it."""
    vague = VAGUE_NAMES.intersection(re.split(r"[/._]", source.path))
    if vague:
        yield f"1: `{min(vague)}` says nothing: name the file for what is in it"


def columns(source: Source) -> Iterator[str]:
    """Nothing people edit as code is wider than 100 columns (ruff sees only the Python)."""
    for number, line in enumerate(source.lines, start=1):
        if len(line) > COLUMNS_STOP:
            yield f"{number}: {len(line)} columns; a line stops at {COLUMNS_STOP}"


def impure(source: Source) -> Iterator[str]:
    """Judgement calls no clock and no I/O; that it imports none, import-linter sees."""
    if not PURE.fullmatch(source.path):
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in IMPURE_CALLS:
            yield f"{node.lineno}: a pure module calls `{called.id}`"
        if isinstance(called, ast.Attribute) and called.attr in CLOCK_CALLS:
            yield f"{node.lineno}: a pure module asks the clock: `.{called.attr}()`; time is given"


def broad_except(source: Source) -> Iterator[str]:
    """A handler for every exception says why, in a comment on its line or the one above."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {name.id for name in caught if isinstance(name, ast.Name)}
        if node.type is not None and not names & {"Exception", "BaseException"}:
            continue
        if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
            continue  # it puts something away and lets the exception go on
        around = source.lines[max(node.lineno - 2, 0) : node.body[0].lineno]
        said = re.sub(r"noqa: [A-Z0-9, ]+", "", " ".join(re.findall(r"#(.*)", "\n".join(around))))
        if len(re.findall(r"\w+", said)) < 3:
            yield f"{node.lineno}: catches every exception without a comment that says why"


def unit_last(source: Source) -> Iterator[str]:
    """A number named like a time ends in its unit."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        else:
            continue
        if annotation is None or not re.search(r"\b(float|int)\b", ast.unparse(annotation)):
            continue
        if QUANTITY.search(name) and not UNIT.search(name):
            yield f"{node.lineno}: `{name}` holds a quantity: end it in its unit (`{name}_s`)"


def test_docstring(source: Source) -> Iterator[str]:
    """Every test states one truth, as one sentence on the first line of its docstring."""
    for function in source.functions:
        if not function.name.startswith("test_"):
            continue
        said = (ast.get_docstring(function) or "").partition("\n\n")[0]
        if not said or "\n" in said or not said.endswith("."):
            yield f"{function.lineno}: {function.name} states no truth in one docstring sentence"


def sleeping(source: Source) -> Iterator[str]:
    """A test waits for a thing, never for a time: only a loop that polls may sleep, and briefly."""
    calls = {node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and node.args}
    polls = {
        call
        for loop in ast.walk(source.tree)
        if isinstance(loop, ast.While)
        for call in ast.walk(loop)
    }
    for call in sorted(calls, key=lambda call: call.lineno):
        if ast.unparse(call.func) not in {"time.sleep", "asyncio.sleep", "sleep"}:
            continue
        length = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
        if length == 0 or (call in polls and isinstance(length, float) and length <= POLL_S_MAX):
            continue
        yield f"{call.lineno}: sleeps; poll for what should happen, or use the virtual clock"


def raw_skip(source: Source) -> Iterator[str]:
    """A test skips through `needs` alone, so that `TANDEM_REQUIRE` can forbid it."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr in {"skip", "skipif", "importorskip", "skipUnless", "skipIf", "skipTest"}:
            yield f"{node.lineno}: `.{node.attr}` hides a lack: use @pytest.mark.needs(...)"


def private_words(source: Source) -> Iterator[str]:
    """No file names a machine's own paths or the host of a package registry."""
    for number, line in enumerate(source.lines, start=1):
        if found := MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line):
            yield f"{number}: `{found.group()}` is of one machine or registry"

"""The documentation is a test: its commands run, and nothing the product has is left undocumented.

Blocks fenced as `sh` run, in the order of their page, in a copy of `examples/laptop` with free
ports.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import typer

import tidy
from tandem.cli.app import app
from tandem.config import load
from tandem.exports import prometheus_rules
from tandem.failures import discover
from tandem.records import Settings
from tandem.service.counts import Counts
from tandem.service.exposition import page as metrics_page

DOCS = tidy.ROOT / "docs"
PAGES = [tidy.ROOT / "README.md", tidy.ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = (DOCS / "operating" / "commands.md").read_text()
CONFIGURATION = (DOCS / "operating" / "configuration.md").read_text()
EXAMPLE = tidy.ROOT / "examples" / "laptop" / "tandem.toml"

RUN_TIMEOUT_S = 120.0


def blocks(page: Path) -> list[str]:
    """Give the blocks of a page that are fenced as `sh`."""
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def words() -> list[str]:
    """Give every word, sub-words with theirs: `incidents show`."""
    found = []
    for name, command in typer.main.get_command(app).commands.items():
        nested = list(getattr(command, "commands", {}))
        found += [f"{name} {inner}" for inner in nested] if nested else [name]
    return found


def sections() -> list[tuple[str, str, object]]:
    """Give every key of the configuration's sections with its default."""
    return [
        (section.name, field.name, field.default)
        for section in msgspec.structs.fields(Settings)
        if section.default is not msgspec.NODEFAULT
        for field in msgspec.structs.fields(type(section.default))
    ]


@pytest.fixture
def workspace(tmp_path):
    """Give a folder that looks like the repository; its deployment is taken down after."""
    laptop = tmp_path / "examples" / "laptop"
    laptop.mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    command = tmp_path / ".venv" / "bin" / "tandem"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tandem "$@"\n')
    command.chmod(0o755)
    # As much proof as a test has time for; everything else is what a reader gets.
    text = EXAMPLE.read_text().replace("sessions = 8", "sessions = 2")
    ports = sorted(set(re.findall(r"\b(?:8998|[23]\d{4})\b", text)))
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in ports]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        for port, one in zip(ports, sockets, strict=True):
            text = re.sub(rf"\b{port}\b", str(one.getsockname()[1]), text)
    (laptop / "tandem.toml").write_text(text)
    yield tmp_path
    run("cd examples/laptop && tandem down", tmp_path)


def run(block: str, workspace: Path) -> subprocess.CompletedProcess[str]:
    """Run a block as a reader would: from the top of the repository, up to a failure."""
    environment = {
        **os.environ,
        "PATH": f"{workspace / '.venv' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tidy.ROOT / "src"),
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


class TestCommandsRun:
    """What the README tells a stranger to type works."""

    @pytest.mark.needs("router", "model", "git")
    @pytest.mark.timeout(180)
    def test_the_readme_runs(self, workspace):
        """Every `sh` block of the README succeeds, in order, on the deployment it brings up."""
        first, *rest = blocks(tidy.ROOT / "README.md")
        there = [first, *(f"cd examples/laptop\n{block}" for block in rest)]
        ran = [run(block, workspace) for block in there]

        assert [(one.returncode, one.stderr) for one in ran if one.returncode] == []
        assert "unwatched" in ran[0].stdout
        assert "the proof holds" in ran[0].stdout
        assert run("cd examples/laptop\ntandem status", workspace).stdout.startswith("down;")

    def test_the_watching_page_runs(self, workspace):
        """Every `sh` block of the page about watching succeeds."""
        ran = [run(block, workspace) for block in blocks(DOCS / "operating" / "watching.md")]

        assert [(one.returncode, one.stderr) for one in ran if one.returncode] == []
        assert ran[0].stdout == "WatchdogSec=30\n"

    @pytest.mark.parametrize("name", re.findall(r"- alert: (\w+)", prometheus_rules()))
    def test_an_alert_is_documented(self, name):
        """Every alert has its row: what it sees, and what it cannot."""
        page = (DOCS / "operating" / "watching.md").read_text()

        assert re.search(rf"^\| `{name}` \|", page, re.MULTILINE)

    def test_a_metric_is_documented(self):
        """Every metric of the watch has its row."""
        page = (DOCS / "operating" / "watching.md").read_text()
        text = metrics_page(
            Counts("x", 0.0).families(store_bytes=0, incidents={}), openmetrics=False
        ).decode()
        names = re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)

        assert [name for name in names if f"`{name}`" not in page] == []

    def test_the_two_commands_exist(self):
        """`make demo` and `make test` are targets of the Makefile."""
        makefile = (tidy.ROOT / "Makefile").read_text()
        named = set(re.findall(r"^make (\w+)$", PAGES[0].read_text(), re.MULTILINE))

        assert named == {"demo", "test"}
        assert [name for name in sorted(named) if f"\n{name}:" not in makefile] == []

    def test_the_transcript_is_of_a_demo_that_passed(self):
        """What the README shows ends as the demo ends."""
        last = re.search(r"^demo passed: .*$", PAGES[0].read_text(), re.MULTILINE)

        assert last is not None
        assert re.fullmatch(
            r"demo passed: [a-z ]+ found in [\d.]+ s; cause [a-z-]+ \([a-z ]+\); "
            r"hunch [a-z-]+ ruled out; pair restarted in [\d.]+ s; 8/8 sequential, "
            r"30/30 sessions clean; INCIDENTS\.md @ [0-9a-f]{7,}",
            last.group(),
        )

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_commands_in_prose_exist(self, page):
        """Every `tandem WORD` that a page mentions is a word, with options it has."""
        known = typer.main.get_command(app).commands
        said = re.findall(r"(?:`|^ {4}|^)tandem ([a-z][^`\n]*)", page.read_text(), re.MULTILINE)
        unknown = []
        for line in said:
            name, *arguments = line.split()
            options = {one for one in arguments if one.startswith("--")} - {"--help"}
            command = known.get(name)
            nested = getattr(command, "commands", {})
            command = nested.get(arguments[0], command) if nested and arguments else command
            have = {one for param in getattr(command, "params", ()) for one in param.opts}
            if command is None or options - have:
                unknown.append(line)

        assert unknown == []


class TestNothingIsUndocumented:
    """What the product has, the documentation names."""

    @pytest.mark.parametrize("word", words())
    def test_a_word_is_documented(self, word):
        """Every word has its row in the commands page, and its first part a place in the README."""
        assert re.search(rf"^\| `tandem {word}[ `]", COMMANDS, re.MULTILINE)
        assert f"`{word.split()[0]}`" in PAGES[0].read_text()

    @pytest.mark.parametrize(("section", "key", "default"), sections())
    def test_a_key_is_documented_with_its_default(self, section, key, default):
        """Every configuration key has its row, with the default it truly has."""
        part = CONFIGURATION.split(f"\n## [{section}]\n")[1].split("\n## ")[0]
        row = re.search(rf"^\| `{key}` \| `(.*?)` \|", part, re.MULTILINE)
        shown = list(default) if isinstance(default, tuple) else default

        assert row is not None
        assert tomllib.loads(f"x = {row.group(1)}")["x"] == shown

    def test_no_key_is_invented(self):
        """The page documents no key that the configuration refuses."""
        invented = []
        for section in re.split(r"^## ", CONFIGURATION, flags=re.MULTILINE)[1:]:
            name = section.split("]")[0].strip("[")
            for key in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE):
                if name in {"deployment", "member"}:
                    continue
                if (name, key) not in {(where, what) for where, what, _ in sections()}:
                    invented.append(f"{name}.{key}")

        assert invented == []

    @pytest.mark.parametrize("mode", discover(), ids=lambda mode: mode.slug)
    def test_a_failure_is_documented(self, mode):
        """Every failure mode has its row in the failures page."""
        page = (DOCS / "operating" / "failures.md").read_text()

        assert re.search(rf"^\| `{mode.slug}` \|", page, re.MULTILINE)

    def test_every_module_has_its_place(self):
        """The walk through the code names every module and package of both."""
        page = (DOCS / "whats-here.md").read_text()
        named = {path.stem for top in ("tandem", "tandem_engine") for path in _modules(top)}

        assert sorted(name for name in named if f"`{name}`" not in page) == []

    def test_every_dependency_has_its_reason(self):
        """The design page says what each dependency is for."""
        project = tomllib.loads((tidy.ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
        names = [re.split(r"[<>=!~ \[]", one)[0] for one in wanted]
        table = (DOCS / "design.md").read_text().split("## Dependencies")[1].split("\n## ")[0]

        assert [name for name in names if not re.search(rf"\b{name}\b", table)] == []

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_links_lead_somewhere(self, page):
        """Every relative link of a page leads to a file."""
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())

        assert [link for link in links if not (page.parent / link).exists()] == []


class TestExample:
    """The example deployment is a good one."""

    def test_it_is_accepted(self):
        """`examples/laptop` has no fault."""
        settings = load(EXAMPLE)

        assert [member.name for member in settings.deployment.members] == [
            "prefill-0",
            "decode-0",
            "router",
        ]
        assert settings.policy.mode == "advise"

    @pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
    def test_a_picture_loads_nothing_from_elsewhere(self, picture):
        """A page that shows it calls no other host, and is not kept waiting."""
        drawn = picture.read_text()

        assert set(re.findall(r"https?://[^\"')<\s]+", drawn)) == {"http://www.w3.org/2000/svg"}
        assert len(drawn) < 60_000

    def test_the_picture_is_drawn_with_words(self):
        """The picture of the loop names every stage, for those who cannot see it."""
        picture = (DOCS / "loop.svg").read_text()
        stages = ["collect", "store", "detect", "diagnose", "plan", "repair", "verify", "report"]

        assert [stage for stage in stages if f">{stage}<" not in picture] == []


def _modules(top: str) -> list[Path]:
    inside = (tidy.ROOT / "src" / top).iterdir()
    return [path for path in inside if path.name[0] not in "_." and path.name != "py.typed"]

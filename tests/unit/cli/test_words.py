"""Every word teaches itself, takes the same options, and is quick to ask."""

import shlex
import subprocess
import sys

import pytest
import typer

from tandem import __version__
from tandem.__main__ import main
from tandem.cli.app import app
from tandem.cli.help import SECTIONS

TOP = typer.main.get_command(app)

WORDS = [
    "up",
    "down",
    "status",
    "restart",
    "watch",
    "export",
    "investigate",
    "collect",
    "detect",
    "diagnose",
    "plan",
    "repair",
    "verify",
    "report",
    "incidents",
    "failures",
    "drill",
    "demo",
]
CONFIGLESS = {"export", "failures", "drill", "demo"}
"""Words that speak of no configured deployment."""


def leaves():
    """Give every word and sub-word with its path."""
    for name, command in TOP.commands.items():
        yield (name,), command
        for inner, nested in getattr(command, "commands", {}).items():
            yield (name, inner), nested


def examples(command):
    """Give the example commands of a word's help, without redirections."""
    rows = [line.strip() for line in (command.epilog or "").splitlines()]
    found = [row.split("  ")[0] for row in rows if row.startswith("tandem ")]
    return [row.split(" >")[0] for row in found]


class TestHelp:
    """Help is the manual."""

    def test_every_word_is_there(self):
        """The words of the command line are these, each in a section."""
        assert set(TOP.commands) == set(WORDS)
        assert {command.rich_help_panel for command in TOP.commands.values()} == set(SECTIONS)

    def test_the_words_are_listed_whole(self, capsys):
        """The list of words cuts no line off."""
        with pytest.raises(SystemExit):
            app(["--help"], prog_name="tandem")
        listed = capsys.readouterr().out

        assert [word for word in WORDS if f"\n  {word} " not in listed] == []
        assert "..." not in listed.replace("[ARGS]...", "")

    @pytest.mark.parametrize("word", WORDS)
    def test_a_word_teaches_by_example(self, word):
        """Every word's help ends in examples that begin with the word itself."""
        shown = examples(TOP.commands[word])

        assert shown
        assert all(shlex.split(one)[:2] == ["tandem", word] for one in shown)

    @pytest.mark.parametrize(
        "example", [one for _, command in leaves() for one in examples(command)]
    )
    def test_an_example_parses(self, example):
        """Every example of the help is a command that parses."""
        words = shlex.split(example)[1:]
        command = TOP
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]

        assert command is not TOP
        assert command.make_context("tandem", words) is not None

    @pytest.mark.parametrize("word", sorted(set(WORDS) - {"demo"}))
    def test_a_word_has_json(self, word):
        """Every word but the demo gives its record as JSON."""
        options = {name for param in TOP.commands[word].params for name in param.opts}

        assert "--json" in options

    @pytest.mark.parametrize("word", sorted(set(WORDS) - CONFIGLESS))
    def test_a_word_takes_a_configuration(self, word):
        """Every word about a deployment can be told which one."""
        options = {name for param in TOP.commands[word].params for name in param.opts}

        assert "--config" in options


class TestStart:
    """Asking for help is immediate."""

    def test_help_imports_nothing_heavy(self):
        """`tandem --help` loads no HTTP, no configuration, no store and no stage."""
        code = (
            "import sys; from tandem.__main__ import main; main(['--help']); "
            "print(*sorted(sys.modules), file=sys.stderr)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
        )
        loaded = set(ran.stderr.split())
        heavy = {"aiohttp", "pydantic", "sqlite3", "jinja2", "psutil", "starlette", "numpy"}

        assert heavy & loaded == set()
        assert not {"tandem.loop", "tandem.store", "tandem.wiring", "tandem.drills"} & loaded

    def test_no_word_shows_the_words(self, capsys):
        """`tandem` alone shows the help and succeeds."""
        assert main([]) == 0
        assert "tandem investigate" in capsys.readouterr().out

    def test_the_version_is_told(self, capsys):
        """`tandem --version` names the program and its version."""
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"tandem {__version__}\n"

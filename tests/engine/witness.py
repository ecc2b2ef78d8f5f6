"""Which faults a test really switched on and off, and which workers lived under them.

A test says `@pytest.mark.shows(FAULT)` when it shows a fault of the catalogue from outside, and
`@pytest.mark.heals(FAULT, by=...)` when it shows what heals it: `off` (the switch), `restart` (of
the worker that has it, with the switch still on), or `cure` (what else the catalogue states). Both
may name a parameter of the test: `forward={how}`.

For: `conftest.py`, which holds every marked test to its word, and `test_faults.py`, which holds the
catalogue to the tests. Not for: faults themselves.
"""

import importlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tandem_engine.faults import FAMILIES, Switchboard
from tandem_engine.worker import Worker

CATALOGUE = {key: text for family in FAMILIES for key, text in family.catalogue.items()}
KINDS = ("shows", "heals")


def keys_of(on: Mapping[str, object]) -> set[str]:
    """The catalogue's names of what a switchboard says is on."""
    named = {name: f"{name}={value}" for name, value in on.items()}
    return {key if key in CATALOGUE else name for name, key in named.items()}


def marked(
    marks: list[pytest.Mark], params: Mapping[str, object]
) -> Iterator[tuple[str, str, str]]:
    """What marks say under these parameters: (`shows` or `heals`, by what, fault)."""
    for mark in marks:
        if mark.name in KINDS:
            for fault in mark.args:
                by = str(mark.kwargs.get("by", ""))
                yield mark.name, by.format(**params), str(fault).format(**params)


class Witness:
    """What happens to switchboards and workers while one test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch from now on."""
        self.was_on: set[str] = set()
        self.was_off: set[str] = set()
        self._on: dict[int, set[str]] = {}
        self._ever: dict[int, set[str]] = {}
        self._lives: list[tuple[int, Any]] = []
        take, born = Switchboard._take, Worker.__init__

        def taken(board: Switchboard, switches: Any) -> None:
            take(board, switches)
            self._turned(id(board), keys_of(board.on()))

        def made(worker: Worker, *given: Any) -> None:
            born(worker, *given)
            # The board itself, so that nothing else gets its identity.
            self._lives.append((worker.settings.port, worker.switchboard))

        monkeypatch.setattr(Switchboard, "_take", taken)
        monkeypatch.setattr(Worker, "__init__", made)

    def _turned(self, board: int, on: set[str]) -> None:
        before = self._on.get(board, set())
        self.was_on |= on
        self.was_off |= before - on
        self._on[board] = on
        self._ever[board] = self._ever.get(board, set()) | on

    def spawned(self, arguments: tuple[str, ...]) -> None:
        """A worker was started as a process."""
        given = dict(itertools.pairwise(arguments))
        path = given.get("--enable-faults")
        if path is not None:
            on = keys_of(json.loads(Path(path).read_text()))
            self.was_on |= on
            self._lives.append((int(given["--port"]), on))

    def lived_again(self, fault: str) -> bool:
        """Whether a worker was started again, at the same port, with the fault on in both lives."""
        ports = [
            port
            for port, board in self._lives
            if fault in (board if isinstance(board, set) else self._ever.get(id(board), set()))
        ]
        return len(ports) > len(set(ports))

    def contradicts(self, kind: str, by: str, fault: str) -> str:
        """Why a test does not do what it says; empty when it does."""
        if fault not in CATALOGUE:
            return f"{fault} is no fault of the catalogue"
        if fault not in self.was_on:
            return f"{fault} was never switched on"
        if kind == "shows" or by == "cure":
            return ""
        holds = {"off": fault in self.was_off, "restart": self.lived_again(fault)}
        return "" if holds.get(by, False) else f"{fault} was not healed by {by or 'anything'}"


def claims() -> set[tuple[str, str, str]]:
    """What all tests of the engine say they show and heal."""
    found: set[tuple[str, str, str]] = set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"engine.{path.stem}")
        for name, thing in vars(module).items():
            if name.startswith("test_"):
                found |= _said(getattr(thing, "pytestmark", []))
            elif isinstance(thing, type) and name.startswith("Test"):
                above = getattr(thing, "pytestmark", [])
                for test in vars(thing).values():
                    found |= _said([*above, *getattr(test, "pytestmark", [])])
    return found


def _said(marks: list[pytest.Mark]) -> set[tuple[str, str, str]]:
    choices: list[list[dict[str, object]]] = []
    for mark in marks:
        if mark.name == "parametrize":
            names, rows = mark.args
            names = names.split(", ") if isinstance(names, str) else list(names)
            choices.append([dict(zip(names, _row(row, len(names)), strict=True)) for row in rows])
    found: set[tuple[str, str, str]] = set()
    for choice in itertools.product(*choices):
        params = {name: value for one in choice for name, value in one.items()}
        found |= set(marked(marks, params))
    return found


def _row(row: Any, width: int) -> tuple[Any, ...]:
    row = row.values if isinstance(row, ParameterSet) else row
    return (row,) if width == 1 and not isinstance(row, tuple) else tuple(row)

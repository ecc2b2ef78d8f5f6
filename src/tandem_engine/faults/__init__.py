"""The switchboard: faults of the field that can be switched on, by mechanism.

It exists only with `--enable-faults FILE`: the file is read at start, `GET` and `PUT /faults` show
and change it, and what is changed is written to the file, so that a fault survives a restart as
code would. Shown and written is what is on; `PUT` changes what it names. A flip leaves no trace in
logs, metrics, `/server_info` or the environment.

For: composing the families, one per file, each with its switches, its catalogue and the questions
the engine asks it (`switchboard.peers.memory()`).
Not for: the mechanisms themselves; these act where the real fault does.
"""

import contextlib
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from tandem_engine.config import ConfigError
from tandem_engine.faults.compute import ComputeFaults
from tandem_engine.faults.corruption import CorruptionFaults
from tandem_engine.faults.family import Family, Switches
from tandem_engine.faults.handoff import HandoffFaults
from tandem_engine.faults.peers import PeerFaults
from tandem_engine.faults.process import ProcessFaults
from tandem_engine.faults.reporting import ReportingFaults
from tandem_engine.faults.resources import ResourceFaults

FAMILIES: tuple[type[Family[Any]], ...] = (
    PeerFaults,
    HandoffFaults,
    CorruptionFaults,
    ComputeFaults,
    ProcessFaults,
    ReportingFaults,
    ResourceFaults,
)
LINE = 96


class Switchboard:
    """The switches of one worker. Read from any thread, changed from one."""

    def __init__(self, path: str | None) -> None:
        """Read the file when there is one; raises `ConfigError` when it says something unknown."""
        self._path = Path(path) if path is not None else None
        self.peers = PeerFaults()
        self.handoff = HandoffFaults()
        self.corruption = CorruptionFaults()
        self.compute = ComputeFaults()
        self.process = ProcessFaults()
        self.reporting = ReportingFaults()
        self.resources = ResourceFaults()
        if self._path is None:
            return
        try:
            self._take(self._with(msgspec.json.decode(self._path.read_bytes())))
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as problem:
            raise ConfigError(
                f"--enable-faults {path} cannot be used: {problem}; "
                f"`python -m tandem_engine faults` lists what it may say"
            ) from problem

    @property
    def enabled(self) -> bool:
        """Whether the admin route exists."""
        return self._path is not None

    def on(self) -> dict[str, object]:
        """Every switch that is not at its default, by name."""
        shown: dict[str, object] = {}
        for family in self._families():
            shown |= family.shown(family.switches)
        return shown

    def change(self, body: bytes) -> dict[str, object]:
        """Change what a JSON object names, keep the rest, and write the file; what is on then.

        Raises `msgspec.MsgspecError` for unknown names or values, `OSError` when the file cannot be
        written; nothing is changed then.
        """
        return self.switch(**msgspec.json.decode(body, type=dict[str, Any]))

    def switch(self, /, **given: object) -> dict[str, object]:
        """Change the named switches; see `change`."""
        switches = self._with(given)
        if self._path is not None:
            shown: dict[str, object] = {}
            for one in switches:
                shown |= Family.shown(one)
            scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
            try:
                scratch.write_bytes(msgspec.json.encode(shown) + b"\n")
                scratch.replace(self._path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    scratch.unlink()
        self._take(switches)
        return self.on()

    def _families(self) -> tuple[Family[Any], ...]:
        """In the order of `FAMILIES`."""
        return (
            self.peers, self.handoff, self.corruption, self.compute, self.process, self.reporting,
            self.resources,
        )  # fmt: skip

    def _with(self, given: object) -> list[Switches]:
        """The switches of every family with what is given; raises `msgspec.ValidationError`."""
        if not isinstance(given, dict):
            raise msgspec.ValidationError("faults are an object: the name of a switch, its value")
        rest = dict(given)
        switches: list[Switches] = []
        for family in self._families():
            values = msgspec.structs.asdict(family.switches)
            values |= {name: rest.pop(name) for name in values if name in rest}
            switches.append(msgspec.convert(values, type=family.kind))
        if rest:
            raise msgspec.ValidationError(
                f"there is no switch {next(iter(rest))!r}; `python -m tandem_engine faults` lists "
                f"them"
            )
        return switches

    def _take(self, switches: list[Switches]) -> None:
        for family, one in zip(self._families(), switches, strict=True):
            if family.switches != one:
                family.turn(one)


def listing() -> str:
    """What `python -m tandem_engine faults` prints: every fault, its looks and its cure."""
    lines: list[str] = []
    for family in FAMILIES:
        if not family.catalogue:
            continue
        lines += [f"{family.name} (off: {_harmless(family)})", ""]
        for key, text in family.catalogue.items():
            lines.append(f"  {key}")
            for paragraph in (text.looks, f"Heals: {text.heals}"):
                lines += textwrap.wrap(
                    paragraph, LINE, initial_indent="    ", subsequent_indent="    "
                )
        lines.append("")
    lines.append("Switching one off heals as well, once what it holds has ended.")
    return "\n".join(lines)


def catalogue_gaps() -> set[str]:
    """Faults that exist and are not described, or the reverse; empty, says a test."""
    gaps: set[str] = set()
    for family in FAMILIES:
        gaps |= set(_keys(family)) ^ set(family.catalogue)
    return gaps


def _harmless(family: type[Family[Any]]) -> str:
    defaults = msgspec.structs.asdict(family.kind())
    return ", ".join(f"{name}={value}" for name, value in defaults.items())


def _keys(family: type[Family[Any]]) -> Iterator[str]:
    for field in msgspec.structs.fields(family.kind):
        if get_origin(field.type) is Literal:
            yield from (f"{field.name}={v}" for v in get_args(field.type) if v != field.default)
        else:
            yield field.name

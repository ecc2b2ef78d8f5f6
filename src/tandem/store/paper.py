"""`records.jsonl` of an incident's folder: one record a line, appended, synced, never rewritten.

The first line names the format, so that a reader refuses what it does not know before it decodes
any of it. A line cut short by a crash is dropped when it is the last; anywhere else the file is
damaged, and said to be.

For: lines and their folding into an `Incident`. Not for: which folder, and when (`incidents.py`).
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path

import msgspec

from tandem import records
from tandem.errors import RefusedError, WorldError
from tandem.records import (
    Diagnosis,
    Finding,
    Incident,
    Outcome,
    Plan,
    Record,
    ReportRef,
    Seal,
    Verification,
)
from tandem.records.incident import FORMAT

FILE_NAME = "records.jsonl"
PARTS: dict[type[Record], str] = {
    Finding: "finding",
    Seal: "seal",
    Diagnosis: "diagnosis",
    Plan: "plan",
    Verification: "verification",
    ReportRef: "report",
}
"""What an incident is made of beside its head, each on lines of its own; the last one counts."""


class Folder(Record, frozen=True, kw_only=True):
    """The first line: which incident this is and how to read the rest."""

    format: int
    id: str


_kinds = [
    kind
    for name in records.__all__
    if isinstance(kind := getattr(records, name), type) and issubclass(kind, Record)
]
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(reduce(or_, _kinds))


def decoded(line: bytes | str) -> Record:
    """One record from its JSON; raises `msgspec.DecodeError` (or a subclass) when it is none."""
    return _decoder.decode(line)


def append(folder: Path, lines: Sequence[Record]) -> None:
    """Append records durably, the first line of a new file included; all of them or none.

    Raises `WorldError` when the disk refuses.
    """
    path = folder / FILE_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path) as file:
            size = _whole(file)
            wanted: list[Record] = [*lines]
            if size == 0:
                wanted.insert(0, Folder(format=FORMAT, id=folder.name))
            os.ftruncate(file, size)
            try:
                _write(file, b"".join(msgspec.json.encode(line) + b"\n" for line in wanted), size)
                os.fsync(file)
            except OSError:
                os.ftruncate(file, size)
                if size == 0:
                    path.unlink()
                raise
        if size == 0:
            sync_folder(folder)
            sync_folder(folder.parent)
    except OSError as error:
        raise WorldError(
            f"{path} could not be written: {error.strerror or error}.",
            next_step=f"Free some space under {folder.parent} and run the command again.",
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # held for one write by each: bounded by that
        yield file
    finally:
        os.close(file)


def _write(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _whole(file: int) -> int:
    """Bytes up to the end of the last whole line; what a crash left behind it does not count."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read(folder: Path) -> Incident:
    """The incident as its lines tell it; raises `RefusedError` for what this Tandem cannot read."""
    path = folder / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise WorldError(
            f"{folder} is no incident's folder: its {FILE_NAME} cannot be read ({error.strerror}).",
            next_step="List the incidents with `tandem incidents`.",
        ) from None
    # After the last newline is nothing, or what a crash left of a line.
    whole = lines[:-1]
    _check_format(path, whole[0] if whole else b"")
    return _folded(path, [_record(path, number, line) for number, line in enumerate(whole[1:], 2)])


def _check_format(path: Path, line: bytes) -> None:
    try:
        first = msgspec.json.decode(line, type=Folder)
    except msgspec.DecodeError:
        raise RefusedError(
            f"{path} does not begin as the records of an incident do.",
            next_step="Take the folder again from where it was made.",
        ) from None
    if first.format != FORMAT:
        raise RefusedError(
            f"{path} has format {first.format}, and this Tandem reads format {FORMAT}.",
            next_step="Use the Tandem that wrote it, or a newer one.",
        )


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        return decoded(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(
            f"Line {number} of {path} is damaged: {error}.",
            next_step="Take the folder again from where it was made.",
        ) from None


def _folded(path: Path, lines: list[Record]) -> Incident:
    head: Incident | None = None
    parts: dict[str, Record] = {}
    outcomes: tuple[Outcome, ...] = ()
    for line in lines:
        if isinstance(line, Incident):
            head, outcomes = line, line.outcomes
        elif isinstance(line, Outcome):
            outcomes += (line,)
        elif (part := PARTS.get(type(line))) is not None:
            parts[part] = line
    if head is None:
        raise RefusedError(
            f"{path} holds no incident yet.", next_step="Take another folder: this one is empty."
        )
    return msgspec.structs.replace(head, outcomes=outcomes, **parts)


def news(incident: Incident, before: Incident | None) -> list[Record]:
    """The lines that bring the folder from `before` to `incident`; empty when nothing changed."""
    parts = {name: getattr(incident, name) for name in PARTS.values()}
    known = {name: getattr(before, name) if before else None for name in parts}
    lines = [part for name, part in parts.items() if part is not None and part != known[name]]
    bare = dict.fromkeys(parts)
    head = msgspec.structs.replace(incident, **bare)
    if before is None or head != msgspec.structs.replace(before, **bare):
        lines.append(head)
    return lines

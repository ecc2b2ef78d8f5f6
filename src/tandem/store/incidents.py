"""The folders under `incidents/`: naming, saving, listing, forgetting and reading them.

For: folders as wholes; a stranger's folder is read with nothing else at hand. Not for: the rolling
state, which a folder never needs again once it is sealed.
"""

import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.errors import Bug, ConfigError, RefusedError, TandemError, WorldError
from tandem.facts import Facts
from tandem.records import STATE_FOLDER, Incident, Record
from tandem.store import paper, redact, seal

R = TypeVar("R", bound=Record)

FOLDER = "incidents"
STILL_OPEN = frozenset({"open", "repairing"})
"""States of an incident that is never forgotten, however many are newer."""

_ID = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ-[a-z0-9][a-z0-9.-]*")


def identity(opened_at: float, slug: str, taken: set[str]) -> str:
    """A folder's name: `2026-11-30T10-26-58Z-silent-stall`, with a number when it is taken."""
    moment = datetime.fromtimestamp(opened_at, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    words = re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-")[:60] or "incident"
    name, number = f"{moment}-{words}", 2
    while name in taken:
        name, number = f"{moment}-{words}-{number}", number + 1
    return name


def folder_of(incidents: Path, incident_id: str) -> Path:
    """The folder of an id; raises `Bug` for an id that would lead elsewhere."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", incident_id):
        raise Bug(f"{incident_id!r} is no name of an incident's folder")
    return incidents / incident_id


def save(incidents: Path, incident: Incident, also: Sequence[str] = ()) -> None:
    """Append to its folder what is new in an incident; saving it twice writes nothing."""
    folder = folder_of(incidents, incident.id)
    before = paper.read(folder) if _has_head(folder) else None
    shown = redact.record(
        msgspec.structs.replace(incident, deployment=redact.deployment(incident.deployment, also))
    )
    if lines := paper.news(shown, before):
        paper.append(folder, lines)


def _has_head(folder: Path) -> bool:
    path = folder / paper.FILE_NAME
    return path.exists() and path.read_bytes().count(b"\n") > 1


def keep_note(incidents: Path, incident_id: str, name: str, note: Record) -> None:
    """Replace a note beside an incident at once; raises `WorldError` when the disk refuses."""
    path = folder_of(incidents, incident_id) / f"{name}.json"
    part = path.with_suffix(".part")
    try:
        part.write_bytes(msgspec.json.encode(note))
        part.replace(path)
    except OSError as error:
        raise WorldError(
            f"{path} could not be written: {error.strerror or error}.",
            next_step=f"Free some space under {incidents}.",
        ) from error


def note(incidents: Path, incident_id: str, name: str, kind: type[R]) -> R | None:
    """A note beside an incident; None when it is missing or damaged."""
    path = folder_of(incidents, incident_id) / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def listed(incidents: Path) -> list[Incident]:
    """Every readable incident, newest first; a damaged folder is passed over, its file untouched.

    `load` says what is wrong with one.
    """
    found = []
    for folder in names(incidents):
        try:
            found.append(paper.read(incidents / folder))
        except TandemError:
            continue
    return found


def names(incidents: Path) -> list[str]:
    """The folders' names, newest first."""
    if not incidents.is_dir():
        return []
    return sorted((each.name for each in incidents.iterdir() if each.is_dir()), reverse=True)


def forget(incidents: Path, keep: int) -> list[str]:
    """Delete the oldest beyond `keep`, never one that is open; returns the names that went."""
    gone = []
    for name in names(incidents)[keep:]:
        if not _ID.fullmatch(name):
            continue  # not a folder of ours
        try:
            if paper.read(incidents / name).state in STILL_OPEN:
                continue
        except TandemError:
            continue  # unreadable: a person may want to see why
        shutil.rmtree(incidents / name, ignore_errors=True)
        gone.append(name)
    return gone


def load_incident(place: Path | str, root: Path | None = None) -> tuple[Incident, Facts]:
    """An incident and the facts as they were sealed, from a folder, or an id (or its beginning).

    Ids are looked up in `root`, the folder of `tandem.toml`, else in the working directory. Needs
    no store, no configuration and no adapter; opens nothing for writing. The same folder gives the
    same facts. Raises `ConfigError` when there is no such folder, `RefusedError` when it has
    another format, is damaged, was never sealed, or its evidence is not what was sealed.
    """
    folder = _found(place, root or Path.cwd())
    incident = paper.read(folder)
    if incident.seal is None:
        raise RefusedError(
            f"{folder} was never sealed: it holds records and no evidence.",
            next_step="Collect again with `tandem investigate`.",
        )
    return incident, seal.facts_in(folder, incident.seal)


def load_records(place: Path | str, root: Path | None = None) -> Incident:
    """An incident from its records alone, sealed or not; places and errors as `load_incident`."""
    return paper.read(_found(place, root or Path.cwd()))


def _found(place: Path | str, root: Path) -> Path:
    path = Path(place)
    if path.is_file():
        path = path.parent
    if path.is_dir():
        return path
    incidents = root / STATE_FOLDER / FOLDER
    matching = [name for name in names(incidents) if name.startswith(str(place))]
    if len(matching) == 1:
        return incidents / matching[0]
    if matching:
        raise ConfigError(
            f"{str(place)!r} fits {len(matching)} incidents: {', '.join(matching[:5])}.",
            next_step="Give more of the name.",
        )
    raise ConfigError(
        f"There is no incident {str(place)!r}, neither as a folder nor in {incidents}.",
        next_step="List them with `tandem incidents`.",
    )

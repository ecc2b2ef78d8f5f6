"""Finding incident folders and tandem.toml by name alone: nothing is opened.

For: the words that take an INCIDENT, and shell completion. Not for: reading one (`sealed.py`).
"""

import os
from pathlib import Path

from tandem.errors import WorldError

RECORDS = "records.jsonl"
"""The file that makes a folder an incident."""


def find_folder(which: str, config: Path | None = None) -> Path:
    """Give the folder of the incident that `which` names; raises WorldError as above."""
    if (Path(which) / RECORDS).is_file():
        return Path(which)
    if os.sep in which:
        raise WorldError(
            f"{which} is no incident's folder: it has no {RECORDS}.",
            next_step="Name the folder itself, or list those here with `tandem incidents`.",
        )
    home = incidents_home(config)
    known = incident_folders(home)
    if which == "latest" and known:
        return known[0]
    exact = [folder for folder in known if folder.name == which]
    matching = exact or [folder for folder in known if folder.name.startswith(which)]
    if len(matching) == 1:
        return matching[0]
    if not known:
        raise WorldError(
            f"There is no incident in {home}.",
            next_step="Open one with `tandem investigate`, or name an incident's folder.",
        )
    how_many = f"{len(matching)} incidents begin" if matching else "No incident's id begins"
    raise WorldError(
        f"{how_many} with `{which}` in {home}.",
        next_step="List them with `tandem incidents`, or name an incident's folder.",
    )


def incident_folders(home: Path) -> list[Path]:
    """List the incident folders in `home`, newest first (an id begins with its UTC time)."""
    found = (record.parent for record in home.glob(f"*/{RECORDS}"))
    return sorted(found, key=lambda folder: folder.name, reverse=True)


def incidents_home(config: Path | None = None) -> Path:
    """Give the `.tandem/incidents` of a configuration, else the nearest one upwards."""
    return deployment_root(config) / ".tandem" / "incidents"


def deployment_root(config: Path | None = None) -> Path:
    """Give the folder of a configuration, else the nearest upwards that has one or its state."""
    named = config or os.environ.get("TANDEM_CONFIG")
    if named:
        return Path(named).resolve().parent
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / ".tandem").is_dir() or (folder / "tandem.toml").is_file():
            return folder
    return here

"""Finding and judging sealed incidents: a folder is enough, no adapter and no tandem.toml.

For: the stage words that read (`diagnose`, `plan`, `report`, `incidents`). Not for: writing one.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from tandem.config import load
from tandem.diagnose import diagnose
from tandem.errors import WorldError
from tandem.facts import Facts
from tandem.failures import discover
from tandem.plan import plan_repair
from tandem.records import Diagnosis, Incident, Plan, Policy
from tandem.store import load_incident

RECORDS = "records.jsonl"
"""The file that makes a folder an incident."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One incident as its folder holds it."""

    folder: Path
    incident: Incident
    facts: Facts

    def diagnosis(self, hunch: str | None = None) -> Diagnosis:
        """Judge the sealed evidence now; the hunch sealed with it is asked unless one is given."""
        findings = (self.incident.finding,) if self.incident.finding else ()
        asked = self.incident.hunch if hunch is None else hunch
        return diagnose(self.facts, findings, discover(), asked)

    def plan(self, policy: Policy) -> Plan:
        """Plan the repair that the sealed evidence calls for under `policy`."""
        return plan_repair(self.diagnosis(), self.incident.finding, self.facts, policy)


def open_sealed(which: str, config: Path | None = None) -> Sealed:
    """Open the incident that `which` names: a folder, an id or its beginning, or `latest`.

    Raises WorldError when there is none, or more than one.
    """
    folder = find_folder(which, config)
    incident, facts = load_incident(folder)
    return Sealed(folder, incident, facts)


def find_folder(which: str, config: Path | None = None) -> Path:
    """Give the folder of the incident that `which` names; raises WorldError as above."""
    if (Path(which) / RECORDS).is_file():
        return Path(which)
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
    named = config or os.environ.get("TANDEM_CONFIG")
    if named:
        return Path(named).resolve().parent / ".tandem" / "incidents"
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / ".tandem").is_dir() or (folder / "tandem.toml").is_file():
            return folder / ".tandem" / "incidents"
    return here / ".tandem" / "incidents"


def policy_of(folder: Path, config: Path | None = None) -> Policy:
    """Give the policy of the tandem.toml that the incident belongs to, else the default one."""
    named = config or os.environ.get("TANDEM_CONFIG")
    beside = folder.resolve().parent.parent.parent / "tandem.toml"
    file = Path(named) if named else beside
    return load(file).policy if named or file.is_file() else Policy()

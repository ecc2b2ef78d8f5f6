"""Judging sealed incidents: a folder is enough, no adapter and no tandem.toml.

For: the stage words that read (`diagnose`, `plan`, `report`, `incidents`). Not for: writing one.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.folders import find_folder
from tandem.config import load
from tandem.diagnose import diagnose
from tandem.facts import Facts
from tandem.failures import discover
from tandem.plan import plan_repair
from tandem.records import Diagnosis, Incident, Plan, Policy
from tandem.store import load_incident


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


def policy_of(folder: Path, config: Path | None = None) -> Policy:
    """Give the policy of the tandem.toml that the incident belongs to, else the default one."""
    named = config or os.environ.get("TANDEM_CONFIG")
    beside = folder.resolve().parent.parent.parent / "tandem.toml"
    file = Path(named) if named else beside
    return load(file).policy if named or file.is_file() else Policy()

"""What the shell offers on TAB: members, incidents, failures.

For: `tandem --install-completion`. Not for: checking anything; a wrong file completes to nothing.
"""

import tomllib

from tandem.cli.folders import deployment_root, incident_folders, incidents_home


def members(incomplete: str) -> list[str]:
    """Offer the members that the nearest tandem.toml names."""
    try:
        tables = tomllib.loads((deployment_root() / "tandem.toml").read_text()).get("member", [])
        names = [str(table["name"]) for table in tables]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def incidents(incomplete: str) -> list[str]:
    """Offer `latest` and the ids of the incidents here, newest first."""
    ids = ["latest", *(folder.name for folder in incident_folders(incidents_home()))]
    return [name for name in ids if name.startswith(incomplete)]


def failures(incomplete: str) -> list[str]:
    """Offer the failures that are known."""
    from tandem.failures import discover

    return [mode.slug for mode in discover() if mode.slug.startswith(incomplete)]

"""`tandem.toml` into `Settings`: every fault found at once, one line each, with key, value and fix.

For: reading and refusing. The sections are made from the records they become, so that a key and its
default are written once. Not for: finding the file, or building anything from it (`wiring.py`).
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tandem.config.faults import Fault, instead
from tandem.config.tables import TABLES, checked
from tandem.config.topology import members_of, prometheus_faults, topology_faults
from tandem.errors import ConfigError
from tandem.records import Launch, Member, Settings

__all__ = ["load"]

SCOPES_AUTO = ("router", "engine", "engine:prefill", "engine:decode", "pair")
"""Repairs that may be made without asking, each only when `auto_scopes` names it."""

BYTES_MAX = 1_000_000
"""A file longer than this is something else, named by mistake."""

_SECTION_NAMES = ("member", *TABLES)


def load(path: Path) -> Settings:
    """Read, check and freeze a `tandem.toml`.

    `{python}` and `{root}` in argv, env and cwd become this interpreter and the file's folder;
    relative folders and documents are taken from there. Raises `ConfigError`, which names every
    fault at once: key, value and fix.
    """
    root = path.resolve().parent
    tables = _parse(path)
    faults = [
        Fault(f"[{name}]", None, "there is no such section", instead(name, _SECTION_NAMES))
        for name in tables
        if name not in _SECTION_NAMES
    ]
    settings: dict[str, dict[str, object]] = {}
    for name, table in TABLES.items():
        found = checked(table, tables.get(name, {}), name, faults)
        settings[name] = found.model_dump() if found else {}
    members = members_of(tables.get("member", []), faults)
    # A member that could not be read would show up again as a missing prefill or decode.
    faults += topology_faults(members, complete=not faults)
    faults += _scope_faults(settings["policy"])
    faults += _proof_faults(settings["verify"])
    faults += prometheus_faults(settings["watch"])
    if faults:
        raise _refusal(path, faults)
    settings["deployment"]["members"] = [_placed(member, root) for member in members]
    document = settings["report"]["document"]
    settings["report"]["document"] = str(root / str(document))
    if token := settings["watch"]["prometheus_token_file"]:
        settings["watch"]["prometheus_token_file"] = str(root / str(token))
    return msgspec.convert({"root": str(root), **settings}, Settings)


def _parse(path: Path) -> dict[str, object]:
    try:
        if path.exists() and not path.is_dir() and not path.is_file():
            raise ConfigError(f"{path} is no ordinary file.", next_step="Name a tandem.toml.")
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
        if len(content) > BYTES_MAX:
            raise ConfigError(
                f"{path} has more than {BYTES_MAX} bytes, so it is no tandem.toml.",
                next_step="Name the right file.",
            )
        return tomllib.loads(content.decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {path}.",
            next_step="Run in the folder of your tandem.toml, or name the file.",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.",
            next_step="Make it a file this user may read.",
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply to be a tandem.toml.", next_step="Name the right file."
        ) from None
    except ValueError as error:  # no text, no TOML, or a number of thousands of digits
        raise ConfigError(
            f"{path} is not TOML: {error}.", next_step="Correct the syntax there."
        ) from None


def _refusal(path: Path, faults: Iterable[Fault]) -> ConfigError:
    lines = [str(fault) for fault in faults]
    said = lines[0] if len(lines) == 1 else f"{len(lines)} faults:\n  " + "\n  ".join(lines)
    end = "" if said.endswith("?") else "."
    return ConfigError(f"{path}: {said}{end}", next_step="Edit the file and run the command again.")


def _scope_faults(policy: dict[str, object]) -> Iterator[Fault]:
    scopes = policy.get("auto_scopes")
    for scope in scopes if isinstance(scopes, tuple) else ():
        if scope.partition(":")[0] in ("role", "all", "config"):
            wrong = "this is never done without asking"
            yield Fault("policy.auto_scopes", scope, wrong, "remove it and approve it by hand")
        elif scope not in SCOPES_AUTO:
            wrong = "is no scope of a repair"
            yield Fault("policy.auto_scopes", scope, wrong, instead(scope, SCOPES_AUTO))


def _proof_faults(verify: dict[str, object]) -> Iterator[Fault]:
    if verify.get("sequential") == 0 and verify.get("sessions") == 0:
        wrong = "a proof without a request proves nothing"
        yield Fault("verify.sequential", 0, wrong, "ask for at least one, or for one session")


def _placed(member: Member, root: Path) -> Member:
    """The member with its launch and log made absolute: placeholders filled, folder resolved."""

    def fill(text: str) -> str:
        return text.replace("{python}", sys.executable).replace("{root}", str(root))

    if member.log is not None:
        member = msgspec.structs.replace(member, log=str(root / fill(member.log)))
    if member.launch is None:
        return member
    launch = Launch(
        argv=tuple(fill(word) for word in member.launch.argv),
        env={name: fill(value) for name, value in member.launch.env.items()},
        cwd=str((root / fill(member.launch.cwd)).resolve()),
    )
    return msgspec.structs.replace(member, launch=launch)

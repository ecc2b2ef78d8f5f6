"""`tandem.toml` into `Settings`: every fault found at once, one line each, with key, value and fix.

For: reading and refusing. The sections are made from the records they become, so that a key and its
default are written once. Not for: finding the file, or building anything from it (`wiring.py`).
"""

import difflib
import ipaddress
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from tandem.errors import ConfigError
from tandem.records import (
    EvidenceSettings,
    Launch,
    Member,
    Policy,
    ProbeSettings,
    Profile,
    Record,
    ReportSettings,
    Role,
    Settings,
    Thresholds,
    WatchSettings,
)

ENGINES = {Role.PREFILL: ("sglang",), Role.DECODE: ("sglang",), Role.ROUTER: ("smg",)}
"""The adapters that speak to each role; the first is the default."""
SUPERVISORS = ("local", "none")
SCOPES_AUTO = ("router", "engine", "engine:prefill", "engine:decode", "pair")
"""Repairs that may be made without asking, each only when `auto_scopes` names it."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
"""Names become file names, metric labels and parts of a path's subject (`a>b`)."""
VALUE_SHOWN = 60
"""Characters of a refused value that are shown."""

MAY_BE_ZERO = frozenset(
    {"drain_s", "stop_grace_s", "repairs_per_hour", "sequential", "sessions", "rescored_sessions"}
)
"""Every other number of a section must be above zero."""

_SECRET = re.compile(r"key|token|secret|pass", re.IGNORECASE)
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Port = Annotated[int, Field(ge=1, le=65535)]
_Words = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists, not tuples


class _DeploymentTable(BaseModel):  # type: ignore[explicit-any]  # pydantic's own
    model_config = _STRICT
    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "deployment"


class _MemberTable(BaseModel):  # type: ignore[explicit-any]  # pydantic's own
    model_config = _STRICT
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    role: Literal["prefill", "decode", "router"]
    url: str
    engine: str | None = None
    bootstrap_port: _Port | None = None
    metrics_url: str | None = None
    supervisor: str = "none"
    argv: _Words | None = None
    env: dict[str, str] = {}
    cwd: str | None = None


def _section(record: type[Record]) -> type[BaseModel]:
    """The table that becomes this record: its fields and defaults, numbers bounded."""
    fields: dict[str, tuple[type, object]] = {}
    for field in msgspec.structs.fields(record):
        kind = field.type
        if kind is int or kind is float:
            lowest = Field(ge=0) if field.name in MAY_BE_ZERO else Field(gt=0)
            kind = Annotated[kind, lowest]
        elif kind == tuple[str, ...]:
            kind = _Words
        fields[field.name] = (kind, field.default)
    return create_model(record.__name__, __config__=_STRICT, **fields)  # type: ignore[call-overload, no-any-return]


_TABLES: dict[str, type[BaseModel]] = {
    "deployment": _DeploymentTable,
    "policy": _section(Policy),
    "detect": _section(Thresholds),
    "probe": _section(ProbeSettings),
    "watch": _section(WatchSettings),
    "evidence": _section(EvidenceSettings),
    "verify": _section(Profile),
    "report": _section(ReportSettings),
}
_SECTION_NAMES = ("member", *_TABLES)


_Table = TypeVar("_Table", bound=BaseModel)


class Fault(NamedTuple):
    """One thing wrong with one key: `wrong` is a clause, `fix` an imperative one."""

    key: str
    value: object
    wrong: str
    fix: str

    def __str__(self) -> str:
        """`member.decode-0.bootstrap_port = 8998: a decode has none; remove the key`."""
        shown = "" if self.value is None else f" = {_shown(self.key, self.value)}"
        return f"{self.key}{shown}: {self.wrong}; {self.fix}"


def load(path: Path) -> Settings:
    """Read, check and freeze a `tandem.toml`.

    `{python}` and `{root}` in argv, env and cwd become this interpreter and the file's folder;
    relative folders and documents are taken from there. Raises `ConfigError`, which names every
    fault at once: key, value and fix.
    """
    root = path.resolve().parent
    tables = _parse(path)
    faults = [
        Fault(f"[{name}]", None, "there is no such section", _instead(name, _SECTION_NAMES))
        for name in tables
        if name not in _SECTION_NAMES
    ]
    settings: dict[str, dict[str, object]] = {}
    for name, table in _TABLES.items():
        checked = _checked(table, tables.get(name, {}), name, faults)
        settings[name] = checked.model_dump() if checked else {}
    members = _members(tables.get("member", []), faults)
    # A member that could not be read would show up again as a missing prefill or decode.
    faults += topology_faults(members, complete=not faults)
    faults += _scope_faults(settings["policy"])
    if faults:
        raise _refusal(path, faults)
    settings["deployment"]["members"] = [_placed(member, root) for member in members]
    document = settings["report"]["document"]
    settings["report"]["document"] = str(root / str(document))
    return msgspec.convert({"root": str(root), **settings}, Settings)


def _parse(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}.", next_step="Correct the syntax there."
        ) from None


def _refusal(path: Path, faults: Iterable[Fault]) -> ConfigError:
    lines = [str(fault) for fault in faults]
    said = lines[0] if len(lines) == 1 else f"{len(lines)} faults:\n  " + "\n  ".join(lines)
    return ConfigError(f"{path}: {said}.", next_step="Edit the file and run the command again.")


def _checked(table: type[_Table], raw: object, key: str, faults: list[Fault]) -> _Table | None:
    try:
        return table.model_validate(raw)
    except ValidationError as error:
        faults += [_fault(table, key, detail) for detail in error.errors(include_url=False)]
        return None


_WRONG = {
    "model_type": ("must be a table", "write it as a [section]"),
    "missing": ("is missing", "add it"),
    "int_type": ("must be a whole number", "write it without quotes or a fraction"),
    "float_type": ("must be a number", "write it without quotes"),
    "finite_number": ("must be a finite number", "write a number"),
    "bool_type": ("must be true or false", "write it without quotes"),
    "string_type": ("must be text", "put it in quotes"),
    "dict_type": ("must be a table", 'write it as { NAME = "value" }'),
    "tuple_type": ("must be a list", "put it in [brackets]"),
    "string_pattern_mismatch": (
        "is no usable name",
        "use letters, digits, `_`, `.` and `-`, at most 63, a letter or digit first",
    ),
}
"""What pydantic found, as what is wrong and how to put it right."""


def _fault(table: type[BaseModel], key: str, detail: ErrorDetails) -> Fault:
    names = [str(part) for part in detail["loc"]]
    where = ".".join([key, *names])
    kind, value = detail["type"], detail["input"]
    limits = detail.get("ctx", {})
    match kind:
        case "extra_forbidden":
            fix = _instead(names[-1], table.model_fields)
            return Fault(where, value, "there is no such key", fix)
        case "literal_error":
            return Fault(
                where, value, "is not one of its values", f"write {limits.get('expected')}"
            )
        case "greater_than" | "greater_than_equal" | "less_than_equal":
            said = {"gt": "above", "ge": "at least", "le": "at most"}
            bound = next(f"{word} {limits[name]}" for name, word in said.items() if name in limits)
            return Fault(where, value, "is out of range", f"use a number {bound}")
        case _:
            wrong, fix = _WRONG.get(kind, (detail["msg"].lower(), "see the documentation"))
            return Fault(where, None if kind == "missing" else value, wrong, fix)


def _instead(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"remove it, or use one of {', '.join(known)}"


def _shown(key: str, value: object) -> str:
    if isinstance(value, str) and (".env." in key or _SECRET.search(key)):
        return "..."
    text = repr(value)
    return text if len(text) <= VALUE_SHOWN else text[: VALUE_SHOWN - 3] + "..."


def _members(raw: object, faults: list[Fault]) -> list[Member]:
    if not isinstance(raw, list):
        faults.append(Fault("member", raw, "must be a list of tables", "write each as [[member]]"))
        return []
    members = []
    for number, entry in enumerate(raw):
        name = entry.get("name") if isinstance(entry, dict) else None
        key = f"member.{name if isinstance(name, str) and name else number}"
        table = _checked(_MemberTable, entry, key, faults)
        if table is not None:
            members.append(_member(table, key, faults))
    return members


def _member(table: _MemberTable, key: str, faults: list[Fault]) -> Member:
    """The member as written: placeholders and relative folders are still in its launch."""
    role = Role(table.role)
    known = ENGINES[role]
    engine = known[0] if table.engine is None else table.engine
    if engine not in known:
        wrong = f"no adapter speaks to such a {role}"
        faults.append(Fault(f"{key}.engine", engine, wrong, _instead(engine, known)))
    if table.supervisor not in SUPERVISORS:
        fix = _instead(table.supervisor, SUPERVISORS)
        faults.append(Fault(f"{key}.supervisor", table.supervisor, "is not known", fix))
    launch = None
    if table.argv:
        launch = Launch(argv=table.argv, env=table.env, cwd=table.cwd or ".")
    faults += _launch_faults(table, key)
    return Member(
        name=table.name,
        role=role,
        url=table.url.rstrip("/"),
        engine=engine,
        bootstrap_port=table.bootstrap_port,
        metrics_url=table.metrics_url,
        supervisor=table.supervisor,
        launch=launch,
    )


def _launch_faults(table: _MemberTable, key: str) -> Iterator[Fault]:
    if table.supervisor == "local":
        if not table.argv:
            fix = 'add argv = ["{python}", "-m", ...]'
            yield Fault(f"{key}.argv", table.argv, "the local supervisor needs it", fix)
        return
    given = {"argv": table.argv, "env": table.env or None, "cwd": table.cwd}
    for name, value in given.items():
        if value is not None:
            shown = None if name == "env" else value
            fix = 'add supervisor = "local", or remove the key'
            yield Fault(f"{key}.{name}", shown, "nobody starts this member", fix)


def topology_faults(members: list[Member], *, complete: bool) -> Iterator[Fault]:
    """What makes a deployment impossible; `complete` says that no member was left out."""
    yield from _name_faults(members)
    for member in members:
        yield from _role_faults(member)
        yield from _url_faults(member)
    yield from _endpoint_faults(members)
    for role in (Role.PREFILL, Role.DECODE) if complete else ():
        if not any(member.role == role for member in members):
            fix = f'add a [[member]] with role = "{role}"'
            yield Fault("member", None, f"the deployment has no {role}", fix)


def _name_faults(members: list[Member]) -> Iterator[Fault]:
    seen: set[str] = set()
    for member in members:
        if member.name in seen:
            yield Fault(
                f"member.{member.name}.name",
                member.name,
                "two members have this name",
                "give each its own",
            )
        seen.add(member.name)


def _role_faults(member: Member) -> Iterator[Fault]:
    key = f"member.{member.name}.bootstrap_port"
    if member.role == Role.PREFILL and member.bootstrap_port is None:
        fix = "add the port of its --disaggregation-bootstrap-port, 8998 unless set"
        yield Fault(key, None, "a prefill has a bootstrap server", fix)
    if member.role != Role.PREFILL and member.bootstrap_port is not None:
        wrong = f"a {member.role} has no bootstrap server"
        yield Fault(key, member.bootstrap_port, wrong, "remove the key")


def _url_faults(member: Member) -> Iterator[Fault]:
    for name, url in (("url", member.url), ("metrics_url", member.metrics_url)):
        if url is None:
            continue
        key = f"member.{member.name}.{name}"
        split = urlsplit(url)
        example = "write it as http://127.0.0.1:30000"
        if split.scheme not in ("http", "https") or _port(split) is None or not split.hostname:
            yield Fault(key, url, "must be http(s)://HOST:PORT", example)
        elif "@" in split.netloc or split.query:
            yield Fault(key, None, "must hold no credentials and no query", example)
        elif name == "url" and split.path:
            yield Fault(key, url, "must be the root of the server", "remove the path")
        elif member.supervisor == "local" and not _is_loopback(split.hostname):
            yield Fault(
                key,
                url,
                "what Tandem starts itself listens on loopback only",
                "use 127.0.0.1, or a supervisor of that host",
            )


def _endpoint_faults(members: list[Member]) -> Iterator[Fault]:
    """Two servers of one deployment cannot share a host and port."""
    users: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for member in members:
        url = urlsplit(member.url)
        own = {("url", _host(url), _port(url))}
        if member.metrics_url and urlsplit(member.metrics_url).netloc != url.netloc:
            metrics = urlsplit(member.metrics_url)
            own.add(("metrics_url", _host(metrics), _port(metrics)))
        own.add(("bootstrap_port", _host(url), member.bootstrap_port))
        for key, host, port in sorted(own, key=lambda each: each[0]):
            if port is not None:
                users[host, port].append((f"member.{member.name}.{key}", port))
    for entries in users.values():
        for key, port in entries[1:]:
            yield Fault(
                key, port, f"this port is already that of {entries[0][0]}", "give each its own"
            )


def _host(url: SplitResult) -> str:
    host = url.hostname or ""
    return "127.0.0.1" if host == "localhost" else host


def _port(url: SplitResult) -> int | None:
    try:
        return url.port
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _scope_faults(policy: dict[str, object]) -> Iterator[Fault]:
    scopes = policy.get("auto_scopes")
    for scope in scopes if isinstance(scopes, tuple) else ():
        if scope.partition(":")[0] in ("role", "all", "config"):
            wrong = "this is never done without asking"
            yield Fault("policy.auto_scopes", scope, wrong, "remove it and approve it by hand")
        elif scope not in SCOPES_AUTO:
            wrong = "is no scope of a repair"
            yield Fault("policy.auto_scopes", scope, wrong, _instead(scope, SCOPES_AUTO))


def _placed(member: Member, root: Path) -> Member:
    """The member with its launch made absolute: placeholders filled, folder resolved."""
    if member.launch is None:
        return member

    def fill(text: str) -> str:
        return text.replace("{python}", sys.executable).replace("{root}", str(root))

    launch = Launch(
        argv=tuple(fill(word) for word in member.launch.argv),
        env={name: fill(value) for name, value in member.launch.env.items()},
        cwd=str((root / fill(member.launch.cwd)).resolve()),
    )
    return msgspec.structs.replace(member, launch=launch)

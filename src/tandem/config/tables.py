"""The tables of `tandem.toml` as pydantic checks them; sections are made from their records.

For: shape: known keys, types and ranges. Not for: what members are to each other (`topology.py`).
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from tandem.config.faults import Fault, instead
from tandem.records import (
    EvidenceSettings,
    Policy,
    ProbeSettings,
    Profile,
    Record,
    ReportSettings,
    Thresholds,
    WatchSettings,
)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
"""Names become file names, metric labels and parts of a path's subject (`a>b`)."""
UNIT_PATTERN = r"^[A-Za-z0-9:_.\\@-]{1,255}$"
"""What systemd takes for the name of a unit; `.service` may be left out."""
CONTAINER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$"
"""What Docker and Podman take for the name of a container."""
MAY_BE_ZERO = frozenset(
    {
        *("drain_s", "stop_grace_s", "repairs_per_hour", "sequential", "sessions"),
        *("rescored_sessions", "metrics_port"),
    }
)
"""Every other number of a section must be above zero."""
MOST_OF_ANYTHING = 100_000
"""A count above it is a slip: each request is one in memory."""
PORT_MAX = 65_535
LONGEST_OF_ANYTHING = 10_000_000.0
"""Seconds (four months), megabytes or hours: above it is a slip too."""

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Port = Annotated[int, Field(ge=1, le=65535)]
_Words = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists, not tuples


class DeploymentTable(BaseModel):  # type: ignore[explicit-any]  # pydantic's own
    """`[deployment]`."""

    model_config = _STRICT
    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "deployment"


class MemberTable(BaseModel):  # type: ignore[explicit-any]  # pydantic's own
    """One `[[member]]`."""

    model_config = _STRICT
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    role: Literal["prefill", "decode", "router"]
    url: str
    engine: str | None = None
    bootstrap_port: _Port | None = None
    metrics_url: str | None = None
    supervisor: str = "none"
    unit: Annotated[str, Field(pattern=UNIT_PATTERN)] | None = None
    container: Annotated[str, Field(pattern=CONTAINER_PATTERN)] | None = None
    metrics_labels: dict[str, str] = {}
    log: str | None = None
    argv: _Words | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    dp_size: Annotated[int, Field(ge=1, le=1024)] = 1


def _section(record: type[Record]) -> type[BaseModel]:
    """The table that becomes this record: its fields and defaults, numbers bounded."""
    fields: dict[str, tuple[type, object]] = {}
    for field in msgspec.structs.fields(record):
        kind = field.type
        if kind is int or kind is float:
            most = MOST_OF_ANYTHING if kind is int else LONGEST_OF_ANYTHING
            most = PORT_MAX if field.name.endswith("_port") else most
            zero = field.name in MAY_BE_ZERO
            kind = Annotated[kind, Field(ge=0, le=most) if zero else Field(gt=0, le=most)]
        elif kind == tuple[str, ...]:
            kind = _Words
        fields[field.name] = (kind, field.default)
    return create_model(record.__name__, __config__=_STRICT, **fields)  # type: ignore[call-overload, no-any-return]


TABLES: dict[str, type[BaseModel]] = {
    "deployment": DeploymentTable,
    "policy": _section(Policy),
    "detect": _section(Thresholds),
    "probe": _section(ProbeSettings),
    "watch": _section(WatchSettings),
    "evidence": _section(EvidenceSettings),
    "verify": _section(Profile),
    "report": _section(ReportSettings),
}
"""Every section but the members: its name, and the table that checks it."""


_Table = TypeVar("_Table", bound=BaseModel)


def checked(table: type[_Table], raw: object, key: str, faults: list[Fault]) -> _Table | None:
    """The table as read, or None after adding what is wrong with it to `faults`."""
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
            fix = instead(names[-1], table.model_fields)
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

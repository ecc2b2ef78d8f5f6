"""What plan says: the smallest sufficient repair as ordered steps, and why nothing smaller."""

from typing import Literal

from tandem.records.record import Record

Verb = Literal["drain", "stop", "expect-gone", "start", "gate"]
Gate = Literal[
    "none",
    "drained",  # nothing that still moves is left on the target, or the bound is reached
    "gone",  # process, ports and shared memory of the target are gone
    "alive",  # the process runs and its HTTP answers
    "bootstrap",  # the prefill's rendezvous answers with every rank
    "handoff",  # a real hand-off over the target path completed
    "routed",  # a real request through the router completed
]


class Policy(Record, frozen=True, kw_only=True):
    """What Tandem may do without asking.

    `mode`: observe (never plans aloud), advise (default), approve (acts after `tandem repair
    --approve`), auto (acts alone within `auto_scopes`). Never auto: role, all, an undetermined
    diagnosis, or while a member is loading.
    """

    mode: Literal["observe", "advise", "approve", "auto"] = "advise"
    auto_scopes: tuple[str, ...] = ()
    repairs_per_hour: int = 2
    drain_s: float = 3.0
    stop_grace_s: float = 5.0
    start_timeout_s: float = 60.0


class Step(Record, frozen=True, kw_only=True):
    """One step: do `verb` to `target`, then wait for `gate` at most `timeout_s`."""

    id: str
    verb: Verb
    target: str
    """A member's name, or a path's subject for hand-off gates."""
    gate: Gate
    timeout_s: float
    on_failure: Literal["stop", "continue"]
    """`stop` ends the repair and tells a person; `continue` is only for bounded niceties."""
    why: str


class RefusedRung(Record, frozen=True, kw_only=True):
    """A smaller repair that was considered and refused, with the reason."""

    scope: str
    because: str


class Plan(Record, frozen=True, kw_only=True):
    """An ordered repair. An empty `steps` with scope `nothing` says why nothing is done."""

    scope: str
    steps: tuple[Step, ...]
    refused: tuple[RefusedRung, ...]
    kept: tuple[str, ...]
    """Changes that stay as they are, each `subject: what before -> after`."""
    costs: tuple[str, ...]
    """Outage, learned start times, requests that will be lost: one sentence each."""
    because: str
    needs_approval: bool = True
    config_edit: str | None = None

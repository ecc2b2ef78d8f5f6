"""What a drill is: a name, what it rehearses, and the script of its injection."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tandem.drills.traffic import ClientLog, Shape, Traffic
from tandem.drills.workspace import Workspace

Tell = Callable[[str], None]


@dataclass
class Scene:
    """What a script plays with: the deployment, its clients, and someone to tell."""

    workspace: Workspace
    log: ClientLog
    traffic: Traffic
    seed: int
    tell: Tell
    background: list[Traffic] = field(default_factory=list)
    """Further clients of the script, stopped with the scene."""


@dataclass(frozen=True, slots=True)
class Drill:
    """One rehearsal; `stall_expected` False for near misses and controls."""

    name: str
    about: str
    stall_expected: bool
    script: Callable[[Scene], Awaitable[None]]
    """Injects; returns when the injection is complete. Traffic goes on afterwards."""
    shape: Shape = field(default_factory=Shape)
    context_length: int = 1024
    calm_s: float = 20.0
    """How long a control goes on after its script, watched."""

"""What is deployed: members with roles, incarnations of them, and the paths between them."""

import functools
from enum import StrEnum

from tandem.records.record import Record

PATHS_MAX = 256
"""Paths of one cell that are told apart; with more pairs of ranks, each rank is in one path."""


class Role(StrEnum):
    """What a member does in the pair."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


class Launch(Record, frozen=True, kw_only=True):
    """How to start a member: argv, environment additions and working directory.

    Only supervisors that start processes themselves need it; never a shell string.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str = "."


class Member(Record, frozen=True, kw_only=True):
    """One member of a deployment: an engine of one role, or the router.

    `url` is its HTTP root; `bootstrap_port` only on a prefill; `metrics_url` where it differs from
    `url + /metrics` (a router's Prometheus port). `supervisor` names the plug-in that may start and
    stop it, `none` when nobody told us how. `dp_size` is how many data-parallel ranks it has.
    """

    name: str
    role: Role
    url: str
    engine: str
    """Adapter that speaks to it: `sglang`, `vllm`; for a router `smg`."""
    bootstrap_port: int | None = None
    metrics_url: str | None = None
    supervisor: str = "none"
    launch: Launch | None = None
    dp_size: int = 1
    unit: str | None = None
    """Its systemd unit, where somebody said so; else found from its process."""
    container: str | None = None
    """The name of its container, where somebody said so; else found from its process."""
    metrics_labels: dict[str, str] = {}
    """Labels that its series have in `[watch] prometheus`; `instance` of its page unless given."""
    log: str | None = None
    """The file it logs to, where it is not the supervisor's."""


class Deployment(Record, frozen=True, kw_only=True):
    """Members that serve one model together; several deployments on one host stay apart."""

    name: str
    members: tuple[Member, ...]

    def of(self, role: Role) -> tuple[Member, ...]:
        """The members of one role, in the order of the configuration."""
        return tuple(member for member in self.members if member.role == role)

    def member(self, name: str) -> Member | None:
        """The member of that name, or None."""
        return next((member for member in self.members if member.name == name), None)

    def cells(self) -> tuple["Path", ...]:
        """Every (prefill, decode) cell of the path matrix, without the router."""
        prefills = tuple(one.name for one in self.of(Role.PREFILL))
        return _matrix(prefills, tuple(one.name for one in self.of(Role.DECODE)))

    def paths(self) -> tuple["Path", ...]:
        """Every cell, told apart by data-parallel ranks where a member has several."""
        return tuple(
            Path(
                prefill=prefill.name,
                decode=decode.name,
                prefill_dp=first if prefill.dp_size > 1 else None,
                decode_dp=second if decode.dp_size > 1 else None,
            )
            for prefill in self.of(Role.PREFILL)
            for decode in self.of(Role.DECODE)
            for first, second in _pairs(prefill.dp_size, decode.dp_size)
        )


@functools.lru_cache(maxsize=16)
def _matrix(prefills: tuple[str, ...], decodes: tuple[str, ...]) -> "tuple[Path, ...]":
    # Asked for many times a second, and there are thousands of cells in a large deployment.
    return tuple(Path(prefill=one, decode=other) for one in prefills for other in decodes)


def _pairs(prefills: int, decodes: int) -> list[tuple[int, int]]:
    """Pairs of ranks: all of them, or where these are too many each rank at least once."""
    if prefills * decodes <= PATHS_MAX:
        return [(first, second) for first in range(prefills) for second in range(decodes)]
    return [(one % prefills, one % decodes) for one in range(max(prefills, decodes))][:PATHS_MAX]


class Path(Record, frozen=True, kw_only=True):
    """A way a request can take; `router` is None when the cell is reached directly.

    `prefill_dp` and `decode_dp` are data-parallel ranks, None where a member has only one.
    """

    prefill: str
    decode: str
    router: str | None = None
    prefill_dp: int | None = None
    decode_dp: int | None = None

    @property
    def subject(self) -> str:
        """How observations name this path: `prefill-0>decode-0`, `prefill-0/dp1>decode-0`, ..."""
        ends = ">".join(
            name if rank is None else f"{name}/dp{rank}"
            for name, rank in ((self.prefill, self.prefill_dp), (self.decode, self.decode_dp))
        )
        return f"{self.router}>{ends}" if self.router else ends


class Incarnation(Record, frozen=True, kw_only=True):
    """One life of a member: an opaque id and when it began (unix seconds).

    Here `pid:start time`; elsewhere a container id, a pod uid, an engine id.
    """

    id: str
    started_at: float
    pid: int | None = None

    @property
    def name(self) -> str:
        """The id as people say it."""
        return life_name(self.id)


def life_name(incarnation: str) -> str:
    """An incarnation's id as people say it: `pid 4711` of `4711:90210`, any other id as it is."""
    pid, _, ticks = incarnation.partition(":")
    return f"pid {pid}" if pid.isdigit() and ticks.isdigit() else incarnation

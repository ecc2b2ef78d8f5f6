"""Timelines of a deployment, painted second by second: the facts that judgement is tested on.

A `Scene` holds a deployment (1 prefill, 1 decode, a router unless told otherwise) and a state;
`run` lets seconds pass and paints what every collector would have seen of that state. Not a
simulator: nothing here follows from anything else except counters, which grow at the rates given.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from tandem.facts import Facts
from tandem.records import Change, Deployment, Member, Observation, Role, Trait
from tandem.records import vocabulary as v

T0 = 1_764_500_000.0
PREFILL, DECODE, ROUTER = "prefill-0", "decode-0", "router"
CELL = f"{PREFILL}>{DECODE}"
SWITCH = "--disable-overlap-schedule"
QUEUES = {
    Role.PREFILL: {
        "inflight": v.INFLIGHT_QUEUE_REQS,
        "bootstrap": v.BOOTSTRAP_QUEUE_REQS,
        "waiting": v.WAITING_REQS,
        "running": v.RUNNING_REQS,
    },
    Role.DECODE: {
        "transfer": v.TRANSFER_QUEUE_REQS,
        "prealloc": v.PREALLOC_QUEUE_REQS,
        "waiting": v.WAITING_REQS,
        "running": v.RUNNING_REQS,
        "retracted": v.RETRACTED_QUEUE_REQS,
    },
}
Row = TypeVar("Row", Observation, Change, Trait)
Level = float | Callable[[float], float]
"""A gauge or a rate per second: a number, or a function of the seconds into the present `run`."""


@dataclass
class Engine:
    """What one engine is doing: queue levels, rates per second, and whether it can be seen."""

    queues: dict[str, Level] = field(default_factory=dict)
    completes: Level = 0.0
    tokens: Level = 0.0
    fails: Level = 0.0
    aborts: Level = 0.0
    cpu: Level = 0.05
    forwards: bool = True
    """Whether a health check's forward step completes."""
    health: int | None = 200
    """Status of `/health`; None when nothing answers over HTTP."""
    alive: bool = True
    seconds_each: float = 0.02
    """How long each completed hand-off took."""


def deployment(prefills: int = 1, decodes: int = 1, *, router: bool = True) -> Deployment:
    """Members on loopback ports; nothing listens there."""
    members = [
        Member(
            name=f"{role.value}-{number}",
            role=role,
            url=f"http://127.0.0.1:{base + number}",
            engine="sglang",
            bootstrap_port=8998 + number if role is Role.PREFILL else None,
        )
        for role, count, base in ((Role.PREFILL, prefills, 30000), (Role.DECODE, decodes, 31000))
        for number in range(count)
    ]
    if router:
        members.append(
            Member(name=ROUTER, role=Role.ROUTER, url="http://127.0.0.1:32000", engine="smg")
        )
    return Deployment(name="laptop", members=tuple(members))


class Scene:
    """A timeline being painted; attributes are the state that the next `run` paints."""

    def __init__(self, prefills: int = 1, decodes: int = 1, *, router: bool = True) -> None:
        self.deployment = deployment(prefills, decodes, router=router)
        self.now = T0
        self.engines = {
            member.name: Engine()
            for member in self.deployment.members
            if member.role is not Role.ROUTER
        }
        self.offered: Level = 0.0
        self.answered: Level = 0.0
        self.active: Level = 0.0
        self.probes: dict[str, str | None] = dict.fromkeys(
            [cell.subject for cell in self.deployment.cells()] + ([ROUTER] if router else []),
            "completed",
        )
        self.blind: set[str] = set()
        """Sources that bring nothing."""
        self.router_alive = True
        self.lives = {member.name: T0 - 3600.0 for member in self.deployment.members}
        self.command_lines = dict.fromkeys(self.engines, ("python", "-m", "engine", SWITCH))
        self.observations: list[Observation] = []
        self.changes: list[Change] = []
        self.traits = [
            Trait(subject="*", name=v.T_HEALTH_RUNS_FORWARD, at=T0, value=True),
            Trait(subject="*", name=v.T_ACTIVE_PROBE_SAFE, at=T0, value=True),
            Trait(
                subject="*", name=v.T_SWITCHES_OFF, at=T0, label=SWITCH, value="overlap-schedule"
            ),
        ]
        self._totals: dict[tuple[str, str], float] = {}

    @property
    def prefill(self) -> Engine:
        """The first prefill."""
        return self.engines[PREFILL]

    @property
    def decode(self) -> Engine:
        """The first decode."""
        return self.engines[DECODE]

    def see(
        self,
        source: str,
        subject: str,
        name: str,
        value: bool | float | str | tuple[str, ...] | None,
        *,
        label: str = "",
        missing: str | None = None,
    ) -> None:
        """Paint one observation now, unless its source is blind."""
        if source in self.blind:
            return
        life = self.lives.get(subject)
        self.observations.append(
            Observation(
                source=source,
                subject=subject,
                name=name,
                at=self.now,
                label=label,
                value=value,
                missing=missing,
                incarnation=None if life is None else f"{subject}:{life:.0f}",
            )
        )

    def run(self, seconds: int) -> "Scene":
        """Let whole seconds pass in the present state, seen at 1 Hz."""
        for second in range(1, seconds + 1):
            self.now += 1.0
            for name, engine in self.engines.items():
                self._engine(name, engine, float(second))
            if any(member.role is Role.ROUTER for member in self.deployment.members):
                self._router(float(second))
            if int(self.now - T0) % 5 == 0:
                for subject, answer in self.probes.items():
                    if answer is not None:
                        self.see("probe", subject, v.PROBE, answer)
        return self

    def _engine(self, name: str, engine: Engine, second: float) -> None:
        member = self.deployment.member(name)
        role = member.role if member else Role.PREFILL
        reachable = engine.health is not None and engine.alive
        refused = None if reachable else "connection refused"
        for short, queue in QUEUES[role].items():
            value = _at(engine.queues.get(short, 0.0), second)
            self.see("loads", name, queue, value if reachable else None, missing=refused)
        check = int(self.now - T0) % 2 == 0
        tokens = _at(engine.tokens, second)
        if reachable and engine.forwards:
            tokens += 1.5 if check else 1.0  # ours every 2 s, the router's every second
        done = _at(engine.completes, second)
        moving = {
            v.PROGRESS_TOKENS_TOTAL: tokens,
            v.REQUESTS_TOTAL: done + _at(engine.aborts, second),
            v.TRANSFER_FAILED_TOTAL: _at(engine.fails, second),
            v.ABORTED_TOTAL: _at(engine.aborts, second),
        }
        if role is Role.PREFILL:
            moving[v.TRANSFERS_TOTAL] = done
            moving[v.TRANSFER_SECONDS_TOTAL] = done * engine.seconds_each
        for counter, rate in moving.items():
            total = self._count(name, counter, rate)
            self.see("metrics", name, counter, total if reachable else None, missing=refused)
        if check:
            self.see("health", name, v.HEALTH_STATUS, engine.health, missing=refused)
        self._process(name, alive=engine.alive, cpu=_at(engine.cpu, second))
        if engine.alive:
            self.see("process", name, v.COMMAND_LINE, self.command_lines[name])

    def _router(self, second: float) -> None:
        refused = None if self.router_alive else "connection refused"
        for counter, rate in (
            (v.ROUTER_REQUESTS_TOTAL, self.offered),
            (v.ROUTER_RESPONSES_TOTAL, self.answered),
        ):
            total = self._count(ROUTER, counter, _at(rate, second))
            self.see("router", ROUTER, counter, None if refused else total, missing=refused)
        active = None if refused else _at(self.active, second)
        self.see("router", ROUTER, v.ROUTER_ACTIVE_REQS, active, missing=refused)
        self._process(ROUTER, alive=self.router_alive, cpu=0.02)

    def _process(self, name: str, *, alive: bool, cpu: float) -> None:
        self.see("process", name, v.ALIVE, alive)
        if alive:
            self.see("process", name, v.STARTED_AT, self.lives[name])
            total = self._count(name, v.CPU_SECONDS_TOTAL, cpu)
            self.see("process", name, v.CPU_SECONDS_TOTAL, total)

    def _count(self, name: str, counter: str, rate: float) -> float:
        total = self._totals.get((name, counter), 0.0) + rate
        self._totals[name, counter] = total
        return total

    def restart(self, name: str, away_s: int = 2, *, settle: bool = True) -> "Scene":
        """End a member's life and begin another; the ledger notes it, its counters start anew."""
        if name == ROUTER:
            self.router_alive = False
        else:
            self.engines[name].alive = False
        self.run(away_s)
        self.lives[name] = self.now
        for key in [key for key in self._totals if key[0] == name]:
            del self._totals[key]
        self.changes.append(
            Change(
                at=self.now,
                subject=name,
                kind="restart",
                how_known="the start time of its process changed",
                incarnation=f"{name}:{self.now:.0f}",
            )
        )
        if name == ROUTER:
            self.router_alive = True
        else:
            self.engines[name].alive = True
        return self.run(1) if settle else self

    def change(self, subject: str, what: str, touches: str, *, kind: str = "env") -> "Scene":
        """Note a configuration change in the ledger."""
        self.changes.append(
            Change(at=self.now, subject=subject, kind=kind, what=what, after="1", touches=touches)
        )
        return self

    def facts(self, *, window_s: float | None = None, without: tuple[str, ...] = ()) -> Facts:
        """The facts at this moment, ids in order of time."""
        seen = [one for one in self.observations if one.name not in without]
        if window_s is not None:
            seen = [one for one in seen if one.at >= self.now - window_s]
        numbered = [_with_id(one, number) for number, one in enumerate(seen, start=1)]
        changes = [_with_id(one, number) for number, one in enumerate(self.changes, start=1)]
        traits = [_with_id(one, number) for number, one in enumerate(self.traits, start=1)]
        return Facts(self.deployment, numbered, now=self.now, changes=changes, traits=traits)


def _with_id(record: Row, number: int) -> Row:
    return msgspec.structs.replace(record, id=number)


def _at(level: Level, second: float) -> float:
    return level(second) if callable(level) else level

"""What one would see of a simulated fleet: its state in our vocabulary, as the adapters give it.

Freshness is the engines' own (`tandem_engine/metrics.py`): counters move at once, those of finished
requests when they finish; `/v1/loads` is live; gauges of the metrics page are written after a
prefill batch, every so many decode steps and when fully idle; a labelled counter that never counted
is not there.

For: one look at one member, as rows and the seconds until the answer came.
Not for: when to look (`faces.py`), or what the state means.
"""

from dataclasses import dataclass, field

from tandem.engines.sglang_traits import Told, traits
from tandem.records import Observation, Role, Trait, Value
from tandem.records import vocabulary as v
from tandem.testing.fleet import Engine, Fleet
from tandem.testing.simulated_prefill import SimulatedPrefill
from tandem.testing.simulated_router import SimulatedRouter

ABSENT = "not on the metrics page: it never counted, or is not wired"
LOADS_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 5.0
VERSION = "0.5.23"
_PREFILL_COUNTERS = (
    v.PROGRESS_TOKENS_TOTAL, v.REQUESTS_TOTAL, v.PROMPT_TOKENS_TOTAL, v.GENERATION_TOKENS_TOTAL,
    v.TRANSFERS_TOTAL, v.TRANSFER_FAILED_TOTAL, v.BOOTSTRAP_FAILED_TOTAL, v.ABORTED_TOTAL,
)  # fmt: skip
_DECODE_COUNTERS = tuple(name for name in _PREFILL_COUNTERS if name != v.TRANSFERS_TOTAL)
_PREFILL_QUEUES = (v.WAITING_REQS, v.BOOTSTRAP_QUEUE_REQS, v.INFLIGHT_QUEUE_REQS)
_DECODE_QUEUES = (
    v.RUNNING_REQS, v.PREALLOC_QUEUE_REQS, v.TRANSFER_QUEUE_REQS, v.RETRACTED_QUEUE_REQS,
)  # fmt: skip
_COUNTED = (v.ROUTER_REQUESTS_TOTAL, v.ROUTER_RESPONSES_TOTAL, v.ROUTER_ACTIVE_REQS)


@dataclass(slots=True)
class Look:
    """What came of one look, and how long its answer took."""

    rows: list[Observation]
    delay_s: float = 0.0
    traits: tuple[Trait, ...] = ()


@dataclass(slots=True)
class Blind:
    """One source of one member that cannot be reached for a while (a network, a busy proxy)."""

    until: float
    why: str = "no answer within 2 s"


@dataclass(slots=True)
class Sight:
    """The eyes on one fleet: remembers what was asked seldom, and what cannot be seen just now."""

    fleet: Fleet
    blind: dict[tuple[str, str], Blind] = field(default_factory=dict)
    """By member and source (metrics, loads, health, router, process)."""
    info_every_s: float = 30.0
    traits_every_s: float = 300.0
    _info_due: dict[str, float] = field(default_factory=dict)
    _traits_due: dict[str, float] = field(default_factory=dict)
    _slow_due: dict[str, tuple[int, float]] = field(default_factory=dict)
    _last_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def _why_blind(self, member: str, source: str) -> str | None:
        hidden = self.blind.get((member, source))
        if hidden is None:
            return None
        if self.fleet.now >= hidden.until:
            del self.blind[member, source]
            return None
        return hidden.why

    def _why_not(self, member: str, source: str, timeout_s: float) -> tuple[str | None, float]:
        """Why HTTP gives nothing, and after how long; None when it answers."""
        answers = self.fleet.member(member).process.answers()
        if answers == "refused":
            return "connection refused", 0.0
        why = self._why_blind(member, source)
        if answers == "silent" or why is not None:
            return why or f"no answer within {timeout_s:g} s", timeout_s
        return None, 0.0

    # Engines.

    def engine(self, name: str) -> Look:
        """Metrics, loads and, when due, server information of an engine."""
        engine = self.fleet.engines[name]
        at, life = self.fleet.clock.now(), engine.process.life_id
        page_why, page_s = self._why_not(name, "metrics", LOADS_TIMEOUT_S)
        loads_why, loads_s = self._why_not(name, "loads", LOADS_TIMEOUT_S)
        if isinstance(engine, SimulatedPrefill):
            rows = _prefill_counters(engine, at, life, page_why)
        else:
            rows = _decode_counters(engine, at, life, page_why)
        self._queues(engine, at, life, (page_why, loads_why), rows)
        if self.fleet.now >= self._info_due.get(name, 0.0):
            why = page_why
            if why is None:
                self._info_due[name] = self.fleet.now + self.info_every_s
                for label, value in (("version", VERSION), ("disaggregation_mode", _role(engine))):
                    rows.append(_row("server_info", name, v.SERVER_ARG, at, value, life, label))
            else:
                rows.append(_row("server_info", name, v.SERVER_ARG, at, None, life, "", why))
        return Look(rows, max(page_s, loads_s), self._traits(engine, at, page_why))

    def _traits(self, engine: Engine, at: float, why: str | None) -> tuple[Trait, ...]:
        name = engine.name
        if why is not None or self.fleet.now < self._traits_due.get(name, 0.0):
            return ()
        self._traits_due[name] = self.fleet.now + self.traits_every_s
        role = Role.PREFILL if isinstance(engine, SimulatedPrefill) else Role.DECODE
        names = _PREFILL_QUEUES if role is Role.PREFILL else _DECODE_QUEUES
        frozen = frozenset() if engine.machine.live_loads else frozenset(names)
        return traits(name, role, Told(VERSION, "shm", frozen), at)

    def _queues(
        self,
        engine: Engine,
        at: float,
        life: str,
        why: tuple[str | None, str | None],
        rows: list[Observation],
    ) -> None:
        """Queue counts: live ones, or where there are none the gauges of the page."""
        page_why, loads_why = why
        name, live = engine.name, engine.machine.live_loads
        if engine.idle and self.fleet.now - engine.gauges_at > engine.machine.gauges_idle_s:
            engine.write_gauges()
        source = "loads" if live else "metrics"
        missing = loads_why if live else page_why
        names = _PREFILL_QUEUES if isinstance(engine, SimulatedPrefill) else _DECODE_QUEUES
        if missing is not None:
            rows += [_row(source, name, what, at, None, life, "", missing) for what in names]
        else:
            if live:
                rows.append(_row("loads", name, v.LIVE_LOADS, at, "/v1/loads", life))
            counts = self._counts(engine) if live else engine.gauges
            for what, count in zip(names, counts, strict=True):
                rows.append(_row(source, name, what, at, count, life))
        if isinstance(engine, SimulatedPrefill):
            # The last batch, from the page: it stays when nothing runs any more.
            shown = None if page_why else engine.batch_shown
            rows.append(_row("metrics", name, v.RUNNING_REQS, at, shown, life, "", page_why))
        elif missing is None:
            rows.append(_row(source, name, v.WAITING_REQS, at, 0, life))
            usage = round(engine.cells / engine.machine.kv_cells, 4)
            rows.append(_row(source, name, v.TOKEN_USAGE, at, usage, life))

    def _counts(self, engine: Engine) -> tuple[int, ...]:
        if engine.worker_dead and engine.name in self._last_loads:
            # The scheduler's thread is gone: its last numbers are told for ever.
            return self._last_loads[engine.name]
        counts: tuple[int, ...]
        if isinstance(engine, SimulatedPrefill):
            counts = (len(engine.waiting), len(engine.bootstrap), engine.shown_inflight)
        else:
            counts = (
                len(engine.running), len(engine.prealloc), len(engine.transfer),
                len(engine.retracted),
            )  # fmt: skip
        self._last_loads[engine.name] = counts
        return counts

    def health(self, name: str) -> Look:
        """The health endpoint, and a prefill's rendezvous."""
        engine = self.fleet.engines[name]
        at, life = self.fleet.clock.now(), engine.process.life_id
        why, delay_s = self._why_not(name, "health", HEALTH_TIMEOUT_S)
        status: int | None = None
        if why is None:
            status, delay_s = _health(engine)
            if status is None:
                why = f"no answer within {HEALTH_TIMEOUT_S:g} s"
        said = None if why is None else f"/health: {why}"
        rows = [_row("health", name, v.HEALTH_STATUS, at, status, life, "", said)]
        if status is not None:
            rows.append(_row("health", name, v.HEALTH_LATENCY_S, at, round(delay_s, 4), life))
        if isinstance(engine, SimulatedPrefill):
            answers = engine.process.answers()
            ready: Value = None if answers == "silent" else answers in ("yes", "starting")
            silent = "bootstrap /route: no answer" if ready is None else None
            rows.append(_row("health", name, v.BOOTSTRAP_READY, at, ready, life, "", silent))
        return Look(rows, delay_s)

    # The router.

    def router(self, name: str) -> Look:
        """Workers and counters of a router."""
        router = self.fleet.routers[name]
        at, life = self.fleet.clock.now(), router.process.life_id
        why, delay_s = self._why_not(name, "router", LOADS_TIMEOUT_S)
        if why is not None:
            rows = [_row("router", name, v.WORKER_HEALTHY, at, None, life, "", f"/workers: {why}")]
            said = f"router metrics: {why}"
            rows += [_row("router", name, what, at, None, life, "", said) for what in _COUNTED]
            return Look(rows, delay_s)
        return Look(_router(router, at, life), 0.0)

    # Processes.

    def process(self, name: str) -> Look:
        """The process of a member."""
        process = self.fleet.member(name).process
        at = self.fleet.clock.now()
        why = self._why_blind(name, "process")
        if why is not None:
            return Look([_row("process", name, v.ALIVE, at, None, None, "", why)])
        if not process.alive:
            return Look([_row("process", name, v.ALIVE, at, value=False, life=None)])
        life = process.life_id
        state = "T" if process.stopped else "S"
        rows = [
            _row("process", name, v.ALIVE, at, value=True, life=life),
            _row("process", name, v.STARTED_AT, at, process.started_at, life),
            _row("process", name, v.PID, at, process.pid, life),
            _row("process", name, v.PROCESS_STATE, at, state, life),
            _row("process", name, v.CPU_SECONDS_TOTAL, at, round(process.cpu_s(), 3), life),
        ]
        known, due = self._slow_due.get(name, (0, 0.0))
        if known != process.life or self.fleet.now >= due:
            self._slow_due[name] = (process.life, self.fleet.now + 15.0)
            words = ("python", "-m", "simulated", name)
            rows.append(_row("process", name, v.COMMAND_LINE, at, words, life))
            rows.append(_row("process", name, v.ENVIRONMENT, at, None, life))
        return Look(rows)


def _row(  # noqa: PLR0917 - the fields of an observation
    source: str,
    subject: str,
    name: str,
    at: float,
    value: Value,
    life: str | None,
    label: str = "",
    missing: str | None = None,
) -> Observation:
    return Observation(
        source=source, subject=subject, name=name, at=at, label=label, value=value,
        missing=missing, incarnation=life,
    )  # fmt: skip


def _role(engine: Engine) -> str:
    return "prefill" if isinstance(engine, SimulatedPrefill) else "decode"


def _prefill_counters(
    engine: SimulatedPrefill, at: float, life: str, why: str | None
) -> list[Observation]:
    name = engine.name
    if why is not None:
        said = f"/metrics: {why}"
        return [_row("metrics", name, what, at, None, life, "", said) for what in _PREFILL_COUNTERS]
    values = (
        engine.tokens() or None, engine.requests or None, engine.prompt_tokens or None,
        engine.requests or None, engine.transfers or None, engine.transfer_failed,
        engine.bootstrap_failed, engine.aborted,
    )  # fmt: skip
    rows = [
        _row("metrics", name, what, at, value, life, "", ABSENT if value is None else None)
        for what, value in zip(_PREFILL_COUNTERS, values, strict=True)
    ]
    if engine.transfers:
        spent = _row("metrics", name, v.TRANSFER_SECONDS_TOTAL, at, engine.transfer_s, life)
        rows.append(spent)
        ordered = engine.ttft_p99_s()
        rows.append(_row("metrics", name, v.TTFT_P99_S, at, ordered, life))
    return rows


def _decode_counters(engine: Engine, at: float, life: str, why: str | None) -> list[Observation]:
    name = engine.name
    if why is not None or isinstance(engine, SimulatedPrefill):
        said = f"/metrics: {why}"
        return [_row("metrics", name, what, at, None, life, "", said) for what in _DECODE_COUNTERS]
    values = (
        engine.tokens() or None, engine.requests or None, engine.prompt_tokens or None,
        engine.generated_tokens or None, engine.transfer_failed, engine.bootstrap_failed,
        engine.aborted,
    )  # fmt: skip
    return [
        _row("metrics", name, what, at, value, life, "", ABSENT if value is None else None)
        for what, value in zip(_DECODE_COUNTERS, values, strict=True)
    ]


def _health(engine: Engine) -> tuple[int | None, float]:
    """Status and seconds until it came; no status when it takes longer than we wait."""
    process, now = engine.process, engine.fleet.now
    if process.answers() == "starting":
        return 503, 0.001
    if engine.green:
        return 200, 0.001
    if not engine.can_step:
        return None, HEALTH_TIMEOUT_S
    if isinstance(engine, SimulatedPrefill):
        wait_s = engine.step_ends_at - now if engine.stepping else engine.machine.step_overhead_s
    else:
        wait_s = engine.step_s
    return (200, wait_s) if wait_s < HEALTH_TIMEOUT_S else (None, HEALTH_TIMEOUT_S)


def _router(router: SimulatedRouter, at: float, life: str) -> list[Observation]:
    name, responses = router.name, router.responses
    rows = [
        _row("router", name, v.WORKER_HEALTHY, at, router.healthy(worker), life, worker)
        for worker in router.active
    ]
    rows.append(_row("router", name, v.ROUTER_REQUESTS_TOTAL, at, router.requests, life))
    answered = sum(responses.values())
    rows.append(_row("router", name, v.ROUTER_RESPONSES_TOTAL, at, answered, life))
    for code, count in responses.items():
        rows.append(_row("router", name, v.ROUTER_RESPONSES_TOTAL, at, count, life, code))
    for worker, count in router.active.items():
        rows.append(_row("router", name, v.WORKER_ACTIVE_REQS, at, count, life, worker))
        shut = router.breaker_open(worker)
        rows.append(_row("router", name, v.WORKER_BREAKER_OPEN, at, shut, life, worker))
    fleet = router.fleet
    most = max(
        sum(router.active[worker] for worker in fleet.prefills),
        sum(router.active[worker] for worker in fleet.decodes),
    )
    rows.append(_row("router", name, v.ROUTER_ACTIVE_REQS, at, most, life))
    return rows


__all__ = ["Blind", "Look", "Sight"]

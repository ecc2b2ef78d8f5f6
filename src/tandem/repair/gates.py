"""Gates: what must be seen before the next step may begin, and what holds a gate that stays shut.

For: one look per kind of gate, each naming in a sentence what it saw.
Not for: acting on members (`steps.py`).
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tandem.ports import Clock, Completion, Hands, Progress
from tandem.records import Member, Observation, Role, Step
from tandem.records import vocabulary as v
from tandem.repair.log_tail import tail
from tandem.repair.waiting import LOOK_TIMEOUT_S, Look, until

SHORT_WORDS = 24
LONG_WORDS = 240
"""About 300 tokens: some transports move short prompts and lose long ones after a restart."""
GATE_OUTPUT_TOKENS = 2
UNSHOWN_TRIES = 3
"""How often a hand-off may complete without anything showing that KV moved."""
STILL_S = 1.0
"""Queues that keep their size this long, with nothing running, hold nothing that still moves."""

WORDS = (
    "river",
    "stone",
    "cloud",
    "lamp",
    "bread",
    "garden",
    "winter",
    "horse",
    "silver",
    "table",
    "music",
    "paper",
    "window",
    "morning",
    "yellow",
    "forest",
    "copper",
    "letter",
    "bridge",
    "candle",
)

QUEUES = (
    v.RUNNING_REQS,
    v.WAITING_REQS,
    v.BOOTSTRAP_QUEUE_REQS,
    v.INFLIGHT_QUEUE_REQS,
    v.PREALLOC_QUEUE_REQS,
    v.TRANSFER_QUEUE_REQS,
    v.RETRACTED_QUEUE_REQS,
)
HEALTH_TOKENS = 32
"""Health checks compute a token each: only more than a few are progress."""
FLOWS = (v.REQUESTS_TOTAL, v.TRANSFERS_TOTAL)


def fresh_prompt(words: int) -> str:
    """Random text that no prefix cache has seen, so that KV really has to move."""
    return " ".join(secrets.choice(WORDS) for _ in range(words))


@dataclass(slots=True)
class Gates:
    """The looks, over the hands of one deployment."""

    hands: Hands
    clock: Clock
    tell: Progress
    lives: dict[str, str] = field(default_factory=dict)
    """The life each started member should have; another or none ends the wait at once."""
    logs_begin: dict[str, int] = field(default_factory=dict)
    """Where in its log each started member's life begins, in bytes."""

    async def wait(self, step: Step) -> Look:
        """Wait for the step's gate, at most its timeout."""
        looks: dict[str, Callable[[], Callable[[float], Awaitable[Look]]]] = {
            "alive": lambda: self._alive(self._member(step.target)),
            "bootstrap": lambda: self._bootstrap(self._member(step.target)),
            "handoff": lambda: self._handoff(step.target),
            "routed": lambda: self._routed(self._member(step.target)),
            "drained": lambda: self._drained(step.target),
            "gone": lambda: self._gone(self._member(step.target)),
        }
        if step.gate == "none":
            return Look(passed=True, detail="nothing to wait for")
        return await until(
            looks[step.gate](),
            timeout_s=step.timeout_s,
            clock=self.clock,
            tell=self.tell,
            waiting_for=f"{step.target} ({step.gate})",
        )

    def _member(self, name: str) -> Member:
        member = self.hands.deployment.member(name)
        if member is None:
            raise LookupError(f"no member {name} in {self.hands.deployment.name}")
        return member

    def _members_of(self, target: str) -> list[Member]:
        return [self._member(name) for name in target.split(">")]

    async def died(self, member: Member) -> Look | None:
        """The look that ends a wait because the member's life ended, or None while it lives."""
        if member.supervisor not in self.hands.supervisors:
            return None
        supervisor = self.hands.supervisor(member)
        life = await supervisor.inspect(member)
        expected = self.lives.get(member.name)
        if life is not None and (expected is None or life.id == expected):
            return None
        log = supervisor.log_path(member)
        if life is not None:
            said = f"{member.name} ended and something else started it again ({life.name})"
        else:
            said = f"{member.name} died"
        said += tail(log, self.logs_begin.get(member.name, 0))
        return Look(passed=False, detail=said, final=True)

    def _alive(self, member: Member) -> Callable[[float], Awaitable[Look]]:
        async def look(left_s: float) -> Look:
            if dead := await self.died(member):
                return dead
            timeout_s = min(left_s, LOOK_TIMEOUT_S)
            if member.role is Role.ROUTER:
                ready = await self.hands.router(member).ready(member, timeout_s)
            else:
                ready = await self.hands.engine(member).ready(member, timeout_s)
            if ready:
                return Look(passed=True, detail=f"{member.name} answers and is ready")
            return Look(passed=False, detail=await self._not_ready(member, timeout_s))

        return look

    async def _not_ready(self, member: Member, timeout_s: float) -> str:
        """Why a member is not ready yet, in its own answers."""
        if member.role is not Role.ROUTER:
            seen = (await self.hands.engine(member).health(member, timeout_s)).observations
            return _first(seen, v.HEALTH_STATUS, member, "health")
        seen = (await self.hands.router(member).observe(member, timeout_s)).observations
        sick = [row.label for row in seen if row.name == v.WORKER_HEALTHY and row.value is not True]
        if sick:
            return f"{member.name} does not see {', '.join(sorted(sick))} as healthy"
        return _first(seen, v.ROUTER_REQUESTS_TOTAL, member, "it has no workers yet; requests")

    def _bootstrap(self, member: Member) -> Callable[[float], Awaitable[Look]]:
        async def look(left_s: float) -> Look:
            if dead := await self.died(member):
                return dead
            timeout_s = min(left_s, LOOK_TIMEOUT_S)
            engine = self.hands.engine(member)
            if not await engine.ready(member, timeout_s):
                return Look(passed=False, detail=await self._not_ready(member, timeout_s))
            if await engine.bootstrap_ready(member, timeout_s):
                return Look(passed=True, detail=f"the bootstrap of {member.name} has every rank")
            port = member.bootstrap_port
            return Look(
                passed=False, detail=f"the bootstrap of {member.name} (port {port}) lacks ranks"
            )

        return look

    def _handoff(self, target: str) -> Callable[[float], Awaitable[Look]]:
        prefill, decode = self._members_of(target)
        engine = self.hands.engine(prefill)
        unshown = 0

        async def look(left_s: float) -> Look:
            nonlocal unshown
            for member in (prefill, decode):
                if dead := await self.died(member):
                    return dead
            took_s: list[float] = []
            for size, words in (("short", SHORT_WORDS), ("long", LONG_WORDS)):
                answer = await engine.complete_direct(
                    prefill,
                    decode,
                    prompt=fresh_prompt(words),
                    output_tokens=GATE_OUTPUT_TOKENS,
                    timeout_s=left_s,
                )
                if answer.status != "completed":
                    return _refused(answer, f"a {size} hand-off over {target}")
                if answer.kv_moved is not True:
                    unshown += 1
                    return Look(
                        passed=False,
                        detail=f"a {size} request over {target} completed, but no counter and no "
                        "receiver shows that KV moved",
                        final=unshown >= UNSHOWN_TRIES,
                    )
                took_s.append(answer.latency_s)
            return Look(
                passed=True,
                detail=f"KV moved over {target}: short prompt {took_s[0]:.2f} s, "
                f"long prompt {took_s[1]:.2f} s",
            )

        return look

    def _routed(self, member: Member) -> Callable[[float], Awaitable[Look]]:
        router = self.hands.router(member)

        async def look(left_s: float) -> Look:
            if dead := await self.died(member):
                return dead
            answer = await router.complete(
                member,
                prompt=fresh_prompt(SHORT_WORDS),
                output_tokens=GATE_OUTPUT_TOKENS,
                timeout_s=left_s,
                chat=True,
            )
            if answer.status != "completed":
                return _refused(answer, f"a request through {member.name}")
            return Look(
                passed=True,
                detail=f"a request through {member.name} completed in {answer.latency_s:.2f} s",
            )

        return look

    def _gone(self, member: Member) -> Callable[[float], Awaitable[Look]]:
        supervisor = self.hands.supervisor(member)

        async def look(_left_s: float) -> Look:
            life = await supervisor.inspect(member)
            holders = [f"{member.name} runs ({life.name})"] if life is not None else []
            holders += await supervisor.residue(member)
            if holders:
                return Look(passed=False, detail=f"still held: {'; '.join(holders)}")
            return Look(
                passed=True, detail=f"process, ports and shared memory of {member.name} are gone"
            )

        return look

    def _drained(self, target: str) -> Callable[[float], Awaitable[Look]]:
        members = self._members_of(target)
        seen_first: list[tuple[tuple[float, ...], float]] = []

        async def look(left_s: float) -> Look:
            state: list[float] = []
            held = running = 0.0
            for member in members:
                timeout_s = min(left_s, LOOK_TIMEOUT_S)
                rows = (await self.hands.engine(member).observe(member, timeout_s)).observations
                numbers = {row.name: _number(row) for row in rows if not row.label}
                if member.role is Role.PREFILL:
                    # There it is the size of the last batch, and stays when all is over.
                    numbers.pop(v.RUNNING_REQS, None)
                held = max(held, sum(numbers.get(name, 0.0) for name in QUEUES))
                running += numbers.get(v.RUNNING_REQS, 0.0)
                state += [numbers.get(name, -1.0) for name in (*QUEUES, *FLOWS)]
                state.append(numbers.get(v.PROGRESS_TOKENS_TOTAL, 0.0) // HEALTH_TOKENS)
            if not held:
                return Look(passed=True, detail=f"nothing is in flight on {target}")
            if not seen_first or seen_first[-1][0] != tuple(state):
                seen_first.append((tuple(state), self.clock.now()))
            if not running and self.clock.now() - seen_first[-1][1] >= STILL_S:
                return Look(
                    passed=True, detail=f"{held:.0f} requests on {target} no longer move: lost"
                )
            return Look(passed=False, detail=f"{held:.0f} requests are in flight on {target}")

        return look


def _refused(answer: Completion, what: str) -> Look:
    """A request that failed may be tried again; one that hung holds a slot, so it may not."""
    detail = f": {answer.detail}" if answer.detail else ""
    if answer.status == "timed_out":
        return Look(passed=False, detail=f"{what} never completed{detail}", final=True)
    return Look(passed=False, detail=f"{what} failed{detail}", final=answer.refused)


def _number(row: Observation) -> float:
    return float(row.value) if isinstance(row.value, int | float) else 0.0


def _first(rows: Sequence[Observation], name: str, member: Member, what: str) -> str:
    seen = next((row for row in rows if row.name == name), None)
    if seen is None:
        return f"{member.name} does not answer yet ({member.url})"
    return f"{member.name}: {what} says {seen.missing or seen.value}"

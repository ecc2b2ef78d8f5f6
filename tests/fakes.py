"""A small deployment that exists only in memory: clock, supervisor, engine, router, journal.

For: tests of whatever acts through ports. Real small classes, no mocks: a `World` holds the state,
the fakes are its faces, and everything can be told to be slow, to die, to hang or to lie.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import WorldError
from tandem.ports import Completion, Hands, Harvest
from tandem.records import Deployment, Incarnation, Launch, Member, Observation, Role, Settings
from tandem.records import vocabulary as v


class Crash(BaseException):
    """The end of our process, as kill -9 makes it: nothing catches it."""


class FakeClock:
    """Virtual time: sleeping moves it, nothing waits."""

    def __init__(self, now=1_764_500_000.0):
        self.time = now

    def now(self):
        return self.time

    async def sleep(self, seconds):
        self.time += seconds
        await asyncio.sleep(0)


def deployment(prefills=1, decodes=1, routers=1, supervisor="fake"):
    """A deployment of that many members, all supervised by the fake."""
    members = [
        Member(
            name=f"prefill-{i}",
            role=Role.PREFILL,
            url=f"http://127.0.0.1:{25000 + i}",
            engine="sglang",
            bootstrap_port=25100 + i,
            supervisor=supervisor,
            launch=Launch(argv=("prefill",)),
        )
        for i in range(prefills)
    ]
    members += [
        Member(
            name=f"decode-{i}",
            role=Role.DECODE,
            url=f"http://127.0.0.1:{25200 + i}",
            engine="sglang",
            supervisor=supervisor,
            launch=Launch(argv=("decode",)),
        )
        for i in range(decodes)
    ]
    members += [
        Member(
            name="router" if not i else f"router-{i}",
            role=Role.ROUTER,
            url=f"http://127.0.0.1:{25300 + i}",
            engine="smg",
            supervisor=supervisor,
            launch=Launch(argv=("router",)),
        )
        for i in range(routers)
    ]
    return Deployment(name="test", members=tuple(members))


@dataclass
class World:
    """The state behind the fakes; `touch` counts every contact and can end us before or after."""

    deployment: Deployment
    clock: FakeClock = field(default_factory=FakeClock)
    lives: dict = field(default_factory=dict)
    history: list = field(default_factory=list)
    ready_after_s: dict = field(default_factory=dict)
    """Member to the seconds between its start and its readiness."""
    dies_after_s: dict = field(default_factory=dict)
    held: dict = field(default_factory=lambda: defaultdict(list))
    """Member to the sentences of its residue."""
    obstacles: dict = field(default_factory=lambda: defaultdict(list))
    """Member to the sentences of what would keep it from starting."""
    logs: dict = field(default_factory=dict)
    writes: dict = field(default_factory=dict)
    """What a member writes to its log once it is started."""
    undying: set = field(default_factory=set)
    unstartable: set = field(default_factory=set)
    answers: dict = field(default_factory=dict)
    """Path or router to the `Completion` it always gives, instead of an honest one."""
    counters: dict = field(default_factory=lambda: defaultdict(float))
    """(member, vocabulary name) to its number."""
    unseen: set = field(default_factory=set)
    """Vocabulary names that cannot be observed."""
    gaps: list | None = field(default_factory=lambda: [0.0])
    """What a re-scoring says of every output token; None when the engine cannot tell."""
    speak: object = None
    """`(prompt) -> text` of an answer; the default repeats nothing of the prompt."""
    born: int = 0
    touches: int = 0
    crash_at: int | None = None
    crash_after: bool = False

    def touch(self, what=None):
        """Make one contact with the world: note it, and crash where the test says so."""
        self.touches += 1
        crashing = self.touches == self.crash_at
        if crashing and not self.crash_after:
            raise Crash(what)
        return crashing

    def done(self, crashing):
        """End a contact: the effect has happened."""
        if crashing:
            raise Crash("after")

    def run(self, *names):
        """Let members run since long ago, in start order."""
        for name in names or [member.name for member in self.deployment.members]:
            self.spawn(name)
        self.clock.time += 3600.0

    def write_last_words(self, name):
        """Let a member write what it is to write to its log."""
        if name in self.writes:
            with Path(self.logs[name]).open("a") as log:
                log.write(self.writes[name])

    def spawn(self, name):
        """Begin a new life of a member."""
        self.born += 1
        self.clock.time += 0.01
        life = Incarnation(id=f"{name}#{self.born}", started_at=self.clock.now(), pid=self.born)
        self.lives[name] = life
        return life

    def life(self, name):
        """The present life, unless it has died meanwhile."""
        life = self.lives.get(name)
        died = self.dies_after_s.get(name)
        if life and died is not None and self.clock.now() - life.started_at >= died:
            del self.lives[name]
            return None
        return life

    def is_ready(self, name):
        """Whether a member lives and has come up."""
        life = self.life(name)
        wait_s = self.ready_after_s.get(name, 0.5)
        return life is not None and self.clock.now() - life.started_at >= wait_s

    def in_order(self, prefill, decode):
        """Whether this decode met only the present life of this prefill."""
        return self.lives[decode].started_at > self.lives[prefill].started_at

    def hands(self):
        """The hands on this world."""
        return Hands(
            deployment=self.deployment,
            engines={"sglang": FakeEngine(self)},
            routers={"smg": FakeRouter(self)},
            supervisors={"fake": FakeSupervisor(self)},
        )

    def settings(self, **fields):
        """Settings of this deployment."""
        return Settings(root=".", deployment=self.deployment, **fields)

    def observed(self, member, *names):
        """A harvest of counters, 0 where nothing was set."""
        rows = [
            Observation(
                source="metrics",
                subject=member.name,
                name=name,
                at=self.clock.now(),
                value=None if name in self.unseen else self.counters[member.name, name],
                missing="refused" if name in self.unseen else None,
            )
            for name in names
        ]
        return Harvest(observations=tuple(rows))


class FakeSupervisor:
    """Starts and stops members of the world."""

    name = "fake"

    def __init__(self, world):
        self.world = world

    async def start(self, member):
        crashing = self.world.touch("start")
        if member.name in self.world.unstartable:
            raise WorldError(f"{member.name} cannot be started.", next_step="Look at its log.")
        if self.world.life(member.name) is None:
            self.world.spawn(member.name)
            self.world.history.append(f"start {member.name}")
            self.world.write_last_words(member.name)
        self.world.done(crashing)
        await asyncio.sleep(0)
        return self.world.lives[member.name]

    async def stop(self, member, grace_s):
        crashing = self.world.touch("stop")
        if self.world.life(member.name) is not None:
            self.world.history.append(f"stop {member.name}")
            if member.name not in self.world.undying:
                del self.world.lives[member.name]
        await self.world.clock.sleep(0.1)
        self.world.done(crashing)

    async def inspect(self, member):
        return self.world.life(member.name)

    async def residue(self, member):
        return tuple(self.world.held[member.name])

    async def obstacles(self, member):
        return tuple(self.world.obstacles[member.name])

    def log_path(self, member):
        return self.world.logs.get(member.name)


class FakeEngine:
    """Speaks for the prefills and decodes of the world."""

    name = "sglang"

    def __init__(self, world):
        self.world = world

    async def observe(self, member, timeout_s):
        return self.world.observed(
            member,
            v.RUNNING_REQS,
            v.INFLIGHT_QUEUE_REQS,
            v.TRANSFER_QUEUE_REQS,
            v.REQUESTS_TOTAL,
            v.TRANSFERS_TOTAL,
            v.TRANSFER_FAILED_TOTAL,
        )

    async def health(self, member, timeout_s):
        value = 200 if self.world.is_ready(member.name) else None
        row = Observation(
            source="health",
            subject=member.name,
            name=v.HEALTH_STATUS,
            at=self.world.clock.now(),
            value=value,
            missing=None if value else "connection refused",
        )
        return Harvest(observations=(row,))

    async def ready(self, member, timeout_s):
        return self.world.is_ready(member.name)

    async def bootstrap_ready(self, member, timeout_s):
        return self.world.is_ready(member.name)

    async def complete_direct(self, prefill, decode, *, prompt, output_tokens, timeout_s):
        crashing = self.world.touch("handoff")
        path = f"{prefill.name}>{decode.name}"
        self.world.history.append(f"handoff {path} {len(prompt.split())}")
        await self.world.clock.sleep(0.05)
        answer = self.world.answers.get(path) or self._honest(prefill, decode, prompt)
        if answer.status == "timed_out":
            self.world.clock.time += answer.latency_s or timeout_s
        self.world.done(crashing)
        return answer

    def _honest(self, prefill, decode, prompt):
        for member in (prefill, decode):
            if not self.world.is_ready(member.name):
                return Completion(status="failed", detail=f"{member.name}: connection refused")
        if not self.world.in_order(prefill.name, decode.name):
            return Completion(status="timed_out", detail="no first token")
        return spoken(self.world, prefill, prompt)

    async def score(self, prefill, decode, *, prompt, output_ids, timeout_s):
        if self.world.gaps is None:
            return None
        return [self.world.gaps[i % len(self.world.gaps)] for i in range(len(output_ids))]


class FakeRouter:
    """Routes over the first cell that is up."""

    name = "smg"

    def __init__(self, world):
        self.world = world

    async def observe(self, member, timeout_s):
        rows = [
            Observation(
                source="router",
                subject=member.name,
                name=v.WORKER_HEALTHY,
                label=worker.name,
                at=self.world.clock.now(),
                value=self.world.is_ready(worker.name),
            )
            for worker in self.world.deployment.members
            if worker.role is not Role.ROUTER
        ]
        return Harvest(observations=tuple(rows))

    async def ready(self, member, timeout_s):
        return self.world.is_ready(member.name) and self._cell() is not None

    def _cell(self):
        return next(
            (
                cell
                for cell in self.world.deployment.cells()
                if self.world.is_ready(cell.prefill) and self.world.is_ready(cell.decode)
            ),
            None,
        )

    async def complete(self, member, *, prompt, output_tokens, timeout_s, chat):
        crashing = self.world.touch("routed")
        self.world.history.append(f"routed {member.name}")
        await self.world.clock.sleep(0.05)
        answer = self.world.answers.get(member.name) or self._honest(member, prompt)
        self.world.done(crashing)
        return answer

    def _honest(self, member, prompt):
        cell = self._cell() if self.world.is_ready(member.name) else None
        if cell is None:
            return Completion(status="failed", detail="503 no workers")
        if not self.world.in_order(cell.prefill, cell.decode):
            return Completion(status="timed_out", detail="no first token")
        return spoken(self.world, self.world.deployment.member(cell.prefill), prompt)


def spoken(world, prefill, prompt):
    """A completed answer whose hand-off is counted."""
    world.counters[prefill.name, v.TRANSFERS_TOTAL] += 1
    text = world.speak(prompt) if world.speak else " the answer is blue."
    return Completion(
        status="completed",
        text=text,
        token_ids=tuple(range(12)),
        latency_s=0.05,
        kv_moved=True,
        prompt_tokens=len(prompt.split()),
    )


class ListJournal:
    """A journal in memory; `world` lets it crash like everything else."""

    def __init__(self, world=None):
        self.world = world
        self.kept = []

    def records(self):
        return list(self.kept)

    def append(self, record):
        crashing = self.world.touch("journal") if self.world else False
        self.kept.append(record)
        if self.world:
            self.world.done(crashing)


class Listener(list):
    """Collects the sentences that were told."""

    def __call__(self, sentence):
        self.append(sentence)

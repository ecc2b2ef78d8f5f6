"""The ports of a simulated fleet: engine, router, supervisor, and the sources that look at it.

Code that takes `ports.Hands` or `ports.Source` runs over these unchanged, in virtual time.

For: `hands` and `sources`. Not for: the fleet itself (`fleet.py`).
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.collect import Recent
from tandem.collect.engine import EngineSource
from tandem.collect.health import HealthSource
from tandem.collect.incarnations import Incarnations
from tandem.collect.probe import probes
from tandem.collect.router import RouterSource
from tandem.ports import Completion, Hands, Harvest, Source
from tandem.records import Incarnation, Member, ProbeSettings, Role
from tandem.testing.fleet import Fleet
from tandem.testing.rooms import Room, Status
from tandem.testing.showing import Look, Sight

if TYPE_CHECKING:
    from collections.abc import Callable

HEALTH_EVERY_S = 2.0


class SimulatedEngine:
    """`ports.Engine` for every engine of one fleet."""

    name = "sglang"

    def __init__(self, sight: Sight) -> None:
        """Looks through `sight`."""
        self._sight = sight
        self._fleet = sight.fleet

    async def observe(self, member: Member, timeout_s: float) -> Harvest:
        """Metrics, loads and server information."""
        self._fleet.advance()
        return await _seen(self._sight.engine(member.name), timeout_s)

    async def health(self, member: Member, timeout_s: float) -> Harvest:
        """The health endpoint, and a prefill's rendezvous."""
        self._fleet.advance()
        return await _seen(self._sight.health(member.name), timeout_s)

    async def ready(self, member: Member, timeout_s: float) -> bool:
        """Whether `/health` would answer 200 in time."""
        self._fleet.advance()
        engine = self._fleet.engines[member.name]
        return engine.process.answers() == "yes" and (engine.green or engine.can_step)

    async def bootstrap_ready(self, member: Member, timeout_s: float) -> bool:
        """Whether the rendezvous answers."""
        self._fleet.advance()
        return self._fleet.engines[member.name].process.answers() in ("starting", "yes")

    async def complete_direct(
        self,
        prefill: Member,
        decode: Member,
        *,
        prompt: str | Sequence[int],
        output_tokens: int,
        timeout_s: float,
        ranks: tuple[int | None, int | None] = (None, None),
    ) -> Completion:
        """One request to both sides; given up, and aborted, when it takes too long."""
        fleet = self._fleet
        fleet.advance()
        size = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        waiting = _Waiting(fleet)
        room = fleet.room(
            fleet.prefill(prefill.name), fleet.decode(decode.name), size, output_tokens,
            waiting.ended_as,
        )  # fmt: skip
        fleet.send(room)
        status = await waiting.end(timeout_s, lambda: fleet.hang_up(room, "left"))
        return _completion(waiting, status, size, output_tokens, kv_moved=True)

    async def score(
        self,
        prefill: Member,
        decode: Member,
        *,
        prompt: str,
        output_ids: Sequence[int],
        timeout_s: float,
    ) -> list[float] | None:
        """What this engine says is what a clean prefill would say."""
        return [0.0] * len(output_ids)


class SimulatedRouterFace:
    """`ports.Router` for the router of one fleet."""

    name = "smg"

    def __init__(self, sight: Sight) -> None:
        """Looks through `sight`."""
        self._sight = sight
        self._fleet = sight.fleet

    async def observe(self, member: Member, timeout_s: float) -> Harvest:
        """Workers, breakers, requests, responses."""
        self._fleet.advance()
        return await _seen(self._sight.router(member.name), timeout_s)

    async def ready(self, member: Member, timeout_s: float) -> bool:
        """Whether it has a healthy pair."""
        self._fleet.advance()
        router = self._fleet.routers[member.name]
        return router.process.runs and router.pick() is not None

    async def complete(
        self, member: Member, *, prompt: str, output_tokens: int, timeout_s: float, chat: bool
    ) -> Completion:
        """One request through the router."""
        fleet = self._fleet
        fleet.advance()
        size = len(prompt.split())
        waiting = _Waiting(fleet)
        router = fleet.routers[member.name]
        router.submit(size, output_tokens, timeout_s, waiting.told)
        status = await waiting.end(timeout_s, lambda: None)
        return _completion(waiting, status, size, output_tokens, kv_moved=None)


class SimulatedSupervisor:
    """`ports.Supervisor` for every member of one fleet."""

    name = "simulated"

    def __init__(self, fleet: Fleet) -> None:
        """Starts and stops its members."""
        self._fleet = fleet

    async def start(self, member: Member) -> Incarnation:
        """Begin another life, unless one goes on."""
        self._fleet.advance()
        self._fleet.start(member.name)
        return self._life(member.name)

    async def stop(self, member: Member, grace_s: float) -> None:
        """End the life."""
        self._fleet.advance()
        self._fleet.stop(member.name)

    async def inspect(self, member: Member) -> Incarnation | None:
        """The present life."""
        self._fleet.advance()
        alive = self._fleet.member(member.name).process.alive
        return self._life(member.name) if alive else None

    def _life(self, name: str) -> Incarnation:
        process = self._fleet.member(name).process
        return Incarnation(id=process.life_id, started_at=process.started_at)

    async def residue(self, member: Member) -> tuple[str, ...]:
        """Nothing stays."""
        return ()

    async def obstacles(self, member: Member) -> tuple[str, ...]:
        """Nothing is in the way."""
        return ()

    def log_path(self, member: Member) -> str | None:
        """There is no log."""
        return None


class ProcessFace:
    """The process source of one member, which also says whose life the others see."""

    timeout_s = 5.0

    def __init__(self, sight: Sight, member: Member, incarnations: Incarnations) -> None:
        """Looks every second."""
        self.name = f"process:{member.name}"
        self.interval_s = 1.0
        self._sight = sight
        self._member = member
        self._incarnations = incarnations

    async def collect(self) -> Harvest:
        """Look once."""
        self._sight.fleet.advance()
        look = self._sight.process(self._member.name)
        self._incarnations.saw(self._member.name, _life(self._sight.fleet, self._member.name))
        return Harvest(tuple(look.rows))


def _life(fleet: Fleet, name: str) -> Incarnation | None:
    process = fleet.member(name).process
    if not process.alive:
        return None
    return Incarnation(id=process.life_id, started_at=process.started_at, pid=process.pid)


class FleetFace:
    """Every member in one source: the same rows as from one each, for a fraction of the cost.

    An answer that takes long comes with a later look, as the collect stage gathers it.
    """

    name = "fleet"
    timeout_s = 5.0

    def __init__(self, sight: Sight, incarnations: Incarnations, *, interval_s: float) -> None:
        """Looks every `interval_s`, at health half as often as at the rest."""
        self.interval_s = interval_s
        self._sight = sight
        self._incarnations = incarnations
        self._late: list[tuple[float, Look]] = []
        self._health_due: dict[str, float] = {}
        self._busy: dict[tuple[str, str], float] = {}
        members = sight.fleet.deployment.members
        self._members = [one.name for one in members]
        self._engines = [one.name for one in members if one.role is not Role.ROUTER]
        self._routers = [one.name for one in members if one.role is Role.ROUTER]

    async def collect(self) -> Harvest:
        """Look at everybody once."""
        fleet, sight = self._sight.fleet, self._sight
        fleet.advance()
        now = fleet.now
        found: list[Look] = []
        if self._late:
            found = [look for due, look in self._late if due <= now]
            self._late = [one for one in self._late if one[0] > now]
        for name in self._members:
            found.append(sight.process(name))
            self._incarnations.saw(name, _life(fleet, name))
        for name in self._engines:
            self._look(found, name, "engine", sight.engine)
            if now >= self._health_due.get(name, 0.0) - HEALTH_EVERY_S / 10:
                self._health_due[name] = now + HEALTH_EVERY_S
                self._look(found, name, "health", sight.health)
        for name in self._routers:
            self._look(found, name, "router", sight.router)
        return Harvest(
            tuple([row for look in found for row in look.rows]),
            tuple([trait for look in found for trait in look.traits]),
        )

    def _look(self, found: list[Look], name: str, what: str, look: "Callable[[str], Look]") -> None:
        now = self._sight.fleet.now
        if self._busy.get((name, what), 0.0) > now:
            return  # the look before has not ended
        seen = look(name)
        if seen.delay_s < 0.5:
            found.append(seen)
        else:
            self._busy[name, what] = now + seen.delay_s
            self._late.append((now + seen.delay_s, seen))


class _Waiting:
    """A client of the fleet who awaits the end of one request."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._began = fleet.now
        self._ended: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.ended_at = fleet.now

    def ended_as(self, _room: Room, status: Status) -> None:
        self.told(status)

    def told(self, status: Status) -> None:
        if not self._ended.done():
            self.ended_at = self._fleet.now
            self._ended.set_result(status)

    @property
    def latency_s(self) -> float:
        return self.ended_at - self._began

    async def end(self, timeout_s: float, give_up: "Callable[[], object]") -> Status | None:
        """How it ended; None when it did not in time. The fleet moves on meanwhile."""
        try:
            async with asyncio.timeout(timeout_s):
                pause_s = 0.05
                while not self._ended.done():
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.0, pause_s * 2)
                    self._fleet.advance()
        except (TimeoutError, asyncio.CancelledError) as error:
            self._fleet.advance()
            give_up()
            if isinstance(error, asyncio.CancelledError):
                raise
            return None
        return self._ended.result()


def _completion(
    waiting: _Waiting, status: Status | None, prompt_tokens: int, output_tokens: int,
    *, kv_moved: bool | None,
) -> Completion:  # fmt: skip
    if status == "completed":
        return Completion(
            status="completed",
            text=" the answer is blue.",
            token_ids=tuple(range(output_tokens)),
            latency_s=waiting.latency_s,
            kv_moved=kv_moved,
            prompt_tokens=prompt_tokens,
        )
    if status is None:
        return Completion(status="timed_out", detail="no answer in time")
    return Completion(status="failed", latency_s=waiting.latency_s, detail="answered HTTP 500")


async def _seen(look: Look, timeout_s: float) -> Harvest:
    if look.delay_s:
        await asyncio.sleep(min(look.delay_s, timeout_s))
    return Harvest(tuple(look.rows), look.traits)


def hands(sight: Sight) -> Hands:
    """What acts on the fleet."""
    return Hands(
        deployment=sight.fleet.deployment,
        engines={"sglang": SimulatedEngine(sight)},
        routers={"smg": SimulatedRouterFace(sight)},
        supervisors={"simulated": SimulatedSupervisor(sight.fleet)},
    )


def sources(
    sight: Sight,
    incarnations: Incarnations,
    recent: Recent,
    settings: ProbeSettings,
    *,
    interval_s: float = 1.0,
    together: bool = False,
) -> list[Source]:
    """The sources of a watch, with the real path probes; `together` makes the rest one source."""
    fleet, own = sight.fleet, hands(sight)
    found: list[Source] = []
    if together:
        found.append(FleetFace(sight, incarnations, interval_s=interval_s))
    else:
        for member in fleet.deployment.members:
            found.append(ProcessFace(sight, member, incarnations))
            if member.role is Role.ROUTER:
                router = own.routers["smg"]
                found.append(RouterSource(router, member, incarnations, interval_s=interval_s))
            else:
                engine = own.engines["sglang"]
                found.append(EngineSource(engine, member, incarnations, interval_s=interval_s))
                found.append(HealthSource(engine, member, incarnations))
    found += probes(
        fleet.deployment, own.engines, own.routers, settings, fleet.clock, incarnations,
        safety=recent.safety, recently_completed=recent.recently_completed,
        released=recent.released, page_tokens=recent.page_tokens,
        context_tokens=recent.context_tokens,
    )  # fmt: skip
    return found


__all__ = [
    "FleetFace",
    "ProcessFace",
    "SimulatedEngine",
    "SimulatedRouterFace",
    "SimulatedSupervisor",
    "hands",
    "sources",
]

"""The simulated fleet: prefills, decodes, a router and their clients, in one virtual time.

A seeded discrete-event model of a prefill/decode deployment. Nothing in it knows what a fault ought
to look like: requests move through queues, slots and steps as in the embedded engine, a mechanism
(`mechanisms.py`) changes one of these, and `showing.py` writes down what one would see.

For: days of watching, repair and fleets that no machine here could hold.
Not for: speed or accuracy of a real engine.
"""

import heapq
import random
from collections.abc import Callable, Mapping
from typing import Any

from tandem.records import Deployment, Launch, Member, Role
from tandem.testing.rooms import Machine, Room, Status
from tandem.testing.simulated_decode import SimulatedDecode
from tandem.testing.simulated_prefill import SimulatedPrefill
from tandem.testing.simulated_router import SimulatedRouter
from tandem.testing.virtual_time import VirtualClock

CHECKS_PER_S = 1.0
"""Health checks of an engine: a router's every 2 s, and ours."""
Engine = SimulatedPrefill | SimulatedDecode


def simulated_deployment(prefills: int = 1, decodes: int = 1, *, router: bool = True) -> Deployment:
    """A deployment of that shape, whose members nobody but a `Fleet` can start."""
    members = [
        *(_member(f"prefill-{at}", Role.PREFILL, 30000 + at, 8998 + at) for at in range(prefills)),
        *(_member(f"decode-{at}", Role.DECODE, 31000 + at) for at in range(decodes)),
    ]
    if router:
        members.append(_member("router", Role.ROUTER, 32000))
    return Deployment(name="simulated", members=tuple(members))


def _member(name: str, role: Role, port: int, bootstrap_port: int | None = None) -> Member:
    return Member(
        name=name,
        role=role,
        url=f"http://192.0.2.1:{port}",
        engine="smg" if role is Role.ROUTER else "sglang",
        bootstrap_port=bootstrap_port,
        supervisor="simulated",
        launch=Launch(argv=("simulated", role.value)),
    )


class Fleet:
    """One deployment; `advance` brings it up to the world time of its clock."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        seed: int = 0,
        prefills: int = 1,
        decodes: int = 1,
        router: bool = True,
        machine: Machine | None = None,
    ) -> None:
        """Everything is up since a day, idle, and healthy."""
        self.clock = clock
        self.chance = random.Random(seed)  # noqa: S311 - a seeded world
        self.seed = seed
        self.machine = machine or Machine()
        self.now = clock.world
        self.checks_per_s = CHECKS_PER_S
        self.deployment = simulated_deployment(prefills, decodes, router=router)
        self.down_since: dict[str, float] = {}
        self.completed_at = self.now
        """When the last request ended well."""
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._count = 0
        self._rooms = 0
        self._open: dict[int, Room] = {}
        self.prefills: dict[str, SimulatedPrefill] = {
            one.name: SimulatedPrefill(self, one.name, self.machine)
            for one in self.deployment.of(Role.PREFILL)
        }
        self.decodes: dict[str, SimulatedDecode] = {
            one.name: SimulatedDecode(self, one.name, self.machine)
            for one in self.deployment.of(Role.DECODE)
        }
        self.engines: Mapping[str, Engine] = {**self.prefills, **self.decodes}
        self.routers: dict[str, SimulatedRouter] = {
            one.name: SimulatedRouter(self, one.name) for one in self.deployment.of(Role.ROUTER)
        }
        self.router = next(iter(self.routers.values()), None)

    # Time.

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Let something happen so many seconds from now."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call, args))

    def advance(self) -> None:
        """Let everything happen that is due by the clock's world time."""
        until, events = self.clock.world, self._events
        while events and events[0][0] <= until:
            self.now, _, call, args = heapq.heappop(events)
            call(*args)
        self.now = max(self.now, until)

    # Members.

    def prefill(self, name: str) -> SimulatedPrefill:
        """The prefill of that name."""
        return self.prefills[name]

    def decode(self, name: str) -> SimulatedDecode:
        """The decode of that name."""
        return self.decodes[name]

    def member(self, name: str) -> Engine | SimulatedRouter:
        """The member of that name."""
        return self.engines.get(name) or self.routers[name]

    def pid_of(self, name: str, life: int) -> int:
        """The process id of one life of a member."""
        place = [one.name for one in self.deployment.members].index(name)
        return 1000 + 100 * place + life

    def stop(self, name: str, status: int = 0) -> None:
        """A member's process ends."""
        if self.member(name).process.alive:
            self.down_since.setdefault(name, self.now)
            self.member(name).stop(status)

    def start(self, name: str) -> None:
        """A stopped member's process begins another life."""
        member = self.member(name)
        if member.process.alive:
            return
        self.down_since.setdefault(name, self.now)
        member.start()
        up_s = member.process.ready_at - self.now
        self.after(up_s + 1.0, self._back, name, member.process.life)

    def restart(self, name: str, away_s: float = 1.0) -> None:
        """Stop a member, and start it a moment later."""
        self.stop(name)
        self.after(away_s, self.start, name)

    def _back(self, name: str, life: int) -> None:
        if self.member(name).process.life == life:
            self.down_since.pop(name, None)

    # Requests.

    def room(
        self,
        prefill: SimulatedPrefill,
        decode: SimulatedDecode,
        prompt_tokens: int,
        output_tokens: int,
        done: Callable[[Room, Status], None],
    ) -> Room:
        """A new request for a pair; `done` hears once how it ended."""
        self._rooms += 1
        identity = self.chance.getrandbits(62)

        def ended(room: Room, status: Status) -> None:
            self._open.pop(room.id, None)
            if status == "completed":
                self.completed_at = self.now
            self.hang_up_sides(room)
            done(room, status)

        room = Room(
            identity, prompt_tokens, output_tokens, prefill.name, decode.name, self.now, ended
        )
        self._open[identity] = room
        return room

    def send(self, room: Room) -> None:
        """Give a request to both sides at once; a side that refuses ends it."""
        sides = (self.decodes[room.decode], self.prefills[room.prefill])
        if any(side.process.answers() in ("refused", "starting") for side in sides):
            room.end("failed")
            return
        for side in sides:
            side.submit(room)
        if room.patience_s < 1e6:
            self.after(room.patience_s, self.hang_up, room, "left")

    def hang_up(self, room: Room, status: Status) -> None:
        """The client of a request goes away."""
        if not room.settled:
            room.end(status)

    def hang_up_sides(self, room: Room) -> None:
        """Nobody waits for this room: what still lives of it on either side is aborted."""
        decode, prefill = self.decodes[room.decode], self.prefills[room.prefill]
        if room.on_decode not in ("new", "ended") and decode.process.alive:
            decode.left(room)
        if room.on_prefill not in ("new", "ended") and prefill.process.alive:
            prefill.left(room)

    def routed_rooms(self) -> list[Room]:
        """The open requests that came through a router."""
        return [room for room in self._open.values() if room.routed]

    def open_rooms(self) -> list[Room]:
        """Every request whose client still waits."""
        return list(self._open.values())


__all__ = ["Fleet", "simulated_deployment"]

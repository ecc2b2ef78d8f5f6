"""A simulated PD router: picks a healthy pair at random, counts, and opens breakers.

Its words are those of the real one (`routers/smg.py`): `/health` is always 200, a hung request is
requests minus responses, an open breaker leaves the worker healthy.

For: `Fleet`. Not for: what is shown of it (`showing.py`).
"""

from typing import TYPE_CHECKING

from tandem.testing.rooms import Room, Status
from tandem.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from tandem.testing.fleet import Fleet
    from tandem.testing.simulated_decode import SimulatedDecode
    from tandem.testing.simulated_prefill import SimulatedPrefill

UNHEALTHY_S = 3.0
"""A worker that refuses this long is unhealthy; its checks come every second."""
HUNG_UNHEALTHY_S = 15.0
"""A worker that does not answer: three checks of five seconds."""
BREAKER_FAILURES = 5
BREAKER_OPEN_S = 30.0


class SimulatedRouter:
    """One router; counters are those of its present life."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        """Up, and it knows every engine."""
        self.fleet = fleet
        self.name = name
        self.process = SimulatedProcess(fleet, name)
        self.holds = False
        """Requests are taken and never sent on."""
        self.breaker_stuck = False
        """A breaker that is open never closes."""
        self._reset()

    def _reset(self) -> None:
        self.requests = 0
        self.responses: dict[str, int] = {}
        self.active: dict[str, int] = dict.fromkeys(self.fleet.engines, 0)
        self.failures: dict[str, int] = dict.fromkeys(self.fleet.engines, 0)
        self.open_until: dict[str, float] = {}
        self.held: dict[int, Callable[[Status], None]] = {}

    def breaker_open(self, worker: str) -> bool:
        """Whether nothing is sent to a worker."""
        until = self.open_until.get(worker)
        return until is not None and (self.breaker_stuck or self.fleet.now < until)

    def healthy(self, worker: str) -> bool:
        """What its health checks made of a worker."""
        engine = self.fleet.engines[worker]
        process, now = engine.process, self.fleet.now
        if not process.alive or now < process.ready_at:
            since = self.fleet.down_since.get(worker, process.started_at)
            return now - since < UNHEALTHY_S
        if engine.green:
            return True
        hung = engine.hung_since
        if process.stopped or engine.worker_dead:
            hung = self.fleet.down_since.get(worker, now)
        return hung is None or now - hung < HUNG_UNHEALTHY_S

    def pick(self) -> "tuple[SimulatedPrefill, SimulatedDecode] | None":
        """A healthy pair, or None."""
        fleet = self.fleet
        prefills = [one for one in fleet.prefills.values() if self._takes(one.name)]
        decodes = [one for one in fleet.decodes.values() if self._takes(one.name)]
        if not prefills or not decodes:
            return None
        if len(prefills) == 1 and len(decodes) == 1:
            return prefills[0], decodes[0]
        return fleet.chance.choice(prefills), fleet.chance.choice(decodes)

    def _takes(self, worker: str) -> bool:
        return not self.breaker_open(worker) and self.healthy(worker)

    def submit(
        self,
        prompt_tokens: int,
        output_tokens: int,
        patience_s: float,
        told: "Callable[[Status], None]",
    ) -> None:
        """A client's request; `told` hears once how it ended."""
        if not self.process.runs:
            told("failed")
            return
        self.requests += 1
        pair = None if self.holds else self.pick()
        if pair is None and not self.holds:
            self._respond("503")
            told("failed")
            return
        if pair is None:
            key = self.requests
            self.held[key] = told
            self.fleet.after(min(patience_s, 1e6), self._gave_up, key, self.process.life)
            return

        def done(room: Room, status: Status) -> None:
            self._done(room, status, life)
            told(status)

        life = self.process.life
        prefill, decode = pair
        room = self.fleet.room(prefill, decode, prompt_tokens, output_tokens, done)
        room.routed, room.patience_s = True, patience_s
        self.active[prefill.name] += 1
        self.active[decode.name] += 1
        self.fleet.send(room)

    def _gave_up(self, key: int, life: int) -> None:
        told = self.held.pop(key, None)
        if told is not None and life == self.process.life:
            self._respond("499")
            told("left")

    def _done(self, room: Room, status: Status, life: int) -> None:
        if life != self.process.life:
            return
        for worker in (room.prefill, room.decode):
            self.active[worker] -= 1
        self._respond({"completed": "200", "failed": "500", "left": "499"}[status])
        for worker in (room.prefill, room.decode):
            if status == "completed":
                self.failures[worker] = 0
            elif status == "failed":
                self.failures[worker] += 1
                if self.failures[worker] >= BREAKER_FAILURES:
                    self.failures[worker] = 0
                    self.open_until[worker] = self.fleet.now + BREAKER_OPEN_S

    def _respond(self, code: str) -> None:
        self.responses[code] = self.responses.get(code, 0) + 1

    def stop(self, status: int = 0) -> None:
        """The process ends: every client of it is cut off, and so are their rooms."""
        self.process.ended(status)
        for told in list(self.held.values()):
            told("failed")
        for room in self.fleet.routed_rooms():
            self.fleet.hang_up(room, "failed")
        self._reset()

    def start(self) -> None:
        """A new life."""
        self.process.began(0.5, 0.5)
        self._reset()


__all__ = ["SimulatedRouter"]

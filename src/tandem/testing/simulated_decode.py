"""A simulated decode: admission, hand-offs that arrive, and a batch that steps together.

The order of things is that of the embedded engine (`tandem_engine/decode.py`): a request waits in
prealloc until a place and cells are free, then for its KV, is imported between two steps, and runs.
The batch is a fluid: every sequence of it gets one token a step, so only joining and leaving are
events, however many tokens there are.

For: `Fleet`. Not for: what is shown of it (`showing.py`) or what breaks it (`mechanisms.py`).
"""

import heapq
from collections import deque
from typing import TYPE_CHECKING

from tandem.testing.rooms import Machine, Room
from tandem.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from tandem.testing.fleet import Fleet

METADATA_S = 0.002
NEARLY = 1e-3
"""Of a token: unix seconds are no finer than this allows."""


class SimulatedDecode:
    """One decode engine; counters are those of its present life."""

    def __init__(self, fleet: "Fleet", name: str, machine: Machine) -> None:
        """Up, idle, and never restarted."""
        self.fleet = fleet
        self.name = name
        self.machine = machine
        self.process = SimulatedProcess(fleet, name)
        self.hang = ""
        """What a step does that does not return: blocks, spins; empty is none."""
        self.worker_dead = False
        self.green = False
        self.blocks_arrivals = False
        """Cells are out, and what was retracted waits for what has arrived (kv_exhaustion)."""
        self.leaks_slot_every = 0
        self.loses_reply_every = 0
        self.slow = 1.0
        """How much longer its steps take."""
        self._reset()
        self._cold = False

    def _reset(self) -> None:
        self.prealloc: dict[int, Room] = {}
        self.transfer: dict[int, Room] = {}
        self.arrived: deque[Room] = deque()
        self.retracted: list[Room] = []
        self.running: dict[int, Room] = {}
        self._ends: list[tuple[float, int, Room]] = []
        self._v = 0.0
        self._v_at = self.fleet.now
        self._plan = 0
        self.cells = 0
        self.leaked = 0
        self.hung_since: float | None = None
        self.idle_s, self._idle_at = 0.0, self.fleet.now
        self.progress_tokens = 0.0
        self.steps = 0.0
        self.requests = self.prompt_tokens = self.generated_tokens = self.aborted = 0
        self.transfer_failed = self.bootstrap_failed = 0
        self.gauges: tuple[int, ...] = (0, 0, 0, 0)
        self.gauges_at = self.fleet.now
        self._gauge_steps = 0.0
        self._cold = True
        self._leak_slot = self._lost = 0

    # Requests.

    def submit(self, room: Room) -> None:
        """A client's request reaches it."""
        room.on_decode = "prealloc"
        room.decode_life = self.process.life
        self.prealloc[room.id] = room
        self.admit()

    def admit(self) -> None:
        """Reserve what each request needs, first come, first served, and tell its prefill."""
        if not self.can_step or self.retracted:
            return
        while self.prealloc:
            coming = len(self.transfer) + len(self.running)
            if coming + self.leaked >= self.machine.max_running:
                return
            room = next(iter(self.prealloc.values()))
            cells = self._cells(room)
            if self.cells + cells > self.machine.kv_cells:
                return
            del self.prealloc[room.id]
            self.cells += cells
            room.on_decode = "transfer"
            room.admitted_at = self.fleet.now
            self.transfer[room.id] = room
            prefill = self.fleet.prefill(room.prefill)
            self.fleet.after(METADATA_S, prefill.metadata, room)
            self.fleet.after(
                self.machine.waiting_timeout_s, self._waited_too_long, room, self.process.life
            )

    def _cells(self, room: Room) -> int:
        return room.prompt_tokens + min(room.output_tokens, self.machine.reserved_tokens)

    def _waited_too_long(self, room: Room, life: int) -> None:
        if life == self.process.life and room.on_decode == "transfer" and not self.worker_dead:
            self.fail(room)

    def landed(self, room: Room, life: int) -> None:
        """The KV of a room is here."""
        if life != self.process.life or not self.process.alive or room.on_decode != "transfer":
            return
        self.arrived.append(room)
        self.take_over()

    def take_over(self) -> None:
        """Import what has arrived, acknowledge it, and let it run."""
        while self.arrived and self.can_step and not self.blocks_arrivals:
            room = self.arrived.popleft()
            if room.on_decode != "transfer":
                continue
            del self.transfer[room.id]
            room.on_decode = "running"
            room.first_token_at = self.fleet.now
            self.fleet.prefill(room.prefill).acknowledged(room)
            self._leak_slot += 1
            if self.leaks_slot_every and self._leak_slot % self.leaks_slot_every == 0:
                self.leaked += 1
            self._flow()
            self.running[room.id] = room
            wait = max(1, room.output_tokens - 1)
            if self._cold:
                self._cold = False
                wait += int(self.machine.compile_s / self.machine.decode_step_s)
            room.ends_at_v = self._v + wait
            heapq.heappush(self._ends, (room.ends_at_v, room.id, room))
            self._next()

    def left(self, room: Room) -> None:
        """The client of a room hung up."""
        if room.on_decode in ("new", "ended"):
            return
        self.aborted += 1
        self.drop(room)

    def fail(self, room: Room) -> None:
        """A room ends without success."""
        if room.on_decode in ("new", "ended"):
            return
        self.heard_failed(room)
        self.fleet.prefill(room.prefill).heard_failed(room)
        room.end("failed")

    def heard_failed(self, room: Room) -> None:
        """This side of a room ends without success."""
        if room.on_decode in ("new", "ended") or not self.process.alive:
            return
        if room.on_decode == "prealloc":
            self.bootstrap_failed += 1
        else:
            self.transfer_failed += 1
        self.drop(room)

    def prefill_lost(self, room: Room) -> None:
        """The prefill of a room is gone."""
        if room.on_decode in ("prealloc", "transfer") and self.process.alive:
            self.fail(room)

    def drop(self, room: Room) -> None:
        """Forget a room and free what it holds."""
        phase, room.on_decode = room.on_decode, "ended"
        if phase == "prealloc":
            self.prealloc.pop(room.id, None)
        elif phase == "transfer":
            self.transfer.pop(room.id, None)
        elif phase == "running":
            self._flow()
            self.running.pop(room.id, None)
            self._next()
        elif phase == "retracted":
            self.retracted.remove(room)
        if phase != "prealloc":
            self.cells -= self._cells(room)
        self.admit()

    # The batch.

    @property
    def step_s(self) -> float:
        """Seconds of one step of the present batch."""
        machine = self.machine
        base = machine.decode_step_s + len(self.running) * machine.decode_per_sequence_s
        return base * self.slow

    def _flow(self) -> None:
        """Bring the batch up to now: one token a step for each sequence."""
        now = self.fleet.now
        if self.running and self.can_step:
            steps = (now - self._v_at) / self.step_s
            self._v += steps
            self.steps += steps
            self.progress_tokens += steps * len(self.running)
            if self.steps - self._gauge_steps >= self.machine.decode_log_steps:
                self._gauge_steps = self.steps
                self.write_gauges()
        elif not self.running and self.process.runs:
            self.idle_s += now - max(self._idle_at, self.process.ready_at)
        self._idle_at = self._v_at = now

    def _next(self) -> None:
        """Plan the next end of a sequence."""
        self._plan += 1
        while self._ends and self._ends[0][2].on_decode != "running":
            heapq.heappop(self._ends)
        self.process.busy(cores=bool(self.running) and self.hung_since is None)
        if self._ends and self.can_step:
            wait_s = max(0.0, self._ends[0][0] - self._v) * self.step_s
            self.fleet.after(wait_s, self._stepped, self._plan)

    def _stepped(self, plan: int) -> None:
        if plan != self._plan or not self.can_step:
            return
        self._flow()
        while self._ends and self._ends[0][0] <= self._v + NEARLY:
            room = heapq.heappop(self._ends)[2]
            if room.on_decode == "running":
                self._finish(room)
        self._next()
        self.take_over()
        self.admit()

    def _finish(self, room: Room) -> None:
        del self.running[room.id]
        room.on_decode = "ended"
        self.cells -= self._cells(room)
        self._lost += 1
        if self.loses_reply_every and self._lost % self.loses_reply_every == 0:
            return
        self.requests += 1
        self.prompt_tokens += room.prompt_tokens
        self.generated_tokens += room.output_tokens
        room.end("completed")

    # What breaks and heals.

    def halt(self) -> None:
        """From now on no step returns, or the process is held: the batch stands still."""
        self._flow()
        self._plan += 1

    def hold(self, how: str) -> None:
        """The next step does not return."""
        self._flow()
        self.hang, self.hung_since = how, self.fleet.now
        self._plan += 1
        self.process.busy(cores=how == "spins")

    def retract_all(self) -> None:
        """Cells are out: what runs is pushed out, and what has arrived is not taken over."""
        self._flow()
        self.blocks_arrivals = True
        for room in list(self.running.values())[:1]:
            del self.running[room.id]
            room.on_decode = "retracted"
            self.retracted.append(room)
        self._next()

    def let_go(self) -> None:
        """Steps return again, and whatever waited for them goes on."""
        self._v_at = self.fleet.now
        self.hang, self.hung_since, self.blocks_arrivals = "", None, False
        for room in self.retracted:
            room.on_decode = "running"
            self.running[room.id] = room
            heapq.heappush(self._ends, (max(room.ends_at_v, self._v + 1), room.id, room))
        self.retracted.clear()
        self._next()
        self.take_over()
        self.admit()

    @property
    def can_step(self) -> bool:
        """Whether steps return."""
        return self.process.runs and self.hung_since is None and not self.worker_dead

    # What it says of itself.

    def tokens(self) -> int:
        """The progress counter: what was decoded, and one token for each check while idle."""
        self._flow()
        checks = 0.0 if self.green or self.worker_dead else self.idle_s
        return int(self.progress_tokens + checks * self.fleet.checks_per_s)

    def write_gauges(self) -> None:
        """Every so many steps, and when fully idle: what the metrics page shows of the queues."""
        self.gauges = (
            len(self.running),
            len(self.prealloc),
            len(self.transfer),
            len(self.retracted),
        )
        self.gauges_at = self.fleet.now

    @property
    def idle(self) -> bool:
        """Nothing is held and nothing runs."""
        return not (self.prealloc or self.transfer or self.running or self.retracted)

    # Lives.

    def stop(self, status: int = 0) -> None:
        """The process ends; everything it held is gone, and its clients see it."""
        held = [
            *self.prealloc.values(),
            *self.transfer.values(),
            *self.running.values(),
            *self.retracted,
        ]
        life = self.process.life
        self.process.ended(status)
        self._reset()
        for room in held:
            room.on_decode = "ended"
        for prefill in self.fleet.prefills.values():
            prefill.decode_died(self.name, life)
        for room in held:
            room.end("failed")

    def start(self) -> None:
        """A new life."""
        self.process.began(self.machine.load_s, self.machine.warm_s)
        self._reset()


__all__ = ["SimulatedDecode"]

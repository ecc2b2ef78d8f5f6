"""A simulated prefill: queues, slots, chunked steps, and rooms that wait for their acknowledgement.

The order of things is that of the embedded engine (`tandem_engine/prefill.py`, `handoffs.py`): a
room waits in bootstrap for its decode's metadata and a slot, then to be computed in chunks, is
posted, and keeps its slot until the decode acknowledges. Health checks are requests of one token.

For: `Fleet`. Not for: what is shown of it (`showing.py`) or what breaks it (`mechanisms.py`).
"""

from collections import deque
from typing import TYPE_CHECKING

from tandem.testing.rooms import Machine, Room
from tandem.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from tandem.testing.fleet import Fleet

HASH = 0x9E3779B97F4A7C15


class SimulatedPrefill:
    """One prefill engine; counters are those of its present life."""

    def __init__(self, fleet: "Fleet", name: str, machine: Machine) -> None:
        """Up, idle, and never restarted."""
        self.fleet = fleet
        self.name = name
        self.machine = machine
        self.process = SimulatedProcess(fleet, name)
        self.memory = "leases"
        """What it remembers of decodes: `leases`, `stale` or `orphaned` (tandem_engine/peers.py)"""
        self.deaf = False
        """Nothing that a decode says is heard (abort_kills_bootstrap)."""
        self.drops = 0.0
        """Share of rooms that are posted and never arrive."""
        self.drops_to: frozenset[str] = frozenset()
        """The decodes this happens to; empty is all."""
        self.stalls = False
        """A dropped room is never given up either (handoff_stalls)."""
        self.fails_from_tokens = 0
        self.link_bytes_per_s = 0.0
        """A slow link, 0 is the machine's."""
        self.leaks_slot_every = 0
        self.leaks_room_every = 0
        self.hang = ""
        """What a step does that does not return: blocks, spins; empty is none."""
        self.hang_from_tokens = 1
        self.worker_dead = False
        self.green = False
        """Health answers 200 whatever happens (health=always_green)."""
        self.known_lives: dict[str, list[int]] = {}
        self._lane_free_at: dict[str, float] = {}
        self._reset()
        self._cold = False

    def _reset(self) -> None:
        self.bootstrap: dict[int, Room] = {}
        self.ready: deque[Room] = deque()
        self.waiting: deque[Room] = deque()
        self.running: list[Room] = []
        self.inflight: dict[int, Room] = {}
        self.slots = 0
        self.leaked_rooms = 0
        self.stepping = False
        self.hung_since: float | None = None
        self.batch_shown = 0
        self.gauges: tuple[int, ...] = (0, 0, 0)
        self.gauges_at = self.fleet.now
        self.step_ends_at = 0.0
        self.idle_s, self._idle_at = 0.0, self.fleet.now
        self.progress_tokens = 0.0
        self.requests = self.prompt_tokens = self.transfers = self.aborted = 0
        self.transfer_s = 0.0
        self.transfer_failed = self.bootstrap_failed = 0
        self.ttfts: deque[float] = deque(maxlen=400)
        self._cold = True
        self._ttft_of, self._ttft_p99_s = 0, 0.0
        self._leak_slot = self._leak_room = 0

    # Requests.

    def submit(self, room: Room) -> None:
        """A client's request reaches it."""
        room.on_prefill = "bootstrap"
        self.bootstrap[room.id] = room
        self.fleet.after(
            self.machine.bootstrap_timeout_s, self._bootstrap_timed_out, room, self.process.life
        )

    def metadata(self, room: Room) -> None:
        """The decode says where the KV of a room goes."""
        if self.deaf or room.on_prefill != "bootstrap" or not self.process.alive:
            return
        lives = self.known_lives.setdefault(room.decode, [])
        if room.decode_life not in lives:
            lives.append(room.decode_life)
        room.agent = room.decode_life
        if self.memory == "stale" and len(lives) > 1:
            spread = (room.id * HASH & 0xFFFFFFFFFFFFFFFF) >> 32
            room.agent = lives[spread % len(lives)]
        self.ready.append(room)
        self.turn()

    def left(self, room: Room) -> None:
        """The client of a room hung up; what is pinned stays."""
        if room.on_prefill in ("new", "ended"):
            return
        self.aborted += 1
        if self._pinned(room):
            self.transfer_failed += 1
            return
        self.drop(room)

    def _pinned(self, room: Room) -> bool:
        holds = room.on_prefill in ("waiting", "prefilling", "inflight")
        return holds and (self.memory != "leases" or (self.stalls and room.written_at > 0))

    def fail(self, room: Room) -> None:
        """A room ends without success."""
        if room.on_prefill in ("new", "ended"):
            return
        self.heard_failed(room)
        self.fleet.decode(room.decode).heard_failed(room)
        room.end("failed")

    def heard_failed(self, room: Room) -> None:
        """This side of a room ends without success; what is pinned stays."""
        if room.on_prefill in ("new", "ended") or not self.process.alive or self._pinned(room):
            return
        if room.on_prefill == "bootstrap":
            self.bootstrap_failed += 1
        else:
            self.transfer_failed += 1
        self.drop(room)

    def drop(self, room: Room) -> None:
        """Forget a room and free what it holds."""
        phase, room.on_prefill = room.on_prefill, "ended"
        if phase == "bootstrap":
            self.bootstrap.pop(room.id, None)
            if room in self.ready:
                self.ready.remove(room)
        elif phase == "waiting":
            self.waiting.remove(room)
        elif phase == "prefilling" and room in self.running and not self.stepping:
            self.running.remove(room)
        self.inflight.pop(room.id, None)
        if phase in ("waiting", "prefilling", "inflight"):
            self.slots -= 1
        self.turn()

    def decode_died(self, decode: str, life: int) -> None:
        """The connection of a decode closed: under leases its rooms fail."""
        if self.memory != "leases":
            return
        held = [*self.ready, *self.waiting, *self.running, *self.inflight.values()]
        for room in held:
            if room.decode == decode and room.decode_life == life:
                self.fail(room)

    def _bootstrap_timed_out(self, room: Room, life: int) -> None:
        if life == self.process.life and room.on_prefill == "bootstrap" and room not in self.ready:
            self.fail(room)

    # Steps.

    def turn(self) -> None:
        """Give out slots, and begin a step when none runs."""
        if not self.process.runs or self.worker_dead:
            return
        while self.ready and self.slots < self.machine.max_inflight:
            room = self.ready.popleft()
            del self.bootstrap[room.id]
            self.slots += 1
            room.on_prefill = "waiting"
            self.waiting.append(room)
        if not self.stepping:
            self._step()

    def _step(self) -> None:
        machine, room_left = self.machine, self.machine.chunk_tokens
        self.running = [room for room in self.running if room.on_prefill == "prefilling"]
        fed: list[tuple[Room, int]] = []
        for room in self.running:
            size = min(machine.chunk_tokens, room.prompt_tokens - room.computed)
            if 0 < size <= room_left:
                fed.append((room, size))
                room_left -= size
        while self.waiting and room_left > 0 and len(self.running) < machine.max_running:
            room = self.waiting[0]
            size = min(machine.chunk_tokens, room.prompt_tokens)
            if size > room_left:
                break
            self.waiting.popleft()
            room.on_prefill = "prefilling"
            self.running.append(room)
            fed.append((room, size))
            room_left -= size
        if not fed:
            return
        self._idles(now_idle=False)
        self.stepping = True
        longest = max(room.computed + size for room, size in fed)
        if self.hang and longest >= self.hang_from_tokens:
            self.hung_since = self.fleet.now
            self.process.busy(cores=self.hang == "spins")
            return
        self.process.busy(cores=True)
        tokens = machine.chunk_tokens - room_left
        took_s = machine.step_overhead_s + tokens / machine.prefill_tokens_per_s
        if self._cold:
            took_s += machine.compile_s
            self._cold = False
        self.step_ends_at = self.fleet.now + took_s
        self.fleet.after(took_s, self._stepped, fed, self.process.life)

    def _stepped(self, fed: list[tuple[Room, int]], life: int) -> None:
        if life != self.process.life or not self.process.alive:
            return
        if self.process.stopped or self.worker_dead:
            # It goes on where it was once it is let go on.
            self.fleet.after(0.5, self._stepped, fed, life)
            return
        self.stepping = False
        self._idles(now_idle=True)
        self.process.busy(cores=False)
        self.batch_shown = len(fed)
        for room, size in fed:
            self.progress_tokens += size
            room.computed += size
            if room.on_prefill == "prefilling" and room.computed >= room.prompt_tokens:
                self.running.remove(room)
                self._post(room)
        self.write_gauges()
        self.turn()

    def let_go(self) -> None:
        """A step that hung returns; a process that was stopped goes on."""
        if self.hung_since is not None:
            self.hung_since = None
            self.stepping = False
            self._idles(now_idle=True)
            self.process.busy(cores=False)
        self.turn()

    # Hand-offs.

    def _post(self, room: Room) -> None:
        now = self.fleet.now
        if 0 < self.fails_from_tokens <= room.prompt_tokens:
            self.fail(room)
            return
        room.on_prefill = "inflight"
        room.written_at = now
        self.inflight[room.id] = room
        decode = self.fleet.decode(room.decode)
        if room.agent != decode.process.life or not decode.process.alive:
            if self.memory == "leases":
                self.fail(room)
            return  # written to the memory of a dead decode: nobody will ever say that it came
        aimed = not self.drops_to or room.decode in self.drops_to
        if aimed and self.drops and self.fleet.chance.random() < self.drops:
            return
        size_bytes = room.prompt_tokens * self.machine.kv_bytes_per_token
        rate = self.link_bytes_per_s or self.machine.link_bytes_per_s
        begin = max(now, self._lane_free_at.get(room.decode, 0.0))
        lands_at = begin + size_bytes / rate + self.machine.link_latency_s
        if self.link_bytes_per_s:
            self._lane_free_at[room.decode] = lands_at
        self.fleet.after(lands_at - now, decode.landed, room, decode.process.life)

    def acknowledged(self, room: Room) -> None:
        """The decode has the KV: the slot is free, and the prefill's half is answered."""
        if room.on_prefill != "inflight" or not self.process.alive:
            return
        now = self.fleet.now
        self.transfers += 1
        self.transfer_s += now - room.written_at
        self.requests += 1
        self.prompt_tokens += room.prompt_tokens
        self.ttfts.append(now - room.arrived_at)
        room.on_prefill = "ended"
        self._leak_room += 1
        if self.leaks_room_every and self._leak_room % self.leaks_room_every == 0:
            self.leaked_rooms += 1
        self.inflight.pop(room.id, None)
        self._leak_slot += 1
        if not (self.leaks_slot_every and self._leak_slot % self.leaks_slot_every == 0):
            self.slots -= 1
        self.turn()

    # What it says of itself.

    def write_gauges(self) -> None:
        """After a batch, and when fully idle: what the metrics page shows of the queues."""
        self.gauges = (len(self.waiting), len(self.bootstrap), self.shown_inflight)
        self.gauges_at = self.fleet.now

    def ttft_p99_s(self) -> float:
        """Of the last hand-offs; worked out anew now and then, as it moves slowly."""
        if self.transfers - self._ttft_of > 20 or not self._ttft_of:
            self._ttft_of = self.transfers
            ordered = sorted(self.ttfts)
            self._ttft_p99_s = ordered[int(0.99 * (len(ordered) - 1))]
        return self._ttft_p99_s

    @property
    def shown_inflight(self) -> int:
        """The inflight queue as counted, leaked names included."""
        return len(self.inflight) + self.leaked_rooms

    @property
    def idle(self) -> bool:
        """Nothing is held and nothing runs."""
        return not (self.stepping or self.bootstrap or self.waiting or self.inflight)

    def _idles(self, *, now_idle: bool) -> None:
        """Account for the time in which health checks are steps of their own."""
        if not self.stepping and self.process.runs:
            self.idle_s += self.fleet.now - max(self._idle_at, self.process.ready_at)
        self._idle_at = self.fleet.now

    def tokens(self) -> int:
        """The progress counter: what was computed, and one token for each check while idle."""
        self._idles(now_idle=not self.stepping)
        checks = 0.0 if self.green or self.worker_dead else self.idle_s
        return int(self.progress_tokens + checks * self.fleet.checks_per_s)

    @property
    def can_step(self) -> bool:
        """Whether a health check would be computed within moments."""
        return self.process.runs and self.hung_since is None and not self.worker_dead

    # Lives.

    def stop(self, status: int = 0) -> None:
        """The process ends; everything it held is gone, and its clients see it."""
        held = [*self.bootstrap.values(), *self.waiting, *self.running, *self.inflight.values()]
        self.process.ended(status)
        for room in held:
            room.on_prefill = "ended"
            self.fleet.decode(room.decode).prefill_lost(room)
            room.end("failed")
        self._reset()

    def start(self) -> None:
        """A new life, which knows nothing of the one before."""
        self.process.began(self.machine.load_s, self.machine.warm_s)
        self.known_lives.clear()
        self._lane_free_at.clear()
        self._reset()


__all__ = ["SimulatedPrefill"]

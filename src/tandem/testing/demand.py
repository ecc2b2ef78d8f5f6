"""The clients of a simulated fleet: seeded arrivals, from none at all to twice what it can serve.

For: what comes in, when, how long, and how patient it is. Not for: what becomes of it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.testing.fleet import Fleet
    from tandem.testing.rooms import Status

MEAN_PROMPT_TOKENS = 400.0
PROMPT_TOKENS_MAX = 8_000


@dataclass(frozen=True, slots=True)
class Demand:
    """One kind of demand; `load` is a share of what the fleet can serve, 0 is none."""

    name: str
    load: float
    mean_prompt_tokens: float = MEAN_PROMPT_TOKENS
    mean_output_tokens: float = 40.0
    long_share: float = 0.0
    """Share of prompts that take `long_s` to compute."""
    long_s: float = 0.0
    burst_every_s: float = 0.0
    """Arrivals come in bunches, this far apart on average; 0 is one by one."""
    patience_s: float = 120.0


IDLE = Demand("idle", 0.0)
LIGHT = Demand("light", 0.1)
STEADY = Demand("steady", 0.5)
BURSTS = Demand("bursts", 0.4, burst_every_s=20.0)
SATURATED = Demand("saturated", 0.95)
OVERLOAD = Demand("overload", 2.0, patience_s=60.0)
LONG_PREFILL = Demand("long-prefill", 0.2, long_share=0.05, long_s=45.0, patience_s=600.0)
CALM = (IDLE, LIGHT, STEADY, BURSTS, SATURATED, OVERLOAD, LONG_PREFILL)


class Clients:
    """Sends what a demand asks for, until told another one."""

    def __init__(self, fleet: "Fleet") -> None:
        """Nothing is asked yet."""
        self._fleet = fleet
        self._turn = 0
        self.demand = IDLE
        self.sent = 0
        self.ended: dict[Status, int] = {"completed": 0, "failed": 0, "left": 0}

    def ask(self, demand: Demand) -> None:
        """From now on this."""
        self._turn += 1
        self.demand = demand
        if demand.load > 0:
            self._wait(self._turn)

    def rate_per_s(self) -> float:
        """Requests a second of the present demand."""
        machine, demand = self._fleet.machine, self.demand
        # A prompt shares steps with others, so that the overhead of one is a fraction of a step's.
        per_prefill = machine.prefill_tokens_per_s * 0.9 / demand.mean_prompt_tokens
        step_s = machine.decode_step_s + machine.max_running * machine.decode_per_sequence_s
        per_decode = machine.max_running / (demand.mean_output_tokens * step_s)
        fleet = self._fleet
        most = min(per_prefill * len(fleet.prefills), per_decode * len(fleet.decodes))
        share = 1.0
        if demand.long_share:
            longs = demand.long_s * machine.prefill_tokens_per_s * demand.long_share
            share = demand.mean_prompt_tokens / (demand.mean_prompt_tokens + longs)
        return most * demand.load * share

    def _wait(self, turn: int) -> None:
        fleet, demand = self._fleet, self.demand
        if demand.burst_every_s:
            wait_s = fleet.chance.expovariate(1.0 / demand.burst_every_s)
        else:
            wait_s = fleet.chance.expovariate(self.rate_per_s())
        fleet.after(wait_s, self._arrive, turn)

    def _arrive(self, turn: int) -> None:
        if turn != self._turn:
            return
        count = 1
        if self.demand.burst_every_s:
            count = 1 + int(self.rate_per_s() * self.demand.burst_every_s * 1.5)
        for _ in range(count):
            self.send_one()
        self._wait(turn)

    def send_one(self) -> None:
        """One request, through the router when there is one."""
        fleet, demand = self._fleet, self.demand
        chance = fleet.chance
        size = 1 + int(chance.gammavariate(1.5, demand.mean_prompt_tokens / 1.5))
        size = min(size, PROMPT_TOKENS_MAX)
        if demand.long_share and chance.random() < demand.long_share:
            size = int(
                demand.long_s * chance.uniform(0.7, 2.0) * fleet.machine.prefill_tokens_per_s
            )
        output = 1 + int(chance.expovariate(1.0 / demand.mean_output_tokens))
        self.sent += 1
        if fleet.router is not None:
            fleet.router.submit(size, output, demand.patience_s, self._told)
            return
        prefill = chance.choice(list(fleet.prefills.values()))
        decode = chance.choice(list(fleet.decodes.values()))
        room = fleet.room(prefill, decode, size, output, lambda _, status: self._told(status))
        room.patience_s = demand.patience_s
        fleet.send(room)

    def _told(self, status: "Status") -> None:
        self.ended[status] += 1


__all__ = [
    "BURSTS",
    "CALM",
    "IDLE",
    "LIGHT",
    "LONG_PREFILL",
    "OVERLOAD",
    "SATURATED",
    "STEADY",
    "Clients",
    "Demand",
]

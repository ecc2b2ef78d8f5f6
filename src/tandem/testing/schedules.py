"""What happens to a simulated fleet in its days: demand, operators, hosts, networks, all calm.

Every disturbance here is one that a healthy deployment lives through, so nothing of it may be
called a fault.

For: seeded spells of demand with a disturbance each. Not for: what is broken (`mechanisms.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.testing.demand import CALM, Demand
from tandem.testing.fleet import Fleet
from tandem.testing.mechanisms import break_, heal_in_place
from tandem.testing.rooms import Machine
from tandem.testing.showing import Blind
from tandem.testing.watching import Watch

MACHINES: Mapping[str, Machine] = {
    "laptop": Machine(),
    "slow": Machine(
        prefill_tokens_per_s=130.0, decode_step_s=0.08, decode_per_sequence_s=0.01, load_s=20.0,
        warm_s=5.0, compile_s=12.0,
    ),
    "accelerator": Machine(
        prefill_tokens_per_s=6_000.0, chunk_tokens=8_192, step_overhead_s=0.05,
        decode_step_s=0.02, decode_per_sequence_s=0.0005, max_running=32, max_inflight=64,
        kv_cells=4_000_000, load_s=240.0, warm_s=30.0, compile_s=15.0, link_bytes_per_s=2e10,
    ),
    "no-live-loads": Machine(live_loads=False),
}  # fmt: skip
"""The last one's queues are seen on the metrics page alone, where they freeze."""
SHAPES = ((1, 1), (1, 1), (1, 1), (2, 2))
SPELL_S = (120.0, 900.0)


@dataclass(frozen=True, slots=True)
class Spell:
    """A stretch of time with one demand and at most one disturbance, 60 s after its begin."""

    demand: Demand
    seconds: float
    disturbance: str


def _paused(watch: Watch) -> None:
    clock, chance = watch.fleet.clock, watch.fleet.chance
    clock.suspend(clock.world + 0.5, clock.world + chance.choice((5.0, 12.0, 40.0, 900.0)))


def _slow_disk(watch: Watch) -> None:
    watch.slow_disk_until = watch.fleet.clock.world + 90.0


def _jump(watch: Watch) -> None:
    watch.fleet.clock.jump(watch.fleet.chance.choice((-40.0, -3.0, 4.0, 60.0, 3_600.0)))


def _scrapes(watch: Watch) -> None:
    """For a minute one source after the other of one member is not reached, for up to 8 s."""
    fleet = watch.fleet
    names = [one.name for one in fleet.deployment.members]
    for at in range(6):
        name = fleet.chance.choice(names)
        sources = ("router",) if name in fleet.routers else ("metrics", "loads", "health")
        source = fleet.chance.choice((*sources, "process"))
        fleet.after(10.0 * at, _blind, watch, name, source, fleet.chance.uniform(1.0, 8.0))


def _blind(watch: Watch, name: str, source: str, seconds: float) -> None:
    watch.sight.blind[name, source] = Blind(watch.fleet.now + seconds)


def _all_blind(watch: Watch) -> None:
    """The watcher's own network is away for a moment."""
    fleet = watch.fleet
    for one in fleet.deployment.members:
        for source in ("metrics", "loads", "health", "router"):
            _blind(watch, one.name, source, 7.0)


def _redeploy(watch: Watch) -> None:
    """An operator restarts the pair in order."""
    fleet = watch.fleet
    for name in (*fleet.decodes, *fleet.prefills):
        fleet.stop(name)
    for wait, name in enumerate((*fleet.prefills, *fleet.decodes)):
        fleet.after(2.0 + wait, fleet.start, name)


def _decode_restart(watch: Watch) -> None:
    fleet = watch.fleet
    fleet.restart(fleet.chance.choice(list(fleet.decodes)), 2.0)


def _prefill_restart(watch: Watch) -> None:
    fleet = watch.fleet
    fleet.restart(fleet.chance.choice(list(fleet.prefills)), 2.0)


def _router_restart(watch: Watch) -> None:
    for name in watch.fleet.routers:
        watch.fleet.restart(name, 2.0)


def _slow(mechanism: str) -> Callable[[Watch], None]:
    def act(watch: Watch) -> None:
        fleet = watch.fleet
        break_(fleet, mechanism)
        fleet.after(180.0, heal_in_place, fleet)

    return act


DISTURBANCES: Mapping[str, Callable[[Watch], None]] = {
    "none": lambda _: None,
    "paused-collector": _paused,
    "slow-disk": _slow_disk,
    "clock-jump": _jump,
    "scrape-failures": _scrapes,
    "network-away": _all_blind,
    "redeploy": _redeploy,
    "decode-restart": _decode_restart,
    "prefill-restart": _prefill_restart,
    "router-restart": _router_restart,
    "slow-link": _slow("slow-link"),
    "slow-decode": _slow("slow-decode"),
}


def spell(fleet: Fleet) -> Spell:
    """The next one."""
    chance = fleet.chance
    disturbance = "none"
    if chance.random() < 0.5:
        disturbance = chance.choice(list(DISTURBANCES))
    demands = [one for one in CALM if not (disturbance == "slow-link" and one.long_share)]
    return Spell(chance.choice(demands), chance.uniform(*SPELL_S), disturbance)


__all__ = ["DISTURBANCES", "MACHINES", "SHAPES", "Spell", "spell"]

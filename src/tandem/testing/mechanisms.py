"""What can go wrong in a simulated fleet, each by the mechanism of the real thing.

A mechanism changes what an engine, the router or a process does; what is seen of it follows. Those
that share a name with a fault of the embedded engine act at the same place.

For: `break_`, `heal`, and what a watcher ought to notice. Not for: when (`schedules.py`).
"""
# ruff: noqa: ARG001 - every mechanism is told the whole cell

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.testing.fleet import Fleet

SLOW_LINK_TOKENS_PER_S = 3_000.0
"""Slow, and yet no hand-off of a usual prompt takes so long that nothing is seen to move."""
Expected = Literal["stall", "down", "failures", "router", "nothing"]
"""What is to be found: a silent or partial stall, a member away, failed hand-offs, the router, or
nothing at all: a near miss."""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One thing that goes wrong."""

    name: str
    act: Callable[[Fleet, str, str], None]
    """Given the fleet and one cell (prefill, decode), lets it go wrong there."""
    expected: Expected = "stall"
    partial: bool = False
    """Others flow meanwhile: scored apart."""
    needs_load: bool = False
    """Does nothing to an idle fleet."""
    needs_live_loads: bool = False
    """Holds what no client waits for, so that only a live queue shows it."""
    kinds: tuple[str, ...] = ()
    """The findings that name it, where it is not a stall."""


def _dropped(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).drops = 1.0
    fleet.prefill(prefill).drops_to = frozenset({decode})


def _dropped_in_part(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).drops = 0.3


def _stalls(fleet: Fleet, prefill: str, decode: str) -> None:
    _dropped(fleet, prefill, decode)
    fleet.prefill(prefill).stalls = True


def _stale(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).memory = "stale"
    fleet.prefill(prefill).known_lives[decode] = [fleet.decode(decode).process.life]
    fleet.restart(decode)


def _orphaned(fleet: Fleet, prefill: str, decode: str) -> None:
    side = fleet.prefill(prefill)
    side.memory = "orphaned"
    # A restart under load, until hand-offs were on their way; a slow link makes that likely.
    side.link_bytes_per_s = 2e7
    _orphan_again(fleet, prefill, decode, 8)


def _orphan_again(fleet: Fleet, prefill: str, decode: str, left: int) -> None:
    side = fleet.prefill(prefill)
    if side.memory != "orphaned" or left == 0:
        return
    if any(room.decode == decode for room in side.inflight.values()):
        side.link_bytes_per_s = 0.0
        fleet.restart(decode)
        return
    fleet.after(0.2, _orphan_again, fleet, prefill, decode, left)


def _deaf(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).deaf = True


def _prefill_hangs(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).hang = "blocks"


def _prefill_spins(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).hang = "spins"


def _decode_hangs(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.decode(decode).hold("blocks")


def _decode_spins(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.decode(decode).hold("spins")


def _green_while_dead(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.decode(decode).green = True
    fleet.decode(decode).hold("blocks")


def _worker_dead(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.decode(decode).halt()
    fleet.decode(decode).worker_dead = True
    fleet.down_since.setdefault(decode, fleet.now)


def _leaked_slots(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).leaks_slot_every = 1


def _deadlock(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.decode(decode).retract_all()


def _killed(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.stop(decode, -9)


def _prefill_killed(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.stop(prefill, -9)


def _held(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.decode(decode).halt()
    fleet.decode(decode).process.stopped = True
    fleet.down_since.setdefault(decode, fleet.now)


def _router_holds(fleet: Fleet, prefill: str, decode: str) -> None:
    if fleet.router is not None:
        fleet.router.holds = True


def _breaker(fleet: Fleet, prefill: str, decode: str) -> None:
    if fleet.router is not None:
        fleet.router.breaker_stuck = True
        fleet.router.open_until[decode] = fleet.now


def _fails(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.prefill(prefill).fails_from_tokens = 1


def _slow_link(fleet: Fleet, prefill: str, decode: str) -> None:
    side = fleet.prefill(prefill)
    side.link_bytes_per_s = SLOW_LINK_TOKENS_PER_S * side.machine.kv_bytes_per_token


def _slow_decode(fleet: Fleet, prefill: str, decode: str) -> None:
    fleet.decode(decode).halt()
    fleet.decode(decode).slow = 6.0
    fleet.decode(decode).let_go()


MECHANISMS: Mapping[str, Mechanism] = {
    one.name: one
    for one in (
        Mechanism("handoff-dropped", _dropped),
        Mechanism("handoff-stalls", _stalls),
        Mechanism("bootstrap-deaf", _deaf),
        Mechanism("prefill-blocks", _prefill_hangs),
        Mechanism("prefill-spins", _prefill_spins),
        Mechanism("decode-blocks", _decode_hangs),
        Mechanism("decode-spins", _decode_spins),
        Mechanism("green-while-dead", _green_while_dead),
        Mechanism("worker-dead", _worker_dead),
        Mechanism("kv-deadlock", _deadlock, needs_load=True),
        Mechanism("leaked-slots", _leaked_slots, needs_load=True),
        Mechanism("handoff-dropped-in-part", _dropped_in_part, partial=True, needs_load=True),
        Mechanism("stale-peers", _stale, partial=True, needs_load=True),
        Mechanism(
            "orphaned-transfers", _orphaned, partial=True, needs_load=True, needs_live_loads=True
        ),
        Mechanism("decode-killed", _killed, expected="down", kinds=("member-down",)),
        Mechanism("prefill-killed", _prefill_killed, expected="down", kinds=("member-down",)),
        Mechanism("decode-held", _held, expected="down", kinds=("member-paused", "member-down")),
        Mechanism("router-holds", _router_holds, expected="router", kinds=("router-disagrees",)),
        Mechanism("router-breaker", _breaker, expected="router", kinds=("router-disagrees",)),
        Mechanism(
            "handoff-fails",
            _fails,
            expected="failures",
            needs_load=True,
            kinds=("transfer-failures-rising",),
        ),
        Mechanism("slow-link", _slow_link, expected="nothing"),
        Mechanism("slow-decode", _slow_decode, expected="nothing"),
    )
}


def break_(fleet: Fleet, name: str, prefill: str = "prefill-0", decode: str = "decode-0") -> None:
    """Let one mechanism act from now on, on one cell."""
    fleet.advance()
    MECHANISMS[name].act(fleet, prefill, decode)


def heal_in_place(fleet: Fleet) -> None:
    """Switch everything off; what only a restart cures stays as it is."""
    _switch_off(fleet)
    for engine in fleet.engines.values():
        engine.let_go()


def heal(fleet: Fleet) -> None:
    """Switch everything off, and restart every engine in order: what cures them all."""
    fleet.advance()
    _switch_off(fleet)
    for name in fleet.engines:
        fleet.stop(name)
    for name in fleet.engines:
        fleet.start(name)


def _switch_off(fleet: Fleet) -> None:
    for router in fleet.routers.values():
        router.holds = router.breaker_stuck = False
        router.open_until.clear()
    for decode in fleet.decodes.values():
        decode.worker_dead = decode.green = False
        decode.hang, decode.slow, decode.leaks_slot_every, decode.loses_reply_every = "", 1.0, 0, 0
        decode.blocks_arrivals = False
    for prefill in fleet.prefills.values():
        prefill.memory, prefill.deaf, prefill.hang = "leases", False, ""
        prefill.drops, prefill.drops_to, prefill.stalls = 0.0, frozenset(), False
        prefill.worker_dead = prefill.green = False
        prefill.link_bytes_per_s, prefill.fails_from_tokens = 0.0, 0
        prefill.leaks_slot_every = prefill.leaks_room_every = 0


__all__ = ["MECHANISMS", "Expected", "Mechanism", "break_", "heal", "heal_in_place"]

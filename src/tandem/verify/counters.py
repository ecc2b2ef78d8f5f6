"""What the engines count while the proof runs: failed hand-offs, and what is still in flight.

For: the two numbers that clients cannot see. Not for: judging them; a counter that never moved
may be unwired (SGLang's stayed at zero or were not updated in several releases), so a zero of it is
said to be not proven.
"""

import asyncio
from collections.abc import Iterable, Sequence

from tandem.ports import Clock, Hands
from tandem.records import Member, Observation, Role
from tandem.records import vocabulary as v

OBSERVE_TIMEOUT_S = 5.0
INFLIGHT_WAIT_S = 10.0
POLL_S = 0.5

Counts = dict[str, dict[str, float]]
"""Member to vocabulary name to number; what could not be seen is absent."""


async def count(hands: Hands) -> Counts:
    """Look at every engine once, all at the same time; each look is bounded."""
    engines = [m for m in hands.deployment.members if m.role is not Role.ROUTER]
    looks = await asyncio.gather(*(_look(hands, member) for member in engines))
    return {member.name: numbers for member, numbers in zip(engines, looks, strict=True)}


async def _look(hands: Hands, member: Member) -> dict[str, float]:
    try:
        async with asyncio.timeout(OBSERVE_TIMEOUT_S + 1.0):
            harvest = await hands.engine(member).observe(member, OBSERVE_TIMEOUT_S)
    # A look that broke saw nothing: what is absent becomes "not proven".
    except Exception:  # noqa: BLE001
        return {}
    return _numbers(harvest.observations)


def _numbers(rows: Iterable[Observation]) -> dict[str, float]:
    return {
        row.name: float(row.value)
        for row in rows
        if not row.label and isinstance(row.value, int | float)
    }


def failed_delta(
    before: Counts, after: Counts, seen_moving: Sequence[str]
) -> tuple[int | None, list[str]]:
    """How many hand-offs failed between two looks, and what that does not prove.

    `seen_moving` are members whose failure counter is known to work. None when no engine shows it.
    """
    name = v.TRANSFER_FAILED_TOTAL
    total, shown, doubts, idle = 0.0, False, [], []
    for member, then in before.items():
        now = after.get(member, {})
        if name not in then or name not in now:
            doubts.append(f"transfer failures of {member}: the counter could not be read")
            continue
        shown = True
        total += now[name] - then[name] if now[name] >= then[name] else now[name]
        if now[name] == 0 and then[name] == 0 and member not in seen_moving:
            idle.append(member)
    if idle:
        moved = sum(
            max(after[one].get(v.TRANSFERS_TOTAL, 0) - then.get(v.TRANSFERS_TOTAL, 0), 0)
            for one, then in before.items()
        )
        doubts.append(
            f"transfer failures of {', '.join(idle)} stayed at 0, but that counter was never seen "
            f"to move ({moved:.0f} hand-offs were counted as completed meanwhile)"
        )
    return (int(total) if shown else None), doubts


async def inflight_after(hands: Hands, clock: Clock) -> tuple[int | None, list[str]]:
    """Hand-offs still in flight on the prefills once they had `INFLIGHT_WAIT_S` to end.

    None when no prefill shows the queue. Other traffic may pass: one look at zero is enough.
    """
    prefills = [member.name for member in hands.deployment.of(Role.PREFILL)]
    deadline = clock.now() + INFLIGHT_WAIT_S
    while True:
        counts = await count(hands)
        seen = {name: counts[name].get(v.INFLIGHT_QUEUE_REQS) for name in prefills}
        known = [number for number in seen.values() if number is not None]
        doubts = [
            f"inflight hand-offs of {name}: the queue could not be read"
            for name, number in seen.items()
            if number is None
        ]
        if known and sum(known) == 0:
            return 0, doubts
        if clock.now() + POLL_S > deadline:
            return (int(sum(known)) if known else None), doubts
        await clock.sleep(POLL_S)

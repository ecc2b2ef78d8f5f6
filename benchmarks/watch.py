"""Watching that neither sleeps nor cries wolf: `make bench-watch`.

Sixty injected stalls and how soon each was noticed, what watching costs, what it costs by the
number of members, false findings in real soak and in virtual days, and all of it beside what people
use today. Every stall and every slice of soak is in the results file as soon as it ended; a run
that was cut short goes on after it.

`watch.py PART...` measures only these parts: stalls, cost, beside, curve, soak, virtual. Bars are
printed when all parts are there, or with `watch.py tell` for what is there. One call does not reach
the end of all of it: run it again.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType

import watch_beside
import watch_cost
import watch_curve
import watch_soak
import watch_stalls
import watch_virtual
from bars import Bench, say

PARTS: dict[str, ModuleType] = {
    "stalls": watch_stalls,
    "cost": watch_cost,
    "beside": watch_beside,
    "curve": watch_curve,
    "soak": watch_soak,
    "virtual": watch_virtual,
}


CALL_S = 38 * 60.0
"""One call ends within 45 minutes; a virtual day under way is computed to its end."""


async def main(asked: list[str]) -> int:
    """Measure, print every bar once; the exit status."""
    bench = Bench("watch")
    if asked == ["tell"]:
        return told(bench)
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        say(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        return 2
    try:
        async with asyncio.timeout(CALL_S):
            for name, part in PARTS.items():
                if not asked or name in asked:
                    measure: Callable[[Bench], Awaitable[None]] = part.measure
                    await measure(bench)
    except TimeoutError:
        say(f"not finished after {CALL_S / 60:.0f} minutes: run it again, and it goes on")
        return 1
    if asked:
        return 0
    return told(bench)


def told(bench: Bench) -> int:
    """Print every bar of every part; what is not measured is a bar that falls short."""
    for name, part in PARTS.items():
        try:
            part.tell(bench, bench.measured)
        except KeyError as step:
            bench.missing(name, f"no {step.args[0]} yet")
    return bench.finish()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # An end from outside must put deployments away as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(asyncio.run(main(sys.argv[1:])))

"""False findings in virtual days, and the upper bound that they prove.

`virtual_days` of `tandem.testing` watches simulated fleets with the real collector, probes and
detect, one turn a second of virtual time, through demand from none to twice what fits, restarts,
cold starts, pauses, slow disks, clock jumps, failed scrapes; every few hours something breaks and
has to be found. `watch_virtual.py DAYS` runs alone and prints what it found.

For: a part of `watch.py`.
Not for: real engines (`watch_soak.py`).
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from bars import Bench, Figures, say
from tandem.testing.soak import bound, virtual_days

DAYS, QUICK_DAYS = 30.0, 1.0
SEEDS, QUICK_SEEDS = range(1, 41), range(1, 5)
STEP = "virtual days"
CPU_S_MAX, QUICK_CPU_S_MAX = 1200.0, 60.0


async def measure(bench: Bench) -> None:
    """Days of each group of seeds, one step each, so that a run cut short goes on; all cores."""
    seeds = list(QUICK_SEEDS if bench.quick else SEEDS)
    days = QUICK_DAYS if bench.quick else DAYS
    cores = os.cpu_count() or 1
    budget_s = (QUICK_CPU_S_MAX if bench.quick else CPU_S_MAX) * cores
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(cores) as pool:

        async def measured(group: list[int]) -> Figures:
            share = len(group) / len(seeds)
            soak = partial(virtual_days, tell=say, cpu_s_max=budget_s * share)
            return await loop.run_in_executor(pool, soak, days * share, group)

        size = max(1, len(seeds) // (4 * cores))
        groups = [seeds[first : first + size] for first in range(0, len(seeds), size)]
        await asyncio.gather(
            *(
                bench.step(f"{STEP} of seeds {one[0]} to {one[-1]}", partial(measured, one))
                for one in groups
            )
        )


def tell(bench: Bench, measured: dict[str, Figures]) -> None:
    """False findings, what that proves, and what was missed of what broke."""
    parts = [one for name, one in measured.items() if name.startswith(STEP)]
    days = sum(float(one["days"]) for one in parts)
    false = sum(len(one["false"]) for one in parts)
    broke = sum(int(one["stalls"]) for one in parts)
    bench.bar("virtual days", days, QUICK_DAYS / 2 if bench.quick else DAYS, len(parts), least=True)
    bench.bar("false findings in virtual days", false, 0, len(parts))
    bench.note("false findings a virtual day, at most (95 %)", bound(false, days), len(parts))
    bench.bar("faults missed in virtual days", sum(len(o["missed"]) for o in parts), 0, broke)
    bench.note("faults found late in virtual days", sum(len(o["late"]) for o in parts), broke)
    cpu_s = sum(float(one["cpu_s"]) for one in parts)
    turns = sum(int(one["turns"]) for one in parts)
    bench.note("microseconds of a virtual turn", 1e6 * cpu_s / max(1, turns), turns)


if __name__ == "__main__":
    asked = float(sys.argv[1]) if len(sys.argv) > 1 else QUICK_DAYS
    found = virtual_days(asked, list(SEEDS)[: max(4, int(asked))], tell=say)
    say(json.dumps(found, indent=2))
    sys.exit(1 if found["false"] or found["missed"] else 0)

"""Days of watching in virtual time: what a watch keeps in memory does not grow with its turns."""

import asyncio
import gc
import sys

import pytest

from fakes import World, deployment
from tandem.collect import Collector
from tandem.loop import watch
from tandem.parts import Parts
from tandem.ports import Harvest
from tandem.records import Change, Observation, Settings, WatchSettings
from tandem.records import vocabulary as v
from tandem.store import Store

TURNS = 10_000
SETTLED = 4_000
"""Turns after which every window and bound is full."""
INTERVAL_S = 30.0
BLOCKS_MAX = 3_000
"""Allocated blocks more or less between two looks at memory: less than one look brings in all."""


class Drip:
    """A source that sees a little every turn, a restart now and then, and counts memory."""

    name, interval_s, timeout_s = "drip", 0.5, 5.0

    def __init__(self, world):
        self.world = world
        self.turns = 0
        self.blocks = {}
        self.tasks = 0

    async def collect(self):
        """Give what an idle deployment shows."""
        self.turns += 1
        if self.turns in (SETTLED, TURNS):
            gc.collect()
            self.blocks[self.turns] = sys.getallocatedblocks()
            self.tasks = len(asyncio.all_tasks())
        at, total = self.world.clock.now(), self.turns
        life = f"decode-0:{self.turns // 100}"
        rows = (
            ("loads", "prefill-0", v.INFLIGHT_QUEUE_REQS, self.turns % 2),
            ("metrics", "prefill-0", v.REQUESTS_TOTAL, total),
            ("process", "decode-0", v.STARTED_AT, at - at % (100 * INTERVAL_S)),
            ("loads", "decode-0", v.TRANSFER_QUEUE_REQS, 0),
        )
        seen = tuple(
            Observation(
                source=source, subject=subject, name=name, at=at, value=value, incarnation=life
            )
            for source, subject, name, value in rows
        )
        changes = ()
        if self.turns % 100 == 0:
            changes = (Change(at=at, subject="decode-0", kind="restart", incarnation=life),)
        return Harvest(seen, changes=changes)


@pytest.mark.timeout(120)
async def test_memory_stays_bounded(tmp_path):
    """Between the 4,000th and the 10,000th turn nothing is added to what a watch remembers."""
    world = World(deployment())
    settings = Settings(
        root=str(tmp_path),
        deployment=world.deployment,
        watch=WatchSettings(interval_s=INTERVAL_S, keep_hours=24.0),
    )
    drip = Drip(world)
    with Store.open(tmp_path, settings) as store:
        parts = Parts(
            settings=settings,
            store=store,
            hands=world.hands(),
            clock=world.clock,
            collector=Collector([drip], world.clock),
            modes=(),
            take_stacks=None,
        )
        await watch(parts, hunch=None, tell=lambda _: None, turns_max=TURNS)

    assert drip.turns == TURNS
    assert drip.blocks[TURNS] - drip.blocks[SETTLED] < BLOCKS_MAX
    assert drip.tasks <= 3

"""Controls: what looks alarming and is not."""

import asyncio

from tandem.drills.drill import Drill, Scene
from tandem.drills.traffic import Shape, Traffic

LONG_WORDS = 1200
"""About 1,500 tokens: some ten seconds of prefill on one core."""


async def _long_prefill(scene: Scene) -> None:
    """Two prompts so long that everything behind them waits."""
    shape = Shape(sessions=2, turns=1, words=LONG_WORDS, output_tokens=4)
    long_ones = Traffic(scene.workspace.router_url, shape, seed=scene.seed + 1, log=scene.log)
    await long_ones.start()
    await asyncio.sleep(2.0)
    await long_ones.pause()
    scene.background.append(long_ones)


async def _idle(scene: Scene) -> None:
    """Nothing at all: the clients leave."""
    await scene.traffic.pause()


async def _burst(scene: Scene) -> None:
    """Many short requests at once, then silence."""
    shape = Shape(sessions=24, turns=1, words=12, output_tokens=8)
    crowd = Traffic(scene.workspace.router_url, shape, seed=scene.seed + 1, log=scene.log)
    await crowd.start()
    await asyncio.sleep(1.0)
    await crowd.pause()
    scene.background.append(crowd)


DRILLS = (
    Drill(
        name="long-prefill",
        about="prompts so long that probes are late: slow, but moving",
        stall_expected=False,
        script=_long_prefill,
        shape=Shape(sessions=1),
        context_length=2048,
        calm_s=30.0,
    ),
    Drill(
        name="idle",
        about="no traffic at all",
        stall_expected=False,
        script=_idle,
        shape=Shape(sessions=1),
        calm_s=25.0,
    ),
    Drill(
        name="burst",
        about="a crowd at once: queues grow and drain",
        stall_expected=False,
        script=_burst,
        shape=Shape(sessions=2),
        calm_s=25.0,
    ),
)

"""The incident's drills and their near miss: decode-only restarts against a living prefill."""

import asyncio

from tandem.drills import injections
from tandem.drills.drill import Drill, Scene
from tandem.drills.traffic import Shape

RESTARTS = 4
BETWEEN_S = 1.5
"""Traffic between two restarts: enough for hand-offs in flight, short as a tuning campaign."""

HEAVY = Shape(sessions=12, words=60, output_tokens=6)
"""Prompts that keep every receiving slot of the decode waiting: what dies is in flight."""


async def _campaign(scene: Scene, peer_memory: str, restarts: int = RESTARTS) -> None:
    """Switch the behaviour, then restart the decode alone, again and again, under load."""
    await injections.remember_peers(scene.workspace, peer_memory)
    await asyncio.sleep(BETWEEN_S)
    for number in range(restarts):
        tuned = injections.change_named(number)
        scene.tell(f"decode-only restart {number + 1} of {restarts}, with {tuned}")
        await injections.restart_decode(scene.workspace, change=number)
        await asyncio.sleep(BETWEEN_S)


async def _stale(scene: Scene) -> None:
    await _campaign(scene, "stale")


async def _orphaned(scene: Scene) -> None:
    await _campaign(scene, "orphaned", restarts=2)


async def _leases(scene: Scene) -> None:
    await _campaign(scene, "leases")


DEMO = Drill(
    name="demo",
    about="the incident, told",
    stall_expected=True,
    script=_stale,
    shape=Shape(sessions=6),
)

DRILLS = (
    Drill(
        name="stale-peer-after-decode-restarts",
        about="the prefill keeps the agents of dead decodes and sends KV to them",
        stall_expected=True,
        script=_stale,
        shape=Shape(sessions=6),
    ),
    Drill(
        name="orphaned-transfer-after-decode-restarts",
        about="hand-offs in flight when a decode dies never end and keep their slots",
        stall_expected=True,
        script=_orphaned,
        shape=HEAVY,
    ),
    Drill(
        name="near-miss-decode-restarts-with-leases",
        about="the same restarts with leases: the pair heals and nobody may be accused",
        stall_expected=False,
        script=_leases,
        shape=Shape(sessions=6),
    ),
)

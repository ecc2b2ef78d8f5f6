"""One drill from beginning to end: bring up, watch, inject, wait, take down, score."""

import asyncio
import contextlib
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tandem.config import load
from tandem.drills.drill import Drill, Scene, Tell
from tandem.drills.score import Score, score
from tandem.drills.traffic import ClientLog, Traffic
from tandem.drills.workspace import Workspace
from tandem.errors import NotProvenError, TandemError, WorldError
from tandem.records import Incident
from tandem.store import Store

HUNCH = "overlap schedule"
WARM_S = 3.0
"""Traffic before anything is done, so that progress has been seen."""
SERVED_BOUND_S = 12.0
"""How long clients may take to be answered twice each; a slow machine goes on without."""
FOUND_BOUND_S = 45.0
HANDLED_BOUND_S = 150.0
STEP_S = 0.25
SETTLED = ("advised", "closed", "failed")
"""States in which an incident that is written down stays: "advised" when nothing may be done."""


@contextlib.asynccontextmanager
async def open_scene(
    workspace: Workspace, drill: Drill, seed: int, tell: Tell
) -> AsyncIterator[Scene]:
    """A serving, watched deployment with clients; everything is put away afterwards."""
    log = ClientLog()
    traffic = Traffic(workspace.router_url, drill.shape, seed=seed, log=log)
    scene = Scene(workspace=workspace, log=log, traffic=traffic, seed=seed, tell=tell)
    try:
        tell("bringing up one prefill, one decode and the router")
        await workspace.tandem("up")
        await workspace.start_watch(HUNCH)
        await traffic.start()
        await _until_served(scene, 2 * drill.shape.sessions)
        yield scene
    except BaseException:
        try:
            await _put_away(scene)
        except WorldError as left:
            tell(str(left))  # and what went wrong first goes on
        raise
    else:
        await _put_away(scene)


async def _put_away(scene: Scene) -> None:
    """End the clients, the watch and the deployment; raises `WorldError` when something is left."""
    for one in (scene.traffic, *scene.background):
        await one.stop()
    scene.log.write(scene.workspace.root / "client.jsonl")
    await scene.workspace.close()


async def _until_served(scene: Scene, answers: int) -> None:
    """Wait until clients have had answers: what is to fall silent has to be heard first."""
    await asyncio.sleep(WARM_S)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SERVED_BOUND_S
    while scene.log.count("completed") < answers and loop.time() < deadline:
        await asyncio.sleep(STEP_S)
    scene.tell(f"clients are served: {scene.log.count('completed')} answers so far")


def newest_incident(workspace: Workspace) -> Incident | None:
    """The latest incident the loop under test has written, if any."""
    store = Store.open(workspace.root, load(workspace.config))
    try:
        return next(iter(store.incidents()), None)
    finally:
        store.close()


async def wait_for(
    workspace: Workspace, holds: Callable[[Incident | None], bool], bound_s: float
) -> Incident | None:
    """Wait until the newest incident satisfies `holds`, at most `bound_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + bound_s
    while loop.time() < deadline:
        if not workspace.watch_alive():
            raise NotProvenError(
                "`tandem watch` ended by itself during the drill.",
                next_step=f"Read {workspace.root / 'watch.log'}.",
            )
        incident = newest_incident(workspace)
        if holds(incident):
            return incident
        await asyncio.sleep(STEP_S)
    return newest_incident(workspace)


async def rehearse(
    drill: Drill,
    *,
    seed: int,
    tell: Tell,
    root: Path | None = None,
    workspace: Workspace | None = None,
    on_scene: Callable[[Scene], None] | None = None,
) -> Score:
    """Run one drill in a folder of its own and score it.

    The folder is kept when `root` is given, and when the drill breaks: the error names its logs.
    `workspace` is another deployment than the usual one to rehearse on.
    """
    with contextlib.ExitStack() as stack:
        if workspace is None:
            if root is None:
                root = Path(tempfile.mkdtemp(prefix=f"tandem-{drill.name}-"))
                stack.push(functools.partial(_remove_unless_broken, root))
            workspace = Workspace(root=root, context_length=drill.context_length)
        workspace.create()
        async with open_scene(workspace, drill, seed, tell) as scene:
            if on_scene is not None:
                on_scene(scene)
            await drill.script(scene)
            incident = await _aftermath(drill, scene)
        return score(drill.name, seed, incident, scene.log, stall_expected=drill.stall_expected)


def _remove_unless_broken(root: Path, broken: type[BaseException] | None, *_: object) -> None:
    if broken is None or not issubclass(broken, TandemError):
        shutil.rmtree(root, ignore_errors=True)


async def _aftermath(drill: Drill, scene: Scene) -> Incident | None:
    workspace = scene.workspace
    if not drill.stall_expected:
        found = await wait_for(workspace, lambda incident: incident is not None, drill.calm_s)
        if found is not None:
            return found
        scene.tell("nothing was found; asking as a person with a hunch would")
        await workspace.tandem("investigate", "--hunch", HUNCH)
        return newest_incident(workspace)
    scene.tell("waiting for the loop to notice")
    found = await wait_for(workspace, lambda incident: incident is not None, FOUND_BOUND_S)
    if found is None:
        return None
    await scene.traffic.pause()
    scene.tell("an incident is open; clients begin nothing new")
    return await wait_for(
        workspace,
        lambda incident: (
            incident is not None and incident.state in SETTLED and incident.report is not None
        ),
        HANDLED_BOUND_S,
    )

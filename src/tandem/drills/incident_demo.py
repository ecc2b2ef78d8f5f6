"""`tandem demo`: the whole incident on this machine, and the loop at work on it.

For: showing, not scoring; it passes only when everything it tells truly happened.
"""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.live import Live

from tandem.config import load
from tandem.drills.decode_restarts import DEMO
from tandem.drills.drill import Scene
from tandem.drills.live import Story
from tandem.drills.rehearsal import rehearse
from tandem.drills.score import Score
from tandem.errors import ConfigError, NotProvenError
from tandem.store import Store

POLL_S = 0.2
MARKER = "tandem.toml"


def _workspace(asked: Path | None) -> Path:
    """The folder to play in: a new one, an empty one, or one of an earlier demo."""
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="tandem-demo-"))
    asked = asked.resolve()
    if asked.exists() and not asked.is_dir():
        raise ConfigError(
            f"--workspace {asked} is not a folder.", next_step="Name a new or empty folder."
        )
    if asked.exists() and any(asked.iterdir()) and not (asked / MARKER).exists():
        raise ConfigError(
            f"--workspace {asked} holds other things already.",
            next_step="Name a new or empty folder.",
        )
    return asked


async def _follow(story: Story, root: Path) -> None:
    """Read the loop's own events from its store, as any other process may."""
    after, written = 0, False
    while not (root / ".tandem" / "state.sqlite").exists():
        await asyncio.sleep(POLL_S)
    store = Store.open(root, load(root / MARKER))
    try:
        while True:
            for event in store.events(after):
                after = event.id
                # What is stopped after the report is the demo's own putting away.
                if not (written and event.kind == "step"):
                    story.tell(event.kind, event.text)
                if event.kind == "report":
                    written = True
                    story.tell("act", "taking it all down")
            story.look_at_clients()
            await asyncio.sleep(POLL_S)
    finally:
        store.close()


async def _play(root: Path, seed: int, console: Console) -> Score:
    story = Story(console)
    story.tell("act", f"workspace {root}")

    def on_scene(scene: Scene) -> None:
        story.scene = scene

    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            view = Live(story, console=console, refresh_per_second=4, transient=True)
            stack.enter_context(view)
            story.live = True
        follower = asyncio.create_task(_follow(story, root))
        try:
            return await rehearse(
                DEMO,
                seed=seed,
                tell=lambda text: story.tell("act", text),
                root=root,
                on_scene=on_scene,
            )
        finally:
            await asyncio.sleep(2 * POLL_S)
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower


def summary(result: Score, document: str) -> str:
    """The demo's last line, from real figures."""
    said, mended, proof, report = (
        result.diagnosis,
        result.repair,
        result.verification,
        result.report,
    )
    if said is None or mended is None or proof is None or report is None or said.hunch is None:
        raise NotProvenError(
            f"The demo fell short: {'; '.join(result.why)}.",
            next_step="Read watch.log and the incident folder in the workspace.",
        )
    kind = (result.finding or "").replace("-", " ")
    answer = said.hunch.answer.replace("_", " ")
    return (
        f"demo passed: {kind} found in {result.found_after_s:.1f} s; "
        f"cause {said.cause} ({said.verdict.replace('_', ' ')}); "
        f"hunch {said.hunch.matched} {answer}; "
        f"{mended.scope} restarted in {mended.duration_s:.1f} s; "
        f"{proof.sequential['passed']}/{proof.sequential['total']} sequential, "
        f"{proof.sessions['passed']}/{proof.sessions['total']} sessions clean; "
        f"{document} @ {report['commit']}"
    )


async def demo(workspace: Path | None, *, seed: int = 1) -> None:
    """Play the incident; returns only when all of it truly happened.

    Raises `NotProvenError` when anything fell short, and leaves nothing running either way.
    """
    root = _workspace(workspace)
    console = Console(stderr=False)
    result = await _play(root, seed, console)
    if not result.ok:
        raise NotProvenError(
            f"The demo fell short: {'; '.join(result.why)}.",
            next_step=f"Read {root / 'watch.log'} and {root / '.tandem' / 'incidents'}.",
        )
    document = load(root / MARKER).report.document
    console.print(f"the report: {root / document}", soft_wrap=True)
    sys.stdout.write(summary(result, Path(document).name) + "\n")
    sys.stdout.flush()

"""The demo as it happens: traffic on top, the story below; plain lines where there is no screen."""

import time
from collections import deque
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tandem.drills.drill import Scene

BARS = "▁▂▃▄▅▆▇█"
SECONDS_SHOWN = 40
LINES_SHOWN = 14
STUCK_S = 5.0
"""A request without an answer for this long is told as stuck: even a cold pair answers sooner."""

STAGES = ("collect", "store", "detect", "diagnose", "plan", "repair", "verify", "report")
STAGE_OF = {
    "watching": "collect",
    "finding": "detect",
    "evidence": "collect",
    "sealed": "store",
    "ruled-out": "diagnose",
    "diagnosis": "diagnose",
    "hunch": "diagnose",
    "plan": "plan",
    "repair": "repair",
    "step": "repair",
    "repaired": "verify",
    "proving": "verify",
    "proof": "verify",
    "report": "report",
}

STYLES = {
    "act": "cyan",
    "stuck": "bold red",
    "finding": "bold yellow",
    "evidence": "dim",
    "sealed": "dim",
    "ruled-out": "blue",
    "hunch": "magenta",
    "diagnosis": "bold yellow",
    "plan": "yellow",
    "repair": "yellow",
    "step": "dim",
    "repaired": "green",
    "proof": "bold green",
    "report": "bold green",
    "failed": "bold red",
    "resume": "yellow",
}
SYMBOLS = {
    "act": "·",
    "stuck": "…",
    "finding": "!",
    "ruled-out": "✗",
    "hunch": "?",
    "diagnosis": "→",
    "plan": "☰",
    "proof": "✓",
    "report": "✎",
    "failed": "‼",
}


@dataclass
class Story:
    """What has been told so far, and the scene whose traffic is drawn once it exists."""

    console: Console
    began: float = field(default_factory=time.monotonic)
    scene: Scene | None = None
    lines: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=200))
    live: Live | None = None
    stage: str = ""
    stuck: str | None = None
    """The session whose request was told as stuck."""

    def tell(self, kind: str, text: str) -> None:
        """Add a line; printed at once where there is no screen to redraw."""
        at = time.monotonic() - self.began
        self.lines.append((at, kind, text))
        self.stage = STAGE_OF.get(kind, self.stage)
        if self.live is None:
            self.console.print(self._line(at, kind, text), soft_wrap=True)

    def look_at_clients(self) -> None:
        """Tell of a request that has waited far longer than any answer takes, once per request."""
        oldest = self.scene.log.oldest_open() if self.scene else None
        if oldest is None or oldest.session == self.stuck:
            return
        waited_s = time.time() - oldest.sent_at
        if waited_s >= STUCK_S:
            first = "first stuck request" if self.stuck is None else "another stuck request"
            self.stuck = oldest.session
            self.tell("stuck", f"{first}: session {oldest.session}, no answer for {waited_s:.0f} s")

    def _line(self, at: float, kind: str, text: str) -> Text:
        line = Text(f"{at:6.1f} s  {SYMBOLS.get(kind, ' ')} ", style="dim")
        return line.append(text, style=STYLES.get(kind, ""))

    def __rich__(self) -> RenderableType:
        """Draw the present state; called by Rich on every refresh."""
        story = Table.grid(padding=(0, 1))
        story.add_column(justify="right", style="dim", no_wrap=True)
        story.add_column(no_wrap=True)
        story.add_column()
        for at, kind, text in list(self.lines)[-LINES_SHOWN:]:
            told = Text(text, style=STYLES.get(kind, ""))
            story.add_row(f"{at:.1f} s", SYMBOLS.get(kind, " "), told)
        title = "tandem demo: a PD pair goes silent"
        panel = Panel(story, title=title, title_align="left", border_style="dim")
        return Group(self._traffic(), self._stages(), panel)

    def _stages(self) -> Text:
        """The loop, with the stage it is in."""
        line = Text("the loop         ", style="dim")
        for number, stage in enumerate(STAGES):
            line.append(" → " if number else "", style="dim")
            line.append(stage, style="bold reverse" if stage == self.stage else "dim")
        return line

    def _traffic(self) -> RenderableType:
        if self.scene is None:
            return Text("bringing a prefill, a decode and a router up ...", style="dim")
        log = self.scene.log
        now = time.time()
        counts = [0] * SECONDS_SHOWN
        for one in log.sent:
            if one.status == "completed" and one.ended_at is not None:
                age = int(now - one.ended_at)
                if age < SECONDS_SHOWN:
                    counts[SECONDS_SHOWN - 1 - age] += 1
        top = max(*counts, 1)
        bars = "".join(BARS[count * (len(BARS) - 1) // top] if count else " " for count in counts)
        oldest = log.oldest_open()
        waiting = f"{now - oldest.sent_at:.0f} s" if oldest else "-"
        table = Table.grid(padding=(0, 3))
        table.add_row(
            Text("answers a second ", style="dim").append(bars, style="green"),
            f"[green]{log.count('completed')}[/] answered",
            f"[red]{log.count('failed')}[/] failed (killed by restarts)",
            f"[yellow]{log.open_count()}[/] open, oldest {waiting}",
        )
        return table

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
LINES_SHOWN = 18

STYLES = {
    "act": "cyan",
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

    def tell(self, kind: str, text: str) -> None:
        """Add a line; printed at once where there is no screen to redraw."""
        at = time.monotonic() - self.began
        self.lines.append((at, kind, text))
        if self.live is None:
            self.console.print(self._line(at, kind, text), soft_wrap=True)

    def _line(self, at: float, kind: str, text: str) -> Text:
        symbol = SYMBOLS.get(kind, " ")
        line = Text(f"{at:6.1f} s  {symbol} ", style="dim")
        return line.append(text, style=STYLES.get(kind, ""))

    def __rich__(self) -> RenderableType:
        """Draw the present state; called by Rich on every refresh."""
        story = [self._line(*entry) for entry in list(self.lines)[-LINES_SHOWN:]]
        title = "tandem demo: a PD pair goes silent"
        panel = Panel(Group(*story), title=title, title_align="left", border_style="dim")
        return Group(self._traffic(), panel)

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
            f"[red]{log.count('failed')}[/] failed",
            f"[yellow]{log.open_count()}[/] open, oldest {waiting}",
        )
        return table

"""The demo as it happens: the story line by line, and below it the loop's stage and the clients.

For: `incident_demo.py`. Told lines stay, so that the whole story can be read again when it is over;
where there is no screen they are all there is. Not for: making anything happen.
"""

import time
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.drills.drill import Scene

BARS = "▁▂▃▄▅▆▇█"
SECONDS_SHOWN = 30
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

UNTOLD = ("restart", "repair")
"""Events that other lines have told already."""
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
    "plan": "≡",
    "proof": "✓",
    "report": "✎",
    "failed": "!",
}


@dataclass
class Story:
    """What is being told, and the scene whose traffic is drawn once it exists."""

    console: Console
    began: float = field(default_factory=time.monotonic)
    scene: Scene | None = None
    live: bool = False
    """Whether a screen shows the state below the story."""
    stage: str = ""
    stuck: str | None = None
    """The session whose request was told as stuck."""

    def tell(self, kind: str, text: str) -> None:
        """Say a line; it stays on the screen."""
        at = time.monotonic() - self.began
        self.stage = STAGE_OF.get(kind, self.stage)
        if kind in UNTOLD:
            return
        symbol, style = SYMBOLS.get(kind, " "), STYLES.get(kind, "")
        if self.live:
            line = Table.grid(padding=(0, 1))
            line.add_column(justify="right", style="dim", min_width=7, no_wrap=True)
            line.add_column(no_wrap=True)
            line.add_column()
            line.add_row(f"{at:.1f} s", Text(symbol, style=style), Text(text, style=style))
            self.console.print(line)
        else:
            line_text = Text(f"{at:6.1f} s  {symbol} ", style="dim")
            self.console.print(line_text.append(text, style=style), soft_wrap=True)

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

    def __rich__(self) -> RenderableType:
        """Draw the present state; called by Rich on every refresh."""
        return Group(Text(""), self._stages(), self._clients())

    def _stages(self) -> Text:
        """The loop, with the stage it is in."""
        line = Text(no_wrap=True).append("the loop  ", style="dim")
        for number, stage in enumerate(STAGES):
            line.append(" → " if number else "", style="dim")
            line.append(stage, style="bold reverse" if stage == self.stage else "dim")
        return line

    def _clients(self) -> Text:
        """Answers a second as a row of bars, newest at the right, and the counts."""
        line = Text(no_wrap=True).append("clients   ", style="dim")
        if self.scene is None:
            return line.append("none yet")
        log, now = self.scene.log, time.time()
        counts = [0] * SECONDS_SHOWN
        for one in log.sent:
            age = int(now - one.ended_at) if one.ended_at is not None else SECONDS_SHOWN
            if one.status == "completed" and age < SECONDS_SHOWN:
                counts[SECONDS_SHOWN - 1 - age] += 1
        top = max(*counts, 1)
        bars = "".join(BARS[count * (len(BARS) - 1) // top] if count else "·" for count in counts)
        oldest = log.oldest_open()
        waiting = f", oldest {now - oldest.sent_at:.0f} s" if oldest else ""
        line.append(bars, style="green")
        line.append(f"  {log.count('completed')} answered", style="green")
        line.append(f"  {log.count('failed')} failed", style="red")
        return line.append(f"  {log.open_count()} open{waiting}", style="yellow")

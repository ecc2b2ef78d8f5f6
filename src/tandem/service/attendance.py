"""Who attends a watch: systemd hears of every turn that ended, and the counts grow.

For: what is said when. A turn that hangs is not said to have ended, so that systemd, which waits
for just that, restarts the watch. Not for: how it is sent (`notify.py`) or counted (`counts.py`).
"""

from tandem.parts import Turn
from tandem.service.counts import Counts
from tandem.service.notify import Notifier, status

NAMED_MOST = 3
"""Findings that the status names."""


class Attendance:
    """Tells systemd and counts, turn by turn."""

    def __init__(self, deployment: str, notifier: Notifier, counts: Counts) -> None:
        """Nothing is told before the first turn has ended: until then it is not ready."""
        self._deployment = deployment
        self._notifier = notifier
        self._counts = counts
        self._ready = False
        self._status = ""

    def turned(self, turn: Turn) -> None:
        """Count the turn, and tell that it ended; how it stands only when that has changed."""
        self._counts.turned(turn)
        lines = ["WATCHDOG=1"]
        if not self._ready:
            lines.append("READY=1")
        stands = status(f"{self._deployment}: {standing(turn)}")
        if stands != self._status:
            lines.append(stands)
        if self._notifier.send(*lines):
            self._ready, self._status = True, stands

    def ending(self) -> None:
        """Tell that it was told to stop."""
        said = status(f"{self._deployment}: ending what is under way")
        self._notifier.send("STOPPING=1", said)


def standing(turn: Turn) -> str:
    """How it stands after a turn, in one clause."""
    if not turn.looked:
        return "blind: looks break, and the watching goes on"
    if not turn.findings:
        return "watched, nothing found"
    named = ", ".join(f"{one.kind} on {one.subject}" for one in turn.findings[:NAMED_MOST])
    more = len(turn.findings) - NAMED_MOST
    return f"found {named}" + (f" and {more} more" if more > 0 else "")


__all__ = ["Attendance", "standing"]

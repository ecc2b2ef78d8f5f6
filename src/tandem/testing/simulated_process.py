"""The process behind a simulated member: its lives, its CPU time, whether it can answer at all.

For: what the process collector would see, and when HTTP answers. Not for: requests.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tandem.testing.fleet import Fleet

Answers = Literal["refused", "silent", "starting", "yes"]
"""What HTTP does: no listener, no answer, an answer of 503, an answer."""
HEALTH_CPU_S = 0.01
IDLE_CORES = 0.015


class SimulatedProcess:
    """One member's process, restarted under the same name."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        """It runs since long ago."""
        self.fleet = fleet
        self.name = name
        self.life = 1
        self.started_at = fleet.now - 86_400.0
        self.ready_at = self.started_at
        self.listens_at = self.started_at
        self.alive = True
        self.stopped = False
        """Held by SIGSTOP."""
        self.exit: int | None = None
        self._cpu_s = 0.0
        self._busy_since: float | None = None
        self._cpu_at = fleet.now

    @property
    def life_id(self) -> str:
        """The incarnation, as the process collector writes it."""
        return f"{self.fleet.pid_of(self.name, self.life)}:{int(self.started_at * 100) % 10**9}"

    @property
    def pid(self) -> int:
        """The process id of the present life."""
        return self.fleet.pid_of(self.name, self.life)

    def answers(self) -> Answers:
        """What a request over HTTP meets now."""
        if not self.alive or self.fleet.now < self.listens_at:
            return "refused"
        if self.stopped:
            return "silent"
        return "yes" if self.fleet.now >= self.ready_at else "starting"

    @property
    def runs(self) -> bool:
        """Whether it is up and not held."""
        return self.alive and not self.stopped and self.fleet.now >= self.ready_at

    def busy(self, *, cores: bool) -> None:
        """It begins, or stops, to use a core."""
        self.cpu_s()
        self._busy_since = self.fleet.now if cores else None

    def cpu_s(self) -> float:
        """CPU seconds of this life."""
        now = self.fleet.now
        if self.alive and not self.stopped:
            cores = 0.95 if self._busy_since is not None else IDLE_CORES
            if now < self.ready_at:
                cores = 0.9
            self._cpu_s += (now - self._cpu_at) * cores
        self._cpu_at = now
        return self._cpu_s

    def began(self, load_s: float, warm_s: float) -> None:
        """A new life."""
        self.life += 1
        self.started_at = self.fleet.now
        self.listens_at = self.started_at + load_s
        self.ready_at = self.listens_at + warm_s
        self.alive, self.stopped, self.exit = True, False, None
        self._cpu_s, self._cpu_at, self._busy_since = 0.0, self.fleet.now, None

    def ended(self, status: int = 0) -> None:
        """The life is over."""
        self.cpu_s()
        self.alive, self.exit = False, status


__all__ = ["Answers", "SimulatedProcess"]

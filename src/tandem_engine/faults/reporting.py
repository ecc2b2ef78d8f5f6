"""Faults of what a worker says of itself: health, gauges, counters.

For: the switches, their texts, and what the mechanisms remember.
Not for: the numbers (`metrics.py`, `info.py`).
"""

from typing import Literal

from tandem_engine.faults.family import Family, Switches, Text
from tandem_engine.metrics import Metrics


class ReportingSwitches(Switches, frozen=True):
    """The switches of this family."""

    health: Literal["honest", "always_green", "own_probe_only"] = "honest"
    gauges: Literal["written", "frozen"] = "written"
    failure_counters: Literal["wired", "unwired"] = "wired"


class ReportingFaults(Family[ReportingSwitches]):
    """The family in one worker."""

    name = "reporting"
    kind = ReportingSwitches
    catalogue = {
        "health=always_green": Text(
            "Once started, /health and /health_generate answer 200 at once and compute nothing, "
            "dead or alive (SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false): "
            "realtime_tokens_total no longer moves by probes.",
            "Nothing to heal: do not trust it; ask for a token of your own.",
        ),
        "health=own_probe_only": Text(
            "/health counts only its own probe's output, and on a prefill that waits behind the "
            "chunks of running prompts: 503 after SGLANG_HEALTH_CHECK_TIMEOUT during a long "
            "prefill, with SGLang's line, while realtime_tokens_total rises and requests end well.",
            "Waiting; a longer health timeout. A restart loses the prompt and heals nothing.",
        ),
        "gauges=frozen": Text(
            "Every gauge of the scheduler on /metrics keeps the value it had, whatever happens; "
            "counters and histograms move, /v1/loads is live.",
            "An engine that writes them; /v1/loads meanwhile. After a restart they are not on the "
            "page at all. Nothing else is wrong.",
        ),
        "failure_counters=unwired": Text(
            "num_transfer_failed_reqs_total and num_bootstrap_failed_reqs_total stay where they "
            "are (0, as a rule) while rooms fail with SGLang's log lines and errors.",
            "An engine that counts them; believe the log and the clients meanwhile.",
        ),
    }

    def __init__(self) -> None:
        """Everything off."""
        super().__init__()
        self._metrics: Metrics | None = None

    def bind(self, metrics: Metrics) -> None:
        """Act on the numbers of this worker."""
        self._metrics = metrics
        self.turn(self.switches)

    def turn(self, switches: ReportingSwitches) -> None:
        """Freeze or thaw, wire or unwire."""
        super().turn(switches)
        if self._metrics is not None:
            self._metrics.frozen = switches.gauges == "frozen"
            wired = switches.failure_counters == "wired"
            for counter in (self._metrics.transfer_failed, self._metrics.bootstrap_failed):
                counter.wired = wired

    @property
    def always_green(self) -> bool:
        """Whether `/health` answers 200 without asking the scheduler."""
        return self.switches.health == "always_green"

    @property
    def own_probe_only(self) -> bool:
        """Whether the output of others says nothing about health."""
        return self.switches.health == "own_probe_only"

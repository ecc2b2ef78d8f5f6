"""What became of a repair in real traffic, after its proof."""

from tandem.records.record import Record


class Milestone(Record, frozen=True, kw_only=True):
    """How a repair stood so long after its proof, as far as somebody watched.

    `requests` are those that its decodes finished meanwhile, our own probes taken off; None when no
    counter said so. `restarts` are those of its members since: what held then is not the repair
    alone.
    """

    after_s: float
    watched_s: float
    requests: int | None
    restarts: int = 0


class Aftermath(Record, frozen=True, kw_only=True):
    """Whether it held or came back, from the end of the proof (`since`, unix seconds) on."""

    since: float
    held: tuple[Milestone, ...] = ()
    recurred_at: float | None = None
    """The onset of the finding that is the same again."""
    recurred_as: str | None = None
    """The incident of that."""

    @property
    def statements(self) -> int:
        """How many things it says; a report that tells fewer is out of date."""
        return len(self.held) + (self.recurred_at is not None)


class Tally(Record, frozen=True, kw_only=True):
    """What has been counted since a proof, kept beside the incident between two looks.

    `counters` has the newest value of each counter with the life it belongs to, so that whoever
    goes on counts what came since, once.
    """

    watched_s: float = 0.0
    looked_at: float | None = None
    requests: float = 0.0
    probes: float = 0.0
    counted: bool = False
    """Whether any counter of requests was ever seen."""
    counters: dict[str, tuple[str, float]] = {}

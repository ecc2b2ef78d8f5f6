"""Every error Tandem raises on purpose, as one tree, with the exit status of each family.

TandemError
├── ConfigError (3)         yours to fix: tandem.toml, a flag, an impossible topology
├── WorldError (4)          the world refused: a port in use, a missing model, a dead member
│   └── DependencyError (4) something this machine lacks: git, the router wheel, ptrace
├── RefusedError (5)        Tandem would not: policy, a safety rule, another repair under way
├── NotProvenError (6)      it was done, but the proof fell short: verify, demo, drill
├── InterruptedByUser (130) SIGINT, ended cleanly
└── Bug (70)                ours: please report it with the bundle

Not for: failures to observe. Those are records (`Observation.missing`), never exceptions.
"""


class TandemError(Exception):
    """Base of the tree: what happened, to what, and the next thing to do.

    `message` is one sentence; `next_step` is one imperative sentence.
    """

    exit_status: int = 1

    def __init__(self, message: str, *, next_step: str) -> None:
        """Keep both sentences; `str(error)` joins them."""
        super().__init__(f"{message} {next_step}")
        self.message = message
        self.next_step = next_step

    @property
    def clause(self) -> str:
        """Both sentences as one clause: how an observation says why it is missing."""
        then = self.next_step[:1].lower() + self.next_step[1:].rstrip(".")
        return f"{self.message.rstrip('.')}: {then}"


class ConfigError(TandemError):
    """The configuration is wrong; names the key, the value and the fix."""

    exit_status = 3


class WorldError(TandemError):
    """The world refused: unreachable, in use, dead, full."""

    exit_status = 4


class DependencyError(WorldError):
    """Something this machine lacks and the task needs."""


class RefusedError(TandemError):
    """Tandem declined on purpose; says which rule and how to change it."""

    exit_status = 5


class NotProvenError(TandemError):
    """The work was done but what it had to show did not happen."""

    exit_status = 6


class InterruptedByUser(TandemError):  # noqa: N818 - an interruption is not a fault
    """The person pressed Ctrl-C; everything started here was put away."""

    exit_status = 130


class Bug(TandemError):  # noqa: N818 - named for what it is
    """An invariant of Tandem broke: our fault, never the user's."""

    exit_status = 70

    def __init__(self, message: str) -> None:
        """A bug has one next step: report it."""
        super().__init__(message, next_step="This is a bug in Tandem: please report it.")

"""What `tandem status` says: one headline a tired person can act on, then the members."""

from tandem.records.record import Record


class MemberStatus(Record, frozen=True, kw_only=True):
    """One member as it is now."""

    name: str
    role: str
    state: str
    """up, down, unreachable."""
    since: float | None
    incarnation: str | None
    process: str | None = None
    """State of its process, the letter of `ps` (R S D T Z); None when that was not seen."""
    process_since: float | None = None
    """Since when it is in that state, as far as a watch has seen it."""
    detail: str = ""


class Status(Record, frozen=True, kw_only=True):
    """The state of a deployment in one line, and what each member does.

    `state`: down, partly-down, unwatched, serving, sick, repairing, interrupted (a
    repair has no end). `never` is the one thing not to do now.
    """

    deployment: str
    state: str
    since: float | None
    summary: str
    next_command: str
    never: str
    members: tuple[MemberStatus, ...]
    incident: str | None = None

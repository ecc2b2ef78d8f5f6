"""How a deployment's state looks: one line to act on, then a line per member.

For: `status`. Not for: finding out.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.times import ago, when
from tandem.cli.show.words import LOUD, QUIET, STYLES, rows, spoken, styled
from tandem.processes import HELD
from tandem.records import MemberStatus, Status, life_name


def status_view(status: Status, now: float) -> Group:
    """Show the state: its first line says state, since when, the next command, what not to do."""
    first = Text.assemble(
        (spoken(status.state), f"{LOUD} {STYLES.get(status.state, '')}".strip()),
        f" since {when(status.since, now)}" if status.since is not None else "",
        f"; next: {status.next_command}" if status.next_command else "",
        f"; {status.never}" if status.never else "",
        # One line, however long: it is what scripts and tired eyes read first.
        no_wrap=True,
        overflow="ignore",
    )
    listed = [_member(member, now) for member in status.members]
    named = status.summary.startswith(status.deployment)
    summary = status.summary if named else f"{status.deployment}: {status.summary}"
    parts: list[RenderableType] = [first, Text(summary)]
    if status.incident:
        parts.append(Text(f"incident {status.incident}: tandem incidents show {status.incident}"))
    if listed:
        parts += [Text(""), rows("member", "role", "state", "since", "life", "", of=listed)]
    return Group(*parts)


def _member(member: MemberStatus, now: float) -> tuple[RenderableType, ...]:
    return (
        member.name,
        member.role,
        styled(member.state),
        "-" if member.since is None else ago(member.since, now),
        Text(life_name(member.incarnation or "-"), style=QUIET),
        Text("; ".join(filter(None, (_process(member, now), member.detail)))),
    )


def _process(member: MemberStatus, now: float) -> str:
    """What holds a process that cannot serve, and since when; else nothing."""
    held = HELD.get(member.process or "")
    if held is None:
        return ""
    since = "" if member.process_since is None else f" since {when(member.process_since, now)}"
    return f"its process {held}{since}"

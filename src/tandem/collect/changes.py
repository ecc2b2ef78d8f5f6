"""The ledger: what changed of a member from one life to the next, read from what was collected.

For: rows restart, start, stop, flag, env with before, after and the component they touch.
Not for: judging a change (diagnose), or looking at anything itself: it reads harvests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.facts import Facts
from tandem.ports import Harvest
from tandem.records import Change, Observation
from tandem.records import vocabulary as v

REDACTED = "<redacted>"
"""What the store shows of a secret; equal to anything, because it says nothing."""


@dataclass(slots=True)
class Known:
    """What is known of one member: its life, and how that life was started."""

    incarnation: str | None = None
    started_at: float = 0.0
    alive: bool = False
    command_line: tuple[str, ...] | None = None
    environment: dict[str, str] | None = None
    server_args: dict[str, str] | None = None


@dataclass(slots=True)
class _Book:
    """One member's page: its present life, and the one before for comparing."""

    now: Known
    before: Known | None = None


class Ledger:
    """Compares each harvest with what was known and writes a row for each difference."""

    def __init__(
        self,
        last_known: Callable[[str], Known | None] = lambda _: None,
        touches: Mapping[str, str] | None = None,
    ) -> None:
        """`last_known` gives what the store knew of a member before this Tandem started.

        `touches` maps a flag or variable to its component; traits of the harvests add to it.
        """
        self._last_known = last_known
        self._touches = dict(touches or {})
        self._books: dict[str, _Book] = {}

    def read(self, harvest: Harvest) -> tuple[Change, ...]:
        """The rows that one harvest adds, oldest first."""
        for trait in harvest.traits:
            if trait.name == v.T_TOUCHES and isinstance(trait.value, str):
                self._touches[trait.label] = trait.value
        rows: list[Change] = []
        for member, seen in _by_member(harvest.observations).items():
            rows += self._lives(member, seen)
            rows += self._starts(member, seen)
        return tuple(sorted(rows, key=lambda row: row.at))

    def _book(self, member: str) -> _Book:
        if member not in self._books:
            self._books[member] = _Book(self._last_known(member) or Known())
        return self._books[member]

    def _lives(self, member: str, seen: Sequence[Observation]) -> Iterator[Change]:
        """Rows for a life that began or ended."""
        book = self._book(member)
        for one in seen:
            if one.name == v.STARTED_AT and one.incarnation:
                started_at = float(one.value) if isinstance(one.value, int | float) else one.at
                if one.incarnation != book.now.incarnation:
                    yield self._began(member, book, one.incarnation, started_at)
                book.now.alive = True
            elif one.name == v.ALIVE and one.value is False and book.now.alive:
                book.now.alive = False
                yield Change(
                    at=one.at,
                    subject=member,
                    kind="stop",
                    before=book.now.incarnation,
                    how_known="its process is gone",
                    incarnation=book.now.incarnation,
                )

    def _began(self, member: str, book: _Book, incarnation: str, started_at: float) -> Change:
        earlier = book.now
        book.before = earlier if earlier.incarnation else None
        book.now = Known(incarnation=incarnation, started_at=started_at, alive=True)
        return Change(
            at=started_at,
            subject=member,
            kind="restart" if book.before else "start",
            before=earlier.incarnation,
            after=incarnation,
            how_known="its process is another than before" if book.before else "first seen",
            incarnation=incarnation,
        )

    def _starts(self, member: str, seen: Sequence[Observation]) -> Iterator[Change]:
        """Rows for flags, variables and server arguments that differ from the life before."""
        book = self._book(member)
        for one in seen:
            if one.missing is not None or (
                one.incarnation is not None and one.incarnation != book.now.incarnation
            ):
                continue
            if one.name == v.COMMAND_LINE and isinstance(one.value, tuple):
                yield from self._command_line(member, book, one.value)
        yield from self._environment(member, book, seen)
        yield from self._server_args(member, book, seen)

    def _command_line(self, member: str, book: _Book, words: tuple[str, ...]) -> Iterator[Change]:
        first, book.now.command_line = book.now.command_line is None, words
        if not first or book.before is None or book.before.command_line is None:
            return
        before, after = flags(book.before.command_line), flags(words)
        for name in sorted(before.keys() | after.keys()):
            yield from self._differs(member, book, "flag", name, (before, after))

    def _environment(
        self, member: str, book: _Book, seen: Sequence[Observation]
    ) -> Iterator[Change]:
        rows = [one for one in seen if one.name == v.ENVIRONMENT]
        if not rows or book.now.environment is not None or any(one.missing for one in rows):
            return
        # A row without a label says: looked, and there is none that may be shown.
        present = {one.label: str(one.value) for one in rows if one.label}
        book.now.environment = present
        if book.before is None or book.before.environment is None:
            return
        both = (book.before.environment, present)
        for name in sorted(both[0].keys() | both[1].keys()):
            yield from self._differs(member, book, "env", name, both)

    def _server_args(
        self, member: str, book: _Book, seen: Sequence[Observation]
    ) -> Iterator[Change]:
        """Arguments the command line does not show: defaults that moved with the version."""
        present = {
            one.label: str(one.value)
            for one in seen
            if one.name == v.SERVER_ARG and one.label and one.missing is None
        }
        if not present or book.now.server_args is not None:
            return
        book.now.server_args = present
        if book.before is None or book.before.server_args is None:
            return
        both = (book.before.server_args, present)
        lines = (book.before.command_line or (), book.now.command_line or ())
        told = {flag for line in lines for flag in flags(line)}
        # Only what both said: a server that still loads does not know its defaults yet.
        for name in sorted(both[0].keys() & both[1].keys()):
            flag = "--" + name.replace("_", "-")
            if flag not in told:
                kind = "package" if name == "version" else "flag"
                yield from self._differs(member, book, kind, name, both, shown=flag)

    def _differs(
        self,
        member: str,
        book: _Book,
        kind: str,
        name: str,
        both: tuple[Mapping[str, str], Mapping[str, str]],
        *,
        shown: str | None = None,
    ) -> Iterator[Change]:
        before, after = (side.get(name) for side in both)
        if before == after or any(REDACTED in (side or "") for side in (before, after)):
            return
        what = shown or name
        yield Change(
            at=book.now.started_at,
            subject=member,
            kind=kind,
            what=what,
            before=before,
            after=after,
            how_known="compared with the life before",
            incarnation=book.now.incarnation,
            touches=self._touches.get(what, self._touches.get(name, "unknown")),
        )


def known_from(facts: Facts, member: str) -> Known | None:
    """What stored facts know of a member's last life: what a new `Ledger` begins with."""
    life = facts.incarnation(member)
    if life is None:
        return None

    def of_life(name: str) -> dict[str, Observation]:
        rows = ((label, facts.latest(member, name, label)) for label in facts.labels(member, name))
        return {
            label: seen for label, seen in rows if seen is not None and seen.incarnation == life.id
        }

    words = of_life(v.COMMAND_LINE).get("")
    variables, args = of_life(v.ENVIRONMENT), of_life(v.SERVER_ARG)
    stopped = any(row.incarnation == life.id for row in facts.changes_of(member, "stop"))
    return Known(
        incarnation=life.id,
        started_at=life.started_at,
        alive=not stopped,
        command_line=words.value if words and isinstance(words.value, tuple) else None,
        # The row without a label says that there was none to show: that is known as well.
        environment={label: str(seen.value) for label, seen in variables.items() if label}
        if variables
        else None,
        server_args={label: str(seen.value) for label, seen in args.items()} or None,
    )


def flags(words: Sequence[str]) -> dict[str, str]:
    """A command line as flag to value: a switch has "", repeated flags are joined.

    Words before the first flag (the interpreter, the module) are under `argv`.
    """
    found: dict[str, str] = {}
    flag = "argv"
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found[flag] = " ".join(filter(None, (found.get(flag), value)))
        else:
            found[flag] = " ".join(filter(None, (found.get(flag), word)))
    return found


def _by_member(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    names = (v.STARTED_AT, v.ALIVE, v.COMMAND_LINE, v.ENVIRONMENT, v.SERVER_ARG)
    found: dict[str, list[Observation]] = {}
    for seen in observations:
        if seen.name in names:
            found.setdefault(seen.subject, []).append(seen)
    return found


__all__ = ["Known", "Ledger", "flags", "known_from"]

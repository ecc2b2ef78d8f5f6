"""What every family of faults is made of: switches, a catalogue, and the mechanisms' memory.

A family is one file of this package. Its switches are the fields of one frozen struct, whose
defaults mean "off"; its catalogue says of each what it looks like from outside and what heals it;
its `Family` object holds the present switches and answers the questions the engine asks at the
place where the real fault acts.

For: the files of this package.
Not for: which families there are (`__init__.py`).
"""

from collections.abc import Mapping
from typing import ClassVar, Generic, NamedTuple, TypeVar

import msgspec


class Text(NamedTuple):
    """One fault in the catalogue."""

    looks: str
    """What an operator sees: HTTP, metrics, `/v1/loads`, logs, processes."""
    heals: str
    """The cure a real operator has; switching it off is always another."""


class Switches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The switches of one family; every default means off, and what is off is not shown."""


S = TypeVar("S", bound=Switches)


class Family(Generic[S]):
    """One family: its present switches, read from any thread, and what its mechanisms remember.

    A subclass names its switches (`kind`) and its catalogue. A key of the catalogue is the name of
    a switch, or `name=value` for each value of a `Literal` switch but its default.
    """

    name: ClassVar[str]
    kind: ClassVar[type[Switches]]
    catalogue: ClassVar[Mapping[str, Text]]

    switches: S

    def __init__(self) -> None:
        """Everything off."""
        self.switches = self.kind()  # type: ignore[assignment]  # `kind` is the `S` of a subclass

    @staticmethod
    def shown(switches: Switches) -> dict[str, object]:
        """What of these switches is on, by name."""
        off = type(switches)()
        # By value: what msgspec omits as a default is the same object, which no other 0.0 is.
        named = msgspec.structs.asdict(switches)
        return {name: value for name, value in named.items() if value != getattr(off, name)}

    def turn(self, switches: S) -> None:
        """Take other switches; a mechanism that remembers or holds something lets go here."""
        self.switches = switches

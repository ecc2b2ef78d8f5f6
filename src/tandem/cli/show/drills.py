"""How the list of drills looks.

For: `drill --list`. Not for: running or scoring one.
"""

from collections.abc import Sequence
from typing import Protocol

from rich.console import RenderableType
from rich.text import Text

from tandem.cli.show.words import rows


class Listed(Protocol):
    """What the list needs of a drill."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def about(self) -> str:
        """What it rehearses, in one sentence."""

    @property
    def stall_expected(self) -> bool:
        """False for near misses and controls."""


def drills_view(drills: Sequence[Listed]) -> RenderableType:
    """Show one drill a line, and whether anything should be found in it."""
    listed = [
        (one.name, "a stall" if one.stall_expected else "nothing", Text(one.about))
        for one in drills
    ]
    return rows("drill", "to be found", "what happens", of=listed)

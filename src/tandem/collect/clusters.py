"""Which ranks of one engine stand at the same place, and who stands elsewhere.

For: turning the stacks of many ranks into a few places, each with its ranks, and one sentence that
a person can read. Not for: taking stacks (`stacks.py`), or judging what a place means.

Ranks of one engine run the same program, so those that wait for each other show the same frames.
Lines differ by an instruction or two and are no part of a place. The rank that lives inside the
serving process is reached by other callers than its fellows: it belongs to a place when its
innermost frames are those of that place, up to the file they are in.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

FRAMES_COMPARED = 8
FRAMES_SHOWN = 4
RANKS_NAMED = 16


class Frame(NamedTuple):
    """One frame: its function as py-spy names it, its file, its line."""

    function: str
    file: str
    line: int

    @property
    def place(self) -> tuple[str, str]:
        """What two ranks at the same place have in common: bare function and file."""
        return self.function.rpartition(".")[2], self.file


class Rank(NamedTuple):
    """Where one rank stands, innermost first; `serves` when it is in the serving process."""

    name: str
    frames: tuple[Frame, ...]
    serves: bool = False


class Cluster(NamedTuple):
    """Ranks at one place."""

    ranks: tuple[str, ...]
    frames: tuple[Frame, ...]

    @property
    def where(self) -> str:
        """The place in words: `all_gather (collective.py:120) < forward (follower.py:88)`."""
        shown = self.frames[:FRAMES_SHOWN]
        return " < ".join(f"{one.function} ({one.file}:{one.line})" for one in shown) or "no frame"


def clustered(ranks: Sequence[Rank]) -> tuple[Cluster, ...]:
    """The places at which ranks stand, the fullest first."""
    places: dict[tuple[tuple[str, str], ...], list[Rank]] = defaultdict(list)
    ordered = sorted(ranks)
    for rank in (one for one in ordered if not one.serves):
        places[_places(rank.frames)[:FRAMES_COMPARED]].append(rank)
    for rank in (one for one in ordered if one.serves):
        inner = _innermost(rank.frames)
        same = [key for key in places if inner and key[: len(inner)] == inner]
        best = max(same, key=lambda key: len(places[key]), default=None)
        places[_places(rank.frames)[:FRAMES_COMPARED] if best is None else best].append(rank)
    found = [
        Cluster(tuple(sorted(one.name for one in group)), group[0].frames)
        for group in places.values()
    ]
    return tuple(sorted(found, key=lambda one: (-len(one.ranks), one.ranks)))


def told(clusters: Sequence[Cluster], unseen: Sequence[str] = ()) -> str:
    """One sentence: where most ranks are, who is elsewhere and where, who could not be seen."""
    count = sum(len(one.ranks) for one in clusters)
    said = []
    if clusters:
        first, *others = clusters
        share = "all" if not others else f"{len(first.ranks)} of"
        said.append(f"{share} {count} ranks ({_named(first.ranks)}) are in {first.where}")
        for one in others:
            verb = "is" if len(one.ranks) == 1 else "are"
            said.append(f"{_named(one.ranks)} {verb} elsewhere: in {one.where}")
    if unseen:
        said.append(f"{_named(unseen)} could not be seen")
    return "; ".join(said)


def _places(frames: Sequence[Frame]) -> tuple[tuple[str, str], ...]:
    return tuple(one.place for one in frames)


def _innermost(frames: Sequence[Frame]) -> tuple[tuple[str, str], ...]:
    """The innermost frames as far as they stay in one file."""
    found = []
    for frame in frames[:FRAMES_COMPARED]:
        if frame.file != frames[0].file:
            break
        found.append(frame.place)
    return tuple(found)


def _named(names: Sequence[str]) -> str:
    more = len(names) - RANKS_NAMED
    return ", ".join(names[:RANKS_NAMED]) + (f" and {more} more" if more > 0 else "")

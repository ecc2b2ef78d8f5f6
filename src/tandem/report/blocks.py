"""What a report is made of: paragraphs, lists and tables of text that is only ever text.

For: the seam between what a report says (`sections.py`) and how it looks (`markdown.py`,
`page.py`): nothing in here can become markup, because both renderers escape everything.
Not for: any wording.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Code(NamedTuple):
    """Text exactly as it was seen: a value, a flag, a log line."""

    exact: str


class Strong(NamedTuple):
    """Text that carries the line."""

    said: str


class Cite(NamedTuple):
    """A reference to one piece of sealed evidence."""

    evidence: int


Inline = str | Code | Strong | Cite
Text = tuple[Inline, ...]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph."""

    text: Text


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list; numbered where the order means something."""

    items: tuple[Text, ...]
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table: a heading per column, and rows of as many cells."""

    head: tuple[str, ...]
    rows: tuple[tuple[Text, ...], ...]


Block = Paragraph | Bullets | Table


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of the report."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The whole report of one incident: a title, the short answers, the sections."""

    title: str
    summary: tuple[Block, ...]
    sections: tuple[Section, ...]


CITED = re.compile(r"\s*\[e(\d{1,18})\]")

# Invisible and direction-changing characters make text look like what it is not.
UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+")


def prose(sentence: str) -> Text:
    """A sentence of a record as text; its `[e12]` become citations."""
    parts: list[Inline] = []
    place = 0
    for match in CITED.finditer(sentence):
        parts += [sentence[place : match.start()], Cite(int(match.group(1)))]
        place = match.end()
    parts.append(sentence[place:])
    return tuple(part for part in parts if part != "")


def cites(evidence: Sequence[int], most: int = 4) -> Text:
    """Citations, the first few of them: a report points at evidence, it does not list it all."""
    shown = tuple(Cite(number) for number in evidence[:most])
    return (*shown, f" and {len(evidence) - most} more") if len(evidence) > most else shown


def one_line(text: str) -> str:
    """The same words on one line, without characters that cannot be seen."""
    return " ".join(UNSEEN.sub(" ", text).split())


def cited_in(page: Page) -> tuple[int, ...]:
    """Every piece of evidence the page points at, ascending."""
    texts = [text for block in page.summary for text in _texts(block)]
    texts += [
        text for section in page.sections for block in section.blocks for text in _texts(block)
    ]
    parts = [part for text in texts for part in text]
    return tuple(sorted({part.evidence for part in parts if isinstance(part, Cite)}))


def _texts(block: Block) -> list[Text]:
    if isinstance(block, Paragraph):
        return [block.text]
    if isinstance(block, Bullets):
        return list(block.items)
    return [cell for row in block.rows for cell in row]

"""A page as Markdown (GitHub's kind): one section of the living document.

For: escaping, so that a log line, a hunch or a flag can never become a heading, a link or HTML.
Not for: what is said (`sections.py`).
"""

import re

from tandem.report.blocks import (
    UNSEEN,
    Block,
    Bullets,
    Cite,
    Code,
    Inline,
    Page,
    Paragraph,
    Strong,
    Text,
    one_line,
)

ADDRESS = re.compile(r"://|www\.|@")
"""Words with this in them some renderers make a link or a mention: they are shown as code."""
MARKUP = re.compile(r"[\\`*\[\]<|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
ENTITY = re.compile(r"&(?=#?\w+;)")
BLANKS = re.compile(r"\s+")
LEADING = re.compile(r"^([#>+=\[-]|\d+(?=[.)]))")


def markdown(page: Page) -> str:
    """The section: a level-2 heading, then the parts under level-3 headings."""
    parts = [f"## {_escaped(page.title)}", *(_block(block) for block in page.summary)]
    for section in page.sections:
        parts.append(f"### {_escaped(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Paragraph):
        return _guarded(_text(block.text))
    if isinstance(block, Bullets):
        marks = (f"{place}." if block.numbered else "-" for place in range(1, 10_000))
        lines = (
            f"{mark} {_guarded(_text(item))}"
            for mark, item in zip(marks, block.items, strict=False)
        )
        return "\n".join(lines)
    rows = [f"| {' | '.join(_text(cell, cell=True) for cell in row)} |" for row in block.rows]
    if not rows:
        return ""
    head = f"| {' | '.join(_escaped(title) for title in block.head)} |"
    return "\n".join([head, "|" + " --- |" * len(block.head), *rows])


def _text(text: Text, *, cell: bool = False) -> str:
    joined = ""
    for part in text:
        written = _inline(part, cell=cell)
        # A citation stands apart from the word before it.
        apart = isinstance(part, Cite) and joined and not joined.endswith((" ", "("))
        joined += f" {written}" if apart else written
    return joined


def _inline(part: Inline, *, cell: bool) -> str:
    if isinstance(part, Cite):
        return f"[e{part.evidence}]"
    if isinstance(part, Strong):
        return f"**{_escaped(part.said)}**" if part.said.strip() else ""
    if isinstance(part, Code):
        return _code(part.exact, cell=cell)
    # Where addresses stand, code spans stand; what is between them is escaped.
    words = re.split(r"(\s+)", part)
    return "".join(
        _code(word, cell=cell) if ADDRESS.search(word) else _escaped(word) for word in words
    )


def _escaped(text: str) -> str:
    line = BLANKS.sub(" ", UNSEEN.sub(" ", text))
    line = ENTITY.sub("&amp;", line)
    return MARKUP.sub(lambda match: "&lt;" if match.group() == "<" else f"\\{match.group()}", line)


def _guarded(line: str) -> str:
    """A line that cannot start a heading, a quote or a list of its own."""
    return LEADING.sub(lambda match: _leading(match.group()), line.lstrip())


def _leading(mark: str) -> str:
    return f"{mark}\\" if mark[0].isdigit() else f"\\{mark}"


def _code(exact: str, *, cell: bool) -> str:
    shown = one_line(exact)
    if not shown:
        return "(empty)"
    if cell:
        # An escaped bar after a backslash would end the cell: that one is shown as a broken bar.
        shown = shown.replace("\\|", "\\¦").replace("|", "\\|")
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"

"""Where words appear: answers on stdout, progress on stderr, colour only on a terminal.

For: the one object through which every word speaks. Not for: how a record looks (`cli/show`).
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from tandem.visible import visible

PIPED_COLUMNS = 120
"""Width when nobody's terminal gives one; COLUMNS overrides it."""


class _Console(Console):
    """A console on which only Tandem's own styles can move or colour anything."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as Rich does; text that came from outside loses what is not shown."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def _console(*, stderr: bool) -> Console:
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPED_COLUMNS
    return console


class Screen:
    """One word's stdout and stderr; with `json` only the record itself goes to stdout."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._out = _console(stderr=False)
        self._err = _console(stderr=True)
        self._progress: Progress | None = None

    def show(self, *views: RenderableType) -> None:
        """Print views on stdout, one below the other; nothing under `--json`."""
        if self.json:
            return
        with self._out.capture() as drawn:
            for view in views:
                self._out.print(view, crop=False)
        # Views pad their lines to the width of the screen: no pipe and no transcript wants that.
        self._out.file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))

    def line(self, text: str) -> None:
        """Print one line on stdout at once, never wrapped: a log somebody follows."""
        self._out.print(text, soft_wrap=True)
        self._out.file.flush()

    def answer(self, record: object, *views: RenderableType) -> None:
        """Give a word's result: the record as JSON under `--json`, else its views."""
        if self.json:
            sys.stdout.write(json_text(record))
        else:
            self.show(*views)

    def tell(self, sentence: str) -> None:
        """Say one sentence of progress on stderr; this is the `tell` of every stage."""
        self._err.print(sentence, soft_wrap=True)
        if self._progress is not None:
            for task in self._progress.task_ids:
                self._progress.update(task, description=sentence)

    @contextmanager
    def working(self, sentence: str) -> Iterator[None]:
        """Show on stderr that something goes on: alive and timed on a terminal, said once else."""
        if not self._err.is_terminal:
            self._err.print(sentence, soft_wrap=True)
            yield
            return
        columns = (SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._err, transient=True) as progress:
            progress.add_task(sentence, total=None)
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None


def json_text(record: object) -> str:
    """Write a record (or several) as indented JSON with a final newline; same record, same text."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"

"""The command line as one application: its groups of words, and how one of them is run.

For: joining the groups, in the order in which an operator needs them. Not for: any word.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from tandem import __version__
from tandem.cli import deployment, exporting, reading, rehearsing, stages, watching
from tandem.cli.help import Words, examples
from tandem.visible import one_line

CTRL_C = 130

app = typer.Typer(
    name="tandem",
    cls=Words,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        ("tandem status", "how it stands, and what to do next"),
        ("tandem investigate --hunch 'overlap schedule'", "something is wrong, and you suspect"),
        ("tandem repair --approve", "do what the newest incident's plan says"),
        ("tandem WORD --help", "every word teaches itself"),
    ),
)
for group in (deployment, watching, exporting, stages, reading, rehearsing):
    group.add_words(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def tandem(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Keep prefill/decode-disaggregated LLM serving honest.

    Tandem brings a deployment up in the right order, notices when it goes silent while every
    health check says 200, finds the cause from evidence, repairs the least that suffices, proves
    the repair and writes it down.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run one word and give its exit status; usage errors are told here and end with 2.

    Raises whatever the word raises (`tandem.errors`), and KeyboardInterrupt.
    """
    command = typer.main.get_command(app)
    try:
        status = command.main(
            args=None if arguments is None else list(arguments),
            prog_name="tandem",
            standalone_mode=False,
        )
    except typer.TyperException as wrong:
        context = getattr(wrong, "ctx", None)
        path = context.command_path if context is not None else "tandem"
        said = one_line(wrong.format_message()).rstrip(".?")
        typer.echo(f"tandem: {said}. `{path} --help` shows how.", err=True)
        return wrong.exit_code
    if status == CTRL_C:
        # The library's own end of an interrupted word, which says nothing.
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0

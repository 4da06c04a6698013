"""The Typer app, and what its subcommands share: user errors, and output on the first rank only."""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from octavo._version import __version__
from octavo.cli.exit_codes import USAGE_ERROR, is_closed
from octavo.cli.options import EXAMPLES
from octavo.runtime.extras import missing
from octavo.runtime.terminal import stderr

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {  # Of verdicts on a pair of runs, and on several seeds
    "within": "bold green", "above": "bold yellow", "below": "bold yellow", "none": "bold red",
    "indistinguishable": "bold green", "better": "bold green", "worse": "bold red", "inconclusive": "bold yellow",
}  # fmt: skip


class _Group(TyperGroup):
    """Shows `COMMAND --help` and completes lines without converting values, for which Typer imports pydantic."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if ctx.resilient_parsing and command is not None:
            _keep_values(command, ctx)
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn a user error into one message and exit code 2."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if is_closed(sys.stdout) or is_closed(sys.stderr):
                raise
            raise RuntimeError("a pipe broke that is neither stdout nor stderr") from error
        except (ValueError, OSError, ModuleNotFoundError) as error:
            if ctx.obj["traceback"]:
                traceback.print_exc()
            elif is_first_rank() or type(error).__name__ != "SharedError":  # the first rank prints it
                show_error(missing(error, "this command") if isinstance(error, ModuleNotFoundError) else str(error))
            raise typer.Exit(USAGE_ERROR) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            _keep_values(self, ctx)
        command = self.commands.get(args[0]) if len(args) == 2 and args[1] in ctx.help_option_names else None
        if command is None:
            return super().parse_args(ctx, args)
        typer.echo(command.get_help(typer.Context(command, info_name=args[0], parent=ctx, **command.context_settings)))
        raise typer.Exit()


def _keep_values(command: Any, ctx: typer.Context) -> None:
    """Leave the words of a command line as they are: completion reads only which parameters they are for."""
    for param in command.get_params(ctx):
        param.process_value = lambda ctx, value: value


app = typer.Typer(
    name="octavo",
    cls=_Group,
    rich_markup_mode=None,  # Rich and its Markdown parser would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def is_first_rank() -> bool:
    """Return whether this is rank 0 of torchrun, or a single process."""
    return os.environ.get("RANK", "0") == "0"


def show_error(message: str) -> None:
    """Print a message on stderr."""
    console = stderr()
    console.print("[bold red]error:[/bold red] ", end="")
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def print_plain(console: "Console", text: str) -> None:
    """Print text without markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_verdict(console: "Console", sentence: str, verdict: str, notes: Sequence[str] = ()) -> None:
    """Print a sentence in the colour of its verdict and, below it, notes."""
    from rich.text import Text

    text = Text(sentence, style=STYLES[verdict])
    for note in notes:
        text.append(f"\n  {note}", style="not bold default")
    console.print(text)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"octavo {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True, epilog=EXAMPLES["octavo"])
def _octavo(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Train PyTorch models in FP8, and measure the effect on loss, speed and memory."""
    context.obj = {"traceback": show_traceback}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # do not fail on encodings without × or …
    if context.invoked_subcommand is None:
        print(context.get_help())

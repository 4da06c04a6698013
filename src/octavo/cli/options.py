"""Arguments and options that commands share, and short forms to declare others."""

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.completion import complete_setting


def in_home(path: Path | None) -> Path | None:
    """Expand ~ in a path of the command line, which a shell does not expand within quotes."""
    try:
        return path and path.expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"{path}: there is no such home directory") from None


def path_argument(name: str, help: str) -> Any:
    """Declare an argument that is a path."""
    return typer.Argument(metavar=name, help=help, show_default=False, callback=in_home)


def path_option(help: str, metavar: str | None = None) -> Any:
    """Declare an option that is a path."""
    return typer.Option(metavar=metavar, help=help, show_default=False, callback=in_home)


def option(help: str, metavar: str | None = None, **settings: Any) -> Any:
    """Declare an option whose help names its default."""
    return typer.Option(metavar=metavar, help=help, show_default=False, **settings)


def flag(name: str, help: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=help)


Config = Annotated[Path, path_argument("CONFIG", "The run's configuration.")]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE", help="Settings to change, as optim.lr=1e-3.", show_default=False,
        autocompletion=complete_setting,
    ),
]  # fmt: skip

Shrink = Annotated[
    bool,
    flag("--shrink", "The same architecture, small, on the source of Python's standard library: for two CPU cores."),
]
AsJson = Annotated[bool, flag("--json", "Print everything as JSON.")]

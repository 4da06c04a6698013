"""Arguments and options that commands share, and short forms to declare others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer


def complete_setting(incomplete: str) -> list[str]:
    """Return the settings that begin so, as `optim.lr=`."""
    return [setting for setting in settings() if setting.startswith(incomplete)]


def settings() -> Iterator[str]:
    """Yield every setting of a configuration in the order of the sections, as `optim.lr=`."""
    # From the source of the sections: importing them takes seconds, for torch.
    folder = Path(__file__).parents[1] / "train" / "config"
    nodes = [node for path in sorted(folder.glob("*.py")) for node in ast.parse(path.read_text(encoding="utf-8")).body]
    yield from _of({node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, "TrainConfig", "")


def _of(classes: dict[str, ast.ClassDef], name: str, prefix: str) -> Iterator[str]:
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign):
            key = f"{prefix}{ast.unparse(node.target)}"
            # A section, which may be left out, or whose settings may differ on resume.
            annotation = ast.unparse(node.annotation).replace("sections.", "")
            kind = re.fullmatch(r"(?:(?:Free|Tunable)\[)?(\w+)(?: \| None)?\]?", annotation)
            if kind and kind[1] in classes:
                yield from _of(classes, kind[1], f"{key}.")
            else:
                yield f"{key}="


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

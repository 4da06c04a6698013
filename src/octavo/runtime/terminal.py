"""Terminal output: tables fit the terminal's width; pipes and files have unlimited width, for `grep` and scripts."""

import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNLIMITED_WIDTH = 100_000  # Console width outside a terminal


def stderr() -> "Console":
    from rich.console import Console

    return Console(stderr=True)


def stdout() -> "Console":
    """Return a console that prints to stdout."""
    from rich.console import Console

    return Console() if _is_terminal() else Console(width=UNLIMITED_WIDTH)


def table(*headings: str, right: tuple[str, ...] = ()) -> "Table":
    """Return an empty table with these headings; the columns in `right` are aligned to the right."""
    from rich.box import ROUNDED
    from rich.table import Table

    shown = Table(box=ROUNDED, border_style="dim", header_style="bold")
    for heading in headings:
        shown.add_column(heading, justify="right" if heading in right else "left")
    return shown


def width() -> int | None:
    """Return the columns of the terminal that shows stdout; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if _is_terminal() else None


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()

"""What is printed for people: to the width of a terminal, and never folded where stdout is none.

A pipe or a file is read by `grep` and scripts, which need each row on one line, so there the width is unlimited. In a
terminal, names that do not fit lose their middle, never an end: `model.layers.{0-31}.self…q_proj`.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

UNLIMITED = 100_000
"""Columns of what is no terminal."""
SHORTEST = 16
"""Characters that are left of a name at least."""


def stdout() -> "Console":
    """A console that prints to stdout."""
    from rich.console import Console

    return Console() if _is_terminal() else Console(width=UNLIMITED)


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def show(*parts: "Table | str") -> None:
    """Print tables and lines to stdout; a table with all of its columns: where names at their shortest leave too little
    room for the others, the terminal folds the lines.
    """
    from rich.table import Table

    for part in parts:
        if isinstance(part, Table):
            _show_table(part)
        else:
            stdout().print(part, markup=False, highlight=False, soft_wrap=True)


def _show_table(table: "Table") -> None:
    from rich.console import Console
    from rich.measure import Measurement

    console, wide = stdout(), Console(width=UNLIMITED)
    names = [len(cell.text) for column in table.columns for cell in column.cells if isinstance(cell, Name)]
    least = Measurement.get(wide, wide.options, table).maximum - max(0, max(names, default=0) - SHORTEST)
    (console if least <= console.width else Console(width=least)).print(table, highlight=False)


def shortened(name: str, width: int) -> str:
    """A name of at most `width` characters, 3 or more: with its middle left out where it is longer."""
    if len(name) <= width:
        return name
    end = width // 2
    return f"{name[: width - 1 - end]}…{name[-end:]}"


@dataclass(frozen=True)
class Name:
    """A name in a table, shortened to the width that its column gets."""

    text: str

    def __rich_measure__(self, console: "Console", options: "ConsoleOptions") -> "Measurement":
        from rich.measure import Measurement

        return Measurement(min(len(self.text), SHORTEST), len(self.text))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text(shortened(self.text, options.max_width), no_wrap=True)

"""Terminal output: tables fit the terminal's width; pipes and files have unlimited width.

`grep` and scripts need each row on one line. In a terminal, long names are shortened in the middle:
`model.layers.{0-31}.self…q_proj`.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

UNLIMITED_WIDTH = 100_000
"""Console width outside a terminal."""
MIN_NAME_WIDTH = 16
"""Minimum characters of a shortened name."""


def stdout() -> "Console":
    """Return a console that prints to stdout."""
    from rich.console import Console

    return Console() if _is_terminal() else Console(width=UNLIMITED_WIDTH)


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def show(*parts: "Table | str") -> None:
    """Print tables and lines to stdout.

    Tables show all columns: if shortened names leave too little room for the others, the terminal wraps lines.
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

    console, wide = stdout(), Console(width=UNLIMITED_WIDTH)
    names = [len(cell.text) for column in table.columns for cell in column.cells if isinstance(cell, Name)]
    least = Measurement.get(wide, wide.options, table).maximum - max(0, max(names, default=0) - MIN_NAME_WIDTH)
    (console if least <= console.width else Console(width=least)).print(table, highlight=False)


def shortened(name: str, width: int) -> str:
    """Shorten a name in the middle to at most `width` characters, 3 or more."""
    if len(name) <= width:
        return name
    end = width // 2
    return f"{name[: width - 1 - end]}…{name[-end:]}"


@dataclass(frozen=True)
class Name:
    """A name in a table, shortened to the width of its column."""

    text: str

    def __rich_measure__(self, console: "Console", options: "ConsoleOptions") -> "Measurement":
        from rich.measure import Measurement

        return Measurement(min(len(self.text), MIN_NAME_WIDTH), len(self.text))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text(shortened(self.text, options.max_width), no_wrap=True)

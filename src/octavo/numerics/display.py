"""Text tables of results: complete for `print`, shortened at a prompt and in a notebook."""

import html
from collections.abc import Sequence

MAX_LINES = 60
"""Maximum number of lines of a `repr`."""


class Displayed:
    """Mixin that shows at most `MAX_LINES` lines of `str(self)` at a prompt and in notebooks."""

    def __repr__(self) -> str:
        lines = str(self).splitlines()
        if len(lines) <= MAX_LINES:
            return "\n".join(lines)
        head, tail = MAX_LINES - 6, 5
        left_out = f"… {len(lines) - head - tail} more lines: print() shows all"
        return "\n".join([*lines[:head], left_out, *lines[-tail:]])

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(repr(self))}</pre>'


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the last column is not padded."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header) - 1)]
    lines = [
        "  ".join([f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)] + [row[-1]]) for row in cells
    ]
    lines.insert(1, "─" * min(100, max(len(line) for line in lines)))
    return lines

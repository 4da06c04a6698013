"""Text tables of results, by torch and numpy alone: complete for `print`, shortened at a prompt and in a notebook."""

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LINES = 60  # Maximum number of lines of a `repr`
MAX_RULE = 100  # Maximum length of a rule below the headings of a table of unlimited width
MIN_NAME_WIDTH = 16  # Minimum characters of a shortened name
MIN_TEXT_WIDTH = 40  # Minimum characters of a wrapped last column


class Displayed:
    """Mixin that shows at most `MAX_LINES` lines of `str(self)` at a prompt and in notebooks."""

    def __repr__(self) -> str:
        lines = str(self).splitlines()
        if len(lines) <= MAX_LINES:
            return "\n".join(lines)
        head, tail = MAX_LINES - 6, 5
        omitted = f"… {len(lines) - head - tail} more lines: print() shows all"
        return "\n".join([*lines[:head], omitted, *lines[-tail:]])

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(repr(self))}</pre>'


@dataclass(frozen=True, kw_only=True)
class Table:
    headings: Sequence[str]  # One for each column; a heading may have several lines
    align: str  # `"<"` (left) or `">"` (right) for each column; a last column that is left-aligned may be long
    rows: Sequence[Sequence[str]]  # The cells; an empty row prints as a rule
    title: str = ""  # Line above the headings
    # Whether the first column holds names, to be shortened in the middle where the width is too small.
    shorten: bool = False

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines, of at most `width` characters where names and the last column allow it."""
        parts = [heading.split("\n") for heading in self.headings]
        height = max(map(len, parts))
        head = [[([""] * (height - len(part)) + part)[line] for part in parts] for line in range(height)]
        cells = [*head, *(row for row in self.rows if row)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.headings))]
        excess = 0 if width is None else sum(widths) + 2 * (len(widths) - 1) - width
        if excess > 0 and self.align[-1] == "<":
            wrapped = max(widths[-1] - excess, min(widths[-1], MIN_TEXT_WIDTH))
            excess -= widths[-1] - wrapped
            widths[-1] = wrapped
        if excess > 0 and self.shorten:
            widths[0] = max(widths[0] - excess, min(widths[0], MIN_NAME_WIDTH))
        total = sum(widths) + 2 * (len(widths) - 1)
        rule = "─" * (min(MAX_RULE, total) if width is None else total)
        body = [line for row in self.rows for line in (self._row(row, widths) if row else [rule])]
        return [*([self.title] if self.title else []), *(self._row(row, widths)[0] for row in head), rule, *body]

    def _row(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        """Return the lines of a row: several if the last column is wrapped."""
        last = [row[-1]]
        if self.align[-1] == "<" and len(row[-1]) > widths[-1]:
            last = textwrap.wrap(row[-1], widths[-1])
        first = shortened(row[0], widths[0]) if self.shorten else row[0]
        lines = []
        for cells in ([first, *row[1:-1], last[0]], *([""] * (len(row) - 1) + [text] for text in last[1:])):
            padded = (f"{cell:{side}{size}}" for cell, side, size in zip(cells, self.align, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        return lines


def shortened(name: str, width: int) -> str:
    """Shorten a name in the middle to at most `width` characters, 3 or more."""
    if len(name) <= width:
        return name
    end = width // 2
    return f"{name[: width - 1 - end]}…{name[-end:]}"

"""Tables of result files in the pages of docs/, which are written by hand around them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def fill(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with each part between its marks, `<!-- name: its command -->` and `<!-- end -->`."""
    for name, part in parts.items():
        mark = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(?=<!-- end -->)", re.DOTALL)
        page, found = mark.subn(lambda match, part=part: match[1] + part.strip("\n") + "\n", page)
        if found != 1:
            raise ValueError(f"the page has {found} places <!-- {name}: … --> … <!-- end -->; it needs one")
    return page


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "lr") -> str:
    """A Markdown table, with – for None. `align` has a letter for each column, l or r; the last holds for the rest."""
    marks = ("---:|" if letter == "r" else "---|" for letter in align.ljust(len(header), align[-1]))
    lines = ["| " + " | ".join(header) + " |", "|" + "".join(marks)]
    lines += ["| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"

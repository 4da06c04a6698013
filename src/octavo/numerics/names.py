"""Names for people to read: what the user probably meant, and many like names in one."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def nearest(given: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'rowwise'?)"` for a near miss among `known`, else an empty string."""
    matches = get_close_matches(given, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def merged(names: Sequence[str]) -> str:
    """One name for several that differ in numbers only: `"layers.0.q"`, `"layers.1.q"` → `"layers.{0-1}.q"`."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(values[0] if len(set(values)) == 1 else "{" + _ranges(values) + "}" for values in columns)


def pattern(name: str) -> str:
    """What a name has in common with those that differ from it in numbers only."""
    return re.sub(r"\d+", "#", name)


def _ranges(values: Iterable[str]) -> str:
    """0,1,2,5 → "0-2,5"."""
    spans: list[list[int]] = []
    for number in sorted({int(value) for value in values}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)

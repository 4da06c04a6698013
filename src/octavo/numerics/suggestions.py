"""Names in messages: suggestions for misspelled names, and merged names of repeated layers."""

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `" (did you mean 'rowwise'?)"` if `name` resembles one of `choices`, else an empty string."""
    matches = get_close_matches(name, list(choices), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless a value is one of the choices, as in: order is 'rows' or 'columns'; got 'row'."""
    if value not in choices:
        *others, last = choices
        hint = nearest(str(value), map(str, choices))
        raise ValueError(f"{name} is {', '.join(map(repr, others))} or {last!r}; got {value!r}{hint}")


def counted_noun(count: int | None, noun: str) -> str:
    """Return a count and its noun: "1 step", "1,200 steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def merged(names: Sequence[str]) -> str:
    """Merge names that differ in numbers only: `"layers.0.q"`, `"layers.1.q"` → `"layers.{0-1}.q"`."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(values[0] if len(set(values)) == 1 else "{" + _ranges(values) + "}" for values in columns)


def pattern(name: str) -> str:
    """Replace the numbers in a name by `#`."""
    return re.sub(r"\d+", "#", name)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Group values by key, both in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def listed(names: Sequence[str]) -> str:
    """List names, merging those of repeated layers: "layers.0.q", "layers.1.q", "head" → "layers.{0-1}.q, head"."""
    return ", ".join(map(merged, grouped((pattern(name), name) for name in names).values()))


def _ranges(values: Iterable[str]) -> str:
    """Format numbers as ranges: 0,1,2,5 → "0-2,5"."""
    spans: list[list[int]] = []
    for number in sorted({int(value) for value in values}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)

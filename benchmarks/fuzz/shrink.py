"""Shrinking: remove from a case what its failure does not need.

A case is plain data whose keys all have the simplest value as default, so smaller cases are those without a key,
without an item of a list, with a part in the place of what is around it, or with a smaller number. Whatever still fails
in the same way is taken, until nothing smaller does.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.fuzz.build import Case

_FIXED = ("kind", "op")


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 30.0) -> Case:
    """Find the smallest case that still fails, within a time.

    Args:
        case: One that fails.
        fails: Whether a case fails in the same way.
        seconds: When to stop with what was found until then.
    """
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                return case
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def size(value: Any) -> int:
    """Number of keys, items and leaves."""
    if isinstance(value, dict):
        return sum(1 + size(each) for each in value.values())
    return sum(size(each) for each in value) + 1 if isinstance(value, list) else 1


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from _without(value)
    elif isinstance(value, list):
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
        for i, item in enumerate(value):
            for smaller in _smaller(item):
                yield [*value[:i], smaller, *value[i + 1 :]]
    elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
        yield from sorted({1, value // 2, value - 1})


def _without(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "op" in value:
        yield from value.get("parts", ())
        if "of" in value:
            yield value["of"]
    for key in value:
        if key not in _FIXED:
            yield {k: v for k, v in value.items() if k != key}
    for key, each in value.items():
        if key not in (*_FIXED, "seed"):
            for smaller in _smaller(each):
                yield {**value, key: smaller}

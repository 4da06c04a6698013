"""Filters: which linears of a model to convert, by rules that combine and say why.

    from octavo.nn import filters

    octavo.convert(model, filter=filters.name("*.mlp.*") & ~filters.last(2) | filters.shape(min_in=8192))
    octavo.convert(model, recipe={filters.first(2) | filters.last(2): "rowwise_hp_wgrad"})

    name("*.mlp.*", …)    a name of the layer, or of a module around it, is like one of the patterns
    kind("LlamaMLP", …)   the layer, or a module around it, is of one of these classes
    shape(min_in=4096)    sizes of the layer
    first(2), last(2)     blocks, or linears, counted from either end
    where(f)              f(module, name) is True; f may also be used as it is

A rule finds a fact, such as "in_features 512 < 4096", which holds or does not whatever it is used for: `~` turns the
verdict and leaves the fact. Of `&` and `|` the facts that decide are told: the first that fails, or all that hold. So
`~(a & b)` and `~a | ~b` are one filter, verdict and reason, and the report gives no more than what made the difference.

Rules see a `Layer`, which knows where it is in its model, and no model: they are plain values that can be compared,
kept in a module of constants and used for several models. A layer that a model holds under several names is judged by
each of them, and converted where none of them excludes it.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from torch import nn

from octavo.nn.rules import (
    AtEnd,
    Filter,
    FilterLike,
    Layer,
    ModuleFilter,
    Named,
    OfKind,
    Shaped,
    Verdict,
    as_filter,
    sizes,
    where,
)
from octavo.numerics.names import nearest
from octavo.numerics.precision import Precision
from octavo.runtime.blocks import find_stacks

__all__ = [
    "Filter", "FilterLike", "Layer", "ModuleFilter", "Verdict", "as_filter", "both", "first", "kind", "last",
    "layers_of", "name", "names_of", "of_precision", "shape", "sizes", "where",
]  # fmt: skip

T = TypeVar("T")
UNITS = ("blocks", "linears")
"""What `first` and `last` count."""


def name(*patterns: str) -> Filter:
    """Layers one of whose names is like one of these patterns, as in `fnmatch`, or is inside of what is.

    Raises:
        TypeError: For anything but strings.
        ValueError: Without a pattern.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"filters.name takes patterns one by one, as name('*.mlp.*', '*.q_proj'); got {pattern!r}")
    return Named(_some("name", patterns, "'*.mlp.*'"))


def kind(*types: type[nn.Module] | str) -> Filter:
    """Layers of one of these classes, given as such or by name, or inside of a module of one.

    Raises:
        TypeError: For anything else than a class of modules or a string.
        ValueError: Without a class.
    """
    for each in types:
        if not isinstance(each, str) and not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise TypeError(f"filters.kind takes classes of modules or their names, as 'LlamaMLP'; got {each!r}")
    return OfKind(_some("kind", types, "'LlamaMLP'"))


def shape(
    *,
    min_in: int | None = None,
    max_in: int | None = None,
    min_out: int | None = None,
    max_out: int | None = None,
    multiple_of: int | None = None,
) -> Filter:
    """Layers with `in_features` and `out_features` in these bounds, and multiples of a number.

    Raises:
        TypeError: For bounds that are no integers.
        ValueError: For bounds below 1, or none.
    """
    bounds = {"min_in": min_in, "max_in": max_in, "min_out": min_out, "max_out": max_out, "multiple_of": multiple_of}
    given = {key: _count(f"shape({key}=…)", value) for key, value in bounds.items() if value is not None}
    return Shaped(**_some("shape", given, "min_in=4096"))


def first(count: int, of: Literal["blocks", "linears"] = "blocks") -> Filter:
    """Layers in the first blocks of the model, or the first linears; see `last`."""
    return AtEnd("first", _count("first", count), _unit(of))


def last(count: int, of: Literal["blocks", "linears"] = "blocks") -> Filter:
    """Layers in the last blocks of the model, or the last linears.

    Args:
        count: How many.
        of: `"blocks"`: of each stack of blocks (`octavo.runtime.blocks.find_stacks`); the last 2 are 2 of an
            encoder and 2 of a decoder, and what is outside of all stacks is in none. `"linears"`: of the linears in
            the model's order, without vocabulary heads and what cannot be converted.

    Raises:
        TypeError: For a count that is no integer.
        ValueError: For a count below 1 or an unknown unit; in `convert`, for a model without blocks.
    """
    return AtEnd("last", _count("last", count), _unit(of))


def of_precision(precision: Precision) -> Filter | None:
    """What `only`, `skip_first`, `skip_last` and `min_features` of a `Precision` come to; None where none is set."""
    smallest = precision.min_features
    rules = [
        name(*precision.only) if precision.only else None,
        ~first(precision.skip_first) if precision.skip_first else None,
        ~last(precision.skip_last) if precision.skip_last else None,
        shape(min_in=smallest, min_out=smallest) if smallest else None,
    ]
    return both(*rules)


def both(*given: FilterLike | None) -> Filter | None:
    """All of several filters, some of which may be None; None where all are."""
    found: Filter | None = None
    for each in given:
        if each is not None:
            found = as_filter(each) if found is None else found & each
    return found


def layers_of(model: nn.Module, linears: Iterable[nn.Module], counted: Sequence[nn.Module]) -> dict[str, Layer]:
    """Linears of a model by each of their names, as filters see them.

    Args:
        model: The model.
        linears: The linears.
        counted: Those of them that `first` and `last` count as linears, in their order.
    """
    modules, wanted = dict(model.named_modules(remove_duplicate=False)), set(linears)
    blocks = {
        module: (index, len(stack))
        for stack in find_stacks(model)
        for index, block in enumerate(stack)
        for module in block.modules()
    }
    places = {module: (index, len(counted)) for index, module in enumerate(counted)}
    return {
        fqn: Layer(
            fqn=fqn,
            module=module,
            names=frozenset(_and_around(fqn)),
            around=tuple(modules[each] for each in sorted({*_and_around(fqn), ""})),
            block=blocks.get(module),
            place=places.get(module),
        )
        for fqn, module in modules.items()
        if module in wanted
    }


def names_of(model: nn.Module) -> dict[nn.Module, set[str]]:
    """For each module all the names it goes by, and those of the modules around it: a.b.c → a.b.c, a.b, a."""
    names: dict[nn.Module, set[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, set()).update(_and_around(fqn))
    return names


def _and_around(fqn: str) -> list[str]:
    parts = fqn.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _some(what: str, given: T, example: str) -> T:
    if not given:
        raise ValueError(f"filters.{what} without anything to look for: give it some, as {what}({example})")
    return given


def _count(what: str, given: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"filters.{what} takes an integer; got {given!r}")
    if given < 1:
        raise ValueError(f"filters.{what} takes 1 or more; got {given}")
    return given


def _unit(given: Literal["blocks", "linears"]) -> Literal["blocks", "linears"]:
    if given not in ("blocks", "linears"):
        raise ValueError(f"filters count of='blocks' or 'linears'; got {given!r}{nearest(str(given), UNITS)}")
    return given

"""Filters: rules that select the linears to convert, combine by `&`, `|` and `~`, and give reasons.

    from octavo.nn import filters

    octavo.convert(model, filter=filters.name("*.mlp.*") & ~filters.last(2) | filters.shape(min_in=8192))
    octavo.convert(model, recipe={filters.first(2) | filters.last(2): "rowwise_hp_wgrad"})

    name("*.mlp.*", …)    the name of the layer, or of a parent module, matches one of the patterns
    kind("LlamaMLP", …)   the layer, or a parent module, is an instance of one of these classes
    shape(min_in=4096)    sizes of the layer
    first(2), last(2)     blocks, or linears, counted from either end
    where(f)              f(module, name) is True; you can also pass f itself

The reason of a rule is a fact, such as "in_features 512 < 4096": `~` inverts the match and keeps the fact. `&` and
`|` give the facts that decide: the first that fails, or all that hold. So `~(a & b)` and `~a | ~b` give the same
verdict and reason, and the report shows only the facts that decide.

Rules read a `Layer`, not the model: they are plain values that you can compare and use for several models. A layer with
several names is matched under each of them, and converted if none excludes it.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from torch import nn

from octavo.nn.rules import (
    AtEnd,
    Filter,
    FilterLike,
    Layer,
    Match,
    ModuleFilter,
    Named,
    OfKind,
    Shaped,
    as_filter,
    sizes,
    where,
)
from octavo.numerics.names import nearest
from octavo.numerics.precision import Precision
from octavo.runtime.blocks import find_stacks

__all__ = [
    "Filter", "FilterLike", "Layer", "Match", "ModuleFilter", "as_filter", "both", "first", "kind", "last",
    "layers_of", "name", "names_of", "of_precision", "shape", "sizes", "where",
]  # fmt: skip

T = TypeVar("T")
UNITS = ("blocks", "linears")
"""What `first` and `last` count."""


def name(*patterns: str) -> Filter:
    """Match layers by name, or by the name of a parent module, with patterns as in `fnmatch`.

    Raises:
        TypeError: If a pattern is not a string.
        ValueError: If there is no pattern.

    Examples:
        >>> layers = octavo.nn.filters.name("*.mlp.*", "*.o_proj")
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"filters.name takes patterns one by one, as name('*.mlp.*', '*.q_proj'); got {pattern!r}")
    return Named(_nonempty("name", patterns, "'*.mlp.*'"))


def kind(*types: type[nn.Module] | str) -> Filter:
    """Match layers of one of these classes, and layers inside a module of one. A class can be given by name.

    Raises:
        TypeError: If an argument is neither a module class nor a string.
        ValueError: If there is no class.

    Examples:
        >>> layers = octavo.nn.filters.kind("LlamaMLP", torch.nn.TransformerEncoderLayer)
    """
    for owner in types:
        if not isinstance(owner, str) and not (isinstance(owner, type) and issubclass(owner, nn.Module)):
            raise TypeError(f"filters.kind takes classes of modules or their names, as 'LlamaMLP'; got {owner!r}")
    return OfKind(_nonempty("kind", types, "'LlamaMLP'"))


def shape(
    *,
    min_in: int | None = None,
    max_in: int | None = None,
    min_out: int | None = None,
    max_out: int | None = None,
    multiple_of: int | None = None,
) -> Filter:
    """Match layers whose `in_features` and `out_features` are within bounds, and multiples of `multiple_of`.

    Raises:
        TypeError: If a bound is not an integer.
        ValueError: If a bound is below 1, or there is none.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        >>> model = octavo.convert(model, filter=octavo.nn.filters.shape(min_in=128))
        >>> [row.recipe for row in octavo.report(model)]
        [None, 'rowwise']
    """
    bounds = {"min_in": min_in, "max_in": max_in, "min_out": min_out, "max_out": max_out, "multiple_of": multiple_of}
    integers = {key: _count(f"shape({key}=…)", value) for key, value in bounds.items() if value is not None}
    return Shaped(**_nonempty("shape", integers, "min_in=4096"))


def first(count: int, of: Literal["blocks", "linears"] = "blocks") -> Filter:
    """Match layers in the first blocks of the model, or the first linears; see `last`.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model = octavo.convert(model, recipe={octavo.nn.filters.first(1, of="linears"): "mxfp8"})
        >>> [row.recipe for row in octavo.report(model)]
        ['mxfp8', 'rowwise']
    """
    return AtEnd("first", _count("first", count), _unit(of))


def last(count: int, of: Literal["blocks", "linears"] = "blocks") -> Filter:
    """Match layers in the last blocks of the model, or the last linears.

    Args:
        count: Number of blocks or linears.
        of: `"blocks"`: counts in each stack of blocks (`octavo.runtime.blocks.find_stacks`): the last 2 are 2 of an
            encoder and 2 of a decoder; layers outside of all stacks do not match. `"linears"`: counts convertible
            linears in the model's order, without vocabulary heads.

    Raises:
        TypeError: If `count` is not an integer.
        ValueError: If `count` is below 1 or the unit is unknown; in `convert`, if the model has no blocks.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model = octavo.convert(model, filter=~octavo.nn.filters.last(1, of="linears"))
        >>> octavo.report(model)[1].reason
        'excluded by filter: in the last of 2 linears'
    """
    return AtEnd("last", _count("last", count), _unit(of))


def of_precision(precision: Precision) -> Filter | None:
    """Return the filter for `only`, `skip_first`, `skip_last` and `min_features`; None if none is set."""
    smallest = precision.min_features
    rules = [
        name(*precision.only) if precision.only else None,
        ~first(precision.skip_first) if precision.skip_first else None,
        ~last(precision.skip_last) if precision.skip_last else None,
        shape(min_in=smallest, min_out=smallest) if smallest else None,
    ]
    return both(*rules)


def both(*rules: FilterLike | None) -> Filter | None:
    """Combine filters with `&`. Ignores None; returns None if all are None."""
    combined: Filter | None = None
    for rule in rules:
        if rule is not None:
            combined = as_filter(rule) if combined is None else combined & rule
    return combined


def layers_of(model: nn.Module, linears: Iterable[nn.Module], counted: Sequence[nn.Module]) -> dict[str, Layer]:
    """Return the `Layer`s of a model's linears, by each of their names."""
    modules, selected = dict(model.named_modules(remove_duplicate=False)), set(linears)
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
            names=frozenset(_with_parents(fqn)),
            module_path=tuple(modules[parent] for parent in sorted({*_with_parents(fqn), ""})),
            block=blocks.get(module),
            place=places.get(module),
        )
        for fqn, module in modules.items()
        if module in selected
    }


def names_of(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Return all names of each module, and those of its parent modules: a.b.c → a.b.c, a.b, a."""
    names: dict[nn.Module, set[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, set()).update(_with_parents(fqn))
    return names


def _with_parents(fqn: str) -> list[str]:
    parts = fqn.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _nonempty(function: str, arguments: T, example: str) -> T:
    if not arguments:
        raise ValueError(f"filters.{function} needs at least one argument, e.g. {function}({example})")
    return arguments


def _count(function: str, count: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"filters.{function} takes an integer; got {count!r}")
    if count < 1:
        raise ValueError(f"filters.{function} takes 1 or more; got {count}")
    return count


def _unit(unit: Literal["blocks", "linears"]) -> Literal["blocks", "linears"]:
    if unit not in ("blocks", "linears"):
        raise ValueError(f"filters count of='blocks' or 'linears'; got {unit!r}{nearest(str(unit), UNITS)}")
    return unit

"""Filters: rules that select the linears to convert, combine by `&`, `|` and `~`, and give reasons (docs/filters.md).

The reason of a rule is a fact, such as "in_features 512 < 4096": `~` inverts the match and keeps the fact.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, Union

from torch import nn

from octavo.nn.experts import experts_shape, looks_like_experts
from octavo.nn.linear_like import LinearLike
from octavo.numerics.precision import Precision
from octavo.numerics.suggestions import check_choice, nearest
from octavo.runtime.blocks import find_stacks
from octavo.runtime.linear_kinds import LINEAR, kind_of

ModuleFilter = Callable[[nn.Module, str], bool]  # Takes a linear and its fully qualified name; True means convert
FilterLike = Union["Filter", ModuleFilter]  # A filter, or a callable to use as one


class Match(NamedTuple):
    """Whether a rule selects a layer, and the reason; empty if a callable gives none."""

    selected: bool
    reason: str


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear and its position in the model. A linear with several names has one `Layer` per name."""

    fqn: str  # Fully qualified name
    module: nn.Module  # The linear
    names: frozenset[str]  # Its name, and those of its parent modules: a.b.c → a.b.c, a.b, a
    module_path: tuple[nn.Module, ...]  # The linear and its parent modules
    block: tuple[int, int] | None  # Index in a stack of blocks, and the number of blocks; None outside of all stacks
    # Index among the convertible linears, without vocabulary heads, and their number; None for others.
    place: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Filter:
    """A rule about layers. Combine them with `&`, `|` and `~`."""

    match: Callable[[Layer], Match] = field(repr=False)  # Decides one layer
    # Returns warnings about what matches none of a model's layers.
    warn: Callable[[Sequence[Layer]], list[str]] = field(default_factory=lambda: lambda layers: [], repr=False)

    def __and__(self, other: FilterLike) -> "Filter":
        return _pair(self, as_filter(other), False)

    def __rand__(self, other: FilterLike) -> "Filter":
        return _pair(as_filter(other), self, False)

    def __or__(self, other: FilterLike) -> "Filter":
        return _pair(self, as_filter(other), True)

    def __ror__(self, other: FilterLike) -> "Filter":
        return _pair(as_filter(other), self, True)

    def __invert__(self) -> "Filter":
        def match(layer: Layer) -> Match:
            selected, reason = self.match(layer)
            return Match(not selected, reason)

        return Filter(match, self.warn)

    def __bool__(self) -> bool:
        raise TypeError("a filter is neither true nor false: combine filters with &, | and ~, not with and, or and not")


def as_filter(rule: FilterLike) -> Filter:
    """Return a filter unchanged, and wrap a callable with `where`. Raises TypeError for anything else."""
    return rule if isinstance(rule, Filter) else where(rule)


def where(function: ModuleFilter, reason: str = "") -> Filter:
    """Match layers for which `function(module, fqn)` returns True; `reason` describes them, e.g. "wide enough".

    Raises:
        TypeError: If `function` is not such a callable; in `convert`, if it does not return a bool.
        ValueError: In `convert`, if `function` raises.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64, bias=False))
        >>> rule = octavo.nn.filters.where(lambda module, fqn: module.bias is None, reason="no bias")
        >>> [row.converted for row in octavo.report(octavo.convert(model, filter=rule))]
        [False, True]
    """
    if isinstance(function, type):
        raise TypeError(f"a filter is a rule of octavo.nn.filters or a callable; of a class, kind({function.__name__})")
    if not callable(function) or isinstance(function, nn.Module):
        rules = "a rule of octavo.nn.filters, as name('*.mlp.*'), or a callable (module, fqn) -> bool"
        raise TypeError(f"a filter is {rules}; got {function!r}")

    def match(layer: Layer) -> Match:
        try:
            verdict = function(layer.module, layer.fqn)
        except Exception as error:
            what = f"filter raised {type(error).__name__} on {layer.fqn!r}: {error}"
            raise ValueError(f"{what}. The model was left as it was") from error
        if not isinstance(verdict, bool):
            raise TypeError(f"filter(module, fqn) returns True or False; it returned {verdict!r} for {layer.fqn!r}")
        return Match(verdict, reason if verdict or not reason else f"not {reason}")

    return Filter(match)


def _pair(one: Filter, other: Filter, decisive: bool) -> Filter:
    """Return `one & other`, or `one | other`; a match with the value `decisive` decides: False for &, True for |."""

    def match(layer: Layer) -> Match:
        reasons = []
        for rule in (one, other):
            selected, reason = rule.match(layer)
            if selected == decisive:
                return Match(selected, reason)
            reasons.append(reason)
        return Match(not decisive, ", ".join(dict.fromkeys(filter(None, reasons))))

    return Filter(match, lambda layers: one.warn(layers) + other.warn(layers))


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return in_features and out_features of a linear; of experts, those of each gate or up projection."""
    if looks_like_experts(module):
        _, hidden, _, inner = experts_shape(module)
        return hidden, inner
    kind = None if isinstance(module, LinearLike) else kind_of(module)
    in_features, out_features = (kind or LINEAR).sizes
    return getattr(module, in_features), getattr(module, out_features)


def _is_a(module: nn.Module, owner: type[nn.Module] | str) -> bool:
    return any(owner in (kind, kind.__name__) for kind in type(module).__mro__)


def _class_name(kind: type[nn.Module] | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__


__all__ = [
    "Filter", "FilterLike", "Layer", "Match", "ModuleFilter", "as_filter", "both", "first", "kind", "last",
    "layers_of", "name", "names_of", "of_precision", "shape", "sizes", "where",
]  # fmt: skip


def name(*patterns: str) -> Filter:
    """Match layers by name, or by the name of a parent module, with patterns as in `fnmatch`.

    Examples:
        >>> layers = octavo.nn.filters.name("*.mlp.*", "*.o_proj")
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"filters.name takes patterns one by one, as name('*.mlp.*', '*.q_proj'); got {pattern!r}")
    _nonempty("name", patterns, "'*.mlp.*'")

    def match(layer: Layer) -> Match:
        pattern = next((p for p in patterns if any(fnmatchcase(name, p) for name in layer.names)), None)
        if pattern is not None:
            return Match(True, f"name matches {pattern!r}")
        return Match(False, f"name does not match {' or '.join(map(repr, patterns))}")

    def warn(layers: Sequence[Layer]) -> list[str]:
        names = {name for layer in layers for name in layer.names}
        parts = {part for layer in layers for part in layer.fqn.split(".")}
        unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
        return [f"filter pattern {p!r} matches no linear layer{nearest(p.strip('*.'), parts)}" for p in unmatched]

    return Filter(match, warn)


def kind(*types: type[nn.Module] | str) -> Filter:
    """Match layers of one of these classes, and layers inside a module of one. A class can be given by name.

    Examples:
        >>> layers = octavo.nn.filters.kind("LlamaMLP", torch.nn.TransformerEncoderLayer)
    """
    for owner in types:
        if not isinstance(owner, str) and not (isinstance(owner, type) and issubclass(owner, nn.Module)):
            raise TypeError(f"filters.kind takes classes of modules or their names, as 'LlamaMLP'; got {owner!r}")
    _nonempty("kind", types, "'LlamaMLP'")

    def match(layer: Layer) -> Match:
        for module in layer.module_path:
            owner = next((owner for owner in types if _is_a(module, owner)), None)
            if owner is not None:
                return Match(True, f"{'is' if module is layer.module else 'inside'} a {_class_name(owner)}")
        return Match(False, f"neither is nor is inside a {' or '.join(map(_class_name, types))}")

    def warn(layers: Sequence[Layer]) -> list[str]:
        modules = {module for layer in layers for module in layer.module_path}
        known = {type(module).__name__ for module in modules}
        unmatched = [_class_name(owner) for owner in types if not any(_is_a(module, owner) for module in modules)]
        return [f"filter kind {name!r} matches no linear layer{nearest(name, known)}" for name in unmatched]

    return Filter(match, warn)


def shape(
    *, min_in: int | None = None, max_in: int | None = None, min_out: int | None = None, max_out: int | None = None,
    multiple_of: int | None = None,
) -> Filter:  # fmt: skip
    """Match layers whose `in_features` and `out_features` are within bounds, and multiples of `multiple_of`.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        >>> model = octavo.convert(model, filter=octavo.nn.filters.shape(min_in=128))
        >>> [row.recipe for row in octavo.report(model)]
        [None, 'rowwise']
    """
    bounds = {"min_in": min_in, "max_in": max_in, "min_out": min_out, "max_out": max_out, "multiple_of": multiple_of}
    integers = {key: _count(f"shape({key}=…)", value) for key, value in bounds.items() if value is not None}
    _nonempty("shape", integers, "min_in=4096")

    def match(layer: Layer) -> Match:
        facts = []
        features = dict(zip(("in", "out"), sizes(layer.module), strict=True))
        for which, size in features.items():
            least, most = integers.get(f"min_{which}", size), integers.get(f"max_{which}", size)
            if not least <= size <= most:
                return Match(False, f"{which}_features {size} {f'< {least}' if size < least else f'> {most}'}")
            facts += [f"{which}_features {size} ≥ {least}"] if f"min_{which}" in integers else []
            facts += [f"{which}_features {size} ≤ {most}"] if f"max_{which}" in integers else []
        if multiple_of is not None:
            for which, size in features.items():
                if size % multiple_of:
                    return Match(False, f"{which}_features {size} is no multiple of {multiple_of}")
            facts.append(f"multiples of {multiple_of}")
        return Match(True, ", ".join(facts))

    return Filter(match)


def first(count: int, of: Literal["blocks", "linears"] = "blocks") -> Filter:
    """Match layers in the first blocks of the model, or the first linears; see `last`.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model = octavo.convert(model, recipe={octavo.nn.filters.first(1, of="linears"): "mxfp8"})
        >>> [row.recipe for row in octavo.report(model)]
        ['mxfp8', 'rowwise']
    """
    return _at_end("first", count, of)


def last(count: int, of: Literal["blocks", "linears"] = "blocks") -> Filter:
    """Match layers in the last blocks of the model, or the last linears.

    Args:
        count: Number of blocks or linears.
        of: `"blocks"`: counts in each stack of blocks (`octavo.runtime.blocks.find_stacks`): the last 2 are 2 of an
            encoder and 2 of a decoder; layers outside of all stacks do not match. `"linears"`: counts convertible
            linears in the model's order, without vocabulary heads.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model = octavo.convert(model, filter=~octavo.nn.filters.last(1, of="linears"))
        >>> octavo.report(model)[1].reason
        'excluded by filter: in the last of 2 linears'
    """
    return _at_end("last", count, of)


def of_precision(precision: Precision) -> Filter | None:
    """Return the filter for `only`, `skip_first`, `skip_last` and `min_features`; None if none is set."""
    smallest = precision.min_features
    return both(
        name(*precision.only) if precision.only else None,
        ~first(precision.skip_first) if precision.skip_first else None,
        ~last(precision.skip_last) if precision.skip_last else None,
        shape(min_in=smallest, min_out=smallest) if smallest else None,
    )


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
            fqn=fqn, module=module, names=frozenset(_with_parents(fqn)),
            module_path=tuple(modules[parent] for parent in sorted({*_with_parents(fqn), ""})),
            block=blocks.get(module), place=places.get(module),
        )
        for fqn, module in modules.items()
        if module in selected
    }  # fmt: skip


def names_of(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Return all names of each module, and those of its parent modules: a.b.c → a.b.c, a.b, a."""
    names: dict[nn.Module, set[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, set()).update(_with_parents(fqn))
    return names


def _with_parents(fqn: str) -> list[str]:
    parts = fqn.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _nonempty(function: str, arguments: Collection[object], example: str) -> None:
    if not arguments:
        raise ValueError(f"filters.{function} needs at least one argument, e.g. {function}({example})")


def _count(function: str, count: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"filters.{function} takes an integer; got {count!r}")
    if count < 1:
        raise ValueError(f"filters.{function} takes 1 or more; got {count}")
    return count


def _at_end(end: Literal["first", "last"], count: int, of: Literal["blocks", "linears"]) -> Filter:
    check_choice(f"filters.{end}: of", of, ("blocks", "linears"))
    _count(end, count)

    def match(layer: Layer) -> Match:
        place = layer.block if of == "blocks" else layer.place
        if place is None:
            return Match(False, f"outside of all {of}")
        index, total = place
        inside = index < count if end == "first" else index >= total - count
        ends = end if count == 1 else f"{end} {count}"
        return Match(inside, f"{'' if inside else 'not '}in the {ends} of {total} {of}")

    def warn(layers: Sequence[Layer]) -> list[str]:
        if of == "blocks" and not any(layer.block for layer in layers):
            raise ValueError(
                f"filters.{end}({count}) counts blocks, and this model has none: no nn.ModuleList or nn.Sequential of "
                f"like modules. Count linears, {end}({count}, of='linears'), or name them"
            )
        return []

    return Filter(match, warn)

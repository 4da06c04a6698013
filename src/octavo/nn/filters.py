"""Filters: rules that select the linears to convert, combine by `&`, `|` and `~`, and give reasons (docs/filters.md).

The reason of a rule is a fact, such as "in_features 512 < 4096": `~` inverts the match and keeps the fact.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeVar, Union

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


class Filter(ABC):
    """A rule about layers. Combine them with `&`, `|` and `~`."""

    @abstractmethod
    def match(self, layer: Layer) -> Match:
        """Decide one layer."""

    def parts(self) -> Iterator["Filter"]:
        """Yield the simple filters that this one combines."""
        yield self

    def mismatch(self, layers: Sequence[Layer]) -> str | None:
        """Return a warning if this simple filter matches none of these layers, or None."""
        return None

    def __and__(self, other: FilterLike) -> "Filter":
        return _Pair(self, as_filter(other), False)

    def __rand__(self, other: FilterLike) -> "Filter":
        return _Pair(as_filter(other), self, False)

    def __or__(self, other: FilterLike) -> "Filter":
        return _Pair(self, as_filter(other), True)

    def __ror__(self, other: FilterLike) -> "Filter":
        return _Pair(as_filter(other), self, True)

    def __invert__(self) -> "Filter":
        return _Not(self)

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
    return _Where(function, reason)


@dataclass(frozen=True)
class _Pair(Filter):
    one: Filter
    other: Filter
    decisive: bool  # A match with this value decides: False for &, True for |

    def match(self, layer: Layer) -> Match:
        one = self.one.match(layer)
        if one.selected == self.decisive:
            return one
        other = self.other.match(layer)
        if other.selected == self.decisive:
            return other
        return Match(not self.decisive, ", ".join(dict.fromkeys(reason for _, reason in (one, other) if reason)))

    def parts(self) -> Iterator[Filter]:
        yield from self.one.parts()
        yield from self.other.parts()


@dataclass(frozen=True)
class _Not(Filter):
    inner: Filter

    def match(self, layer: Layer) -> Match:
        selected, reason = self.inner.match(layer)
        return Match(not selected, reason)

    def parts(self) -> Iterator[Filter]:
        yield from self.inner.parts()


@dataclass(frozen=True)
class _Named(Filter):
    patterns: tuple[str, ...]

    def match(self, layer: Layer) -> Match:
        pattern = next((p for p in self.patterns if any(fnmatchcase(name, p) for name in layer.names)), None)
        if pattern is not None:
            return Match(True, f"name matches {pattern!r}")
        return Match(False, f"name does not match {' or '.join(map(repr, self.patterns))}")

    def mismatch(self, layers: Sequence[Layer]) -> str | None:
        for pattern in self.patterns:
            if not any(_Named((pattern,)).match(layer).selected for layer in layers):
                hint = nearest(pattern.strip("*."), {part for layer in layers for part in layer.fqn.split(".")})
                return f"filter pattern {pattern!r} matches no linear layer{hint}"
        return None


@dataclass(frozen=True)
class _OfKind(Filter):
    types: tuple[type[nn.Module] | str, ...]

    def match(self, layer: Layer) -> Match:
        for module in layer.module_path:
            classes = type(module).__mro__
            match = next((t for t in self.types if t in classes or t in {c.__name__ for c in classes}), None)
            if match is not None:
                return Match(True, f"{'is' if module is layer.module else 'inside'} a {_class_name(match)}")
        return Match(False, f"neither is nor is inside a {' or '.join(map(_class_name, self.types))}")

    def mismatch(self, layers: Sequence[Layer]) -> str | None:
        for kind in self.types:
            if not any(_OfKind((kind,)).match(layer).selected for layer in layers):
                hint = nearest(_class_name(kind), {type(m).__name__ for layer in layers for m in layer.module_path})
                return f"filter kind {_class_name(kind)!r} matches no linear layer{hint}"
        return None


@dataclass(frozen=True, kw_only=True)
class _Shaped(Filter):
    min_in: int | None = None
    max_in: int | None = None
    min_out: int | None = None
    max_out: int | None = None
    multiple_of: int | None = None

    def match(self, layer: Layer) -> Match:
        facts = []
        features = dict(zip(("in_features", "out_features"), sizes(layer.module), strict=True))
        bounds = ((self.min_in, self.max_in), (self.min_out, self.max_out))
        for (which, size), (least, most) in zip(features.items(), bounds, strict=True):
            if least is not None and size < least:
                return Match(False, f"{which} {size} < {least}")
            if most is not None and size > most:
                return Match(False, f"{which} {size} > {most}")
            facts += [] if least is None else [f"{which} {size} ≥ {least}"]
            facts += [] if most is None else [f"{which} {size} ≤ {most}"]
        if self.multiple_of is not None:
            for which, size in features.items():
                if size % self.multiple_of:
                    return Match(False, f"{which} {size} is no multiple of {self.multiple_of}")
            facts.append(f"multiples of {self.multiple_of}")
        return Match(True, ", ".join(facts))


@dataclass(frozen=True)
class _AtEnd(Filter):
    end: Literal["first", "last"]
    count: int
    unit: Literal["blocks", "linears"]

    def match(self, layer: Layer) -> Match:
        place = layer.block if self.unit == "blocks" else layer.place
        if place is None:
            return Match(False, f"outside of all {self.unit}")
        index, of = place
        inside = index < self.count if self.end == "first" else index >= of - self.count
        ends = self.end if self.count == 1 else f"{self.end} {self.count}"
        return Match(inside, f"{'' if inside else 'not '}in the {ends} of {of} {self.unit}")

    def mismatch(self, layers: Sequence[Layer]) -> str | None:
        if self.unit == "blocks" and not any(layer.block for layer in layers):
            raise ValueError(
                f"filters.{self.end}({self.count}) counts blocks, and this model has none: no nn.ModuleList or "
                f"nn.Sequential of like modules. Count linears, {self.end}({self.count}, of='linears'), or name them"
            )
        return None


@dataclass(frozen=True)
class _Where(Filter):
    function: ModuleFilter
    fact: str

    def match(self, layer: Layer) -> Match:
        try:
            verdict = self.function(layer.module, layer.fqn)
        except Exception as error:
            what = f"filter raised {type(error).__name__} on {layer.fqn!r}: {error}"
            raise ValueError(f"{what}. The model was left as it was") from error
        if not isinstance(verdict, bool):
            raise TypeError(f"filter(module, fqn) returns True or False; it returned {verdict!r} for {layer.fqn!r}")
        return Match(verdict, self.fact if verdict or not self.fact else f"not {self.fact}")


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return in_features and out_features of a linear; of experts, those of each gate or up projection."""
    if looks_like_experts(module):
        _, hidden, _, inner = experts_shape(module)
        return hidden, inner
    kind = None if isinstance(module, LinearLike) else kind_of(module)
    in_features, out_features = (kind or LINEAR).sizes
    return getattr(module, in_features), getattr(module, out_features)


def _class_name(kind: type[nn.Module] | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__


__all__ = [
    "Filter", "FilterLike", "Layer", "Match", "ModuleFilter", "as_filter", "both", "first", "kind", "last",
    "layers_of", "name", "names_of", "of_precision", "shape", "sizes", "where",
]  # fmt: skip

T = TypeVar("T")


def name(*patterns: str) -> Filter:
    """Match layers by name, or by the name of a parent module, with patterns as in `fnmatch`.

    Examples:
        >>> layers = octavo.nn.filters.name("*.mlp.*", "*.o_proj")
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"filters.name takes patterns one by one, as name('*.mlp.*', '*.q_proj'); got {pattern!r}")
    return _Named(_nonempty("name", patterns, "'*.mlp.*'"))


def kind(*types: type[nn.Module] | str) -> Filter:
    """Match layers of one of these classes, and layers inside a module of one. A class can be given by name.

    Examples:
        >>> layers = octavo.nn.filters.kind("LlamaMLP", torch.nn.TransformerEncoderLayer)
    """
    for owner in types:
        if not isinstance(owner, str) and not (isinstance(owner, type) and issubclass(owner, nn.Module)):
            raise TypeError(f"filters.kind takes classes of modules or their names, as 'LlamaMLP'; got {owner!r}")
    return _OfKind(_nonempty("kind", types, "'LlamaMLP'"))


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
    return _Shaped(**_nonempty("shape", integers, "min_in=4096"))


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


def _at_end(end: Literal["first", "last"], count: int, of: Literal["blocks", "linears"]) -> Filter:
    check_choice(f"filters.{end}: of", of, ("blocks", "linears"))
    return _AtEnd(end, _count(end, count), of)

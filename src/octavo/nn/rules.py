"""The classes behind `octavo.nn.filters`: layers, matches, rules, and their combination by `&`, `|` and `~`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, Union

from torch import nn

from octavo.nn.experts import experts_shape, looks_like_experts
from octavo.nn.linear_like import LinearLike
from octavo.numerics.names import nearest
from octavo.runtime.linear_kinds import LINEAR, kind_of

ModuleFilter = Callable[[nn.Module, str], bool]
"""Takes a linear and its fully qualified name; True means convert."""
FilterLike = Union["Filter", ModuleFilter]
"""A filter, or a callable to use as one."""


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
        """Return a warning if this simple filter matches none of these layers, or None.

        Raises:
            ValueError: If the filter does not apply to their model.
        """
        return None

    def __and__(self, other: FilterLike) -> "Filter":
        return _All(self, as_filter(other))

    def __rand__(self, other: FilterLike) -> "Filter":
        return _All(as_filter(other), self)

    def __or__(self, other: FilterLike) -> "Filter":
        return _Any(self, as_filter(other))

    def __ror__(self, other: FilterLike) -> "Filter":
        return _Any(as_filter(other), self)

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
        raise TypeError(
            "a filter is a rule of octavo.nn.filters, as name('*.mlp.*'), or a callable (module, fqn) -> bool; got "
            f"{function!r}"
        )
    return _Where(function, reason)


@dataclass(frozen=True)
class _All(Filter):
    one: Filter
    other: Filter

    def match(self, layer: Layer) -> Match:
        one = self.one.match(layer)
        if not one.selected:
            return one
        other = self.other.match(layer)
        return Match(True, _joined(one, other)) if other.selected else other

    def parts(self) -> Iterator[Filter]:
        yield from self.one.parts()
        yield from self.other.parts()


@dataclass(frozen=True)
class _Any(Filter):
    one: Filter
    other: Filter

    def match(self, layer: Layer) -> Match:
        one = self.one.match(layer)
        if one.selected:
            return one
        other = self.other.match(layer)
        return other if other.selected else Match(False, _joined(one, other))

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
class Named(Filter):
    """Matches if the name of the layer, or of a parent module, matches one of the patterns."""

    patterns: tuple[str, ...]

    def match(self, layer: Layer) -> Match:
        """See `Filter.match`."""
        pattern = next((p for p in self.patterns if any(fnmatchcase(name, p) for name in layer.names)), None)
        if pattern is not None:
            return Match(True, f"name matches {pattern!r}")
        return Match(False, f"name does not match {' or '.join(map(repr, self.patterns))}")

    def mismatch(self, layers: Sequence[Layer]) -> str | None:
        """See `Filter.mismatch`."""
        for pattern in self.patterns:
            if not any(Named((pattern,)).match(layer).selected for layer in layers):
                hint = nearest(pattern.strip("*."), {part for layer in layers for part in layer.fqn.split(".")})
                return f"filter pattern {pattern!r} matches no linear layer{hint}"
        return None


@dataclass(frozen=True)
class OfKind(Filter):
    """Matches if the layer, or a parent module, is an instance of one of the classes."""

    types: tuple[type[nn.Module] | str, ...]

    def match(self, layer: Layer) -> Match:
        """See `Filter.match`."""
        for module in layer.module_path:
            classes = type(module).__mro__
            match = next((t for t in self.types if t in classes or t in {c.__name__ for c in classes}), None)
            if match is not None:
                return Match(True, f"{'is' if module is layer.module else 'inside'} a {_class_name(match)}")
        return Match(False, f"neither is nor is inside a {' or '.join(map(_class_name, self.types))}")

    def mismatch(self, layers: Sequence[Layer]) -> str | None:
        """See `Filter.mismatch`."""
        for kind in self.types:
            if not any(OfKind((kind,)).match(layer).selected for layer in layers):
                hint = nearest(_class_name(kind), {type(m).__name__ for layer in layers for m in layer.module_path})
                return f"filter kind {_class_name(kind)!r} matches no linear layer{hint}"
        return None


@dataclass(frozen=True, kw_only=True)
class Shaped(Filter):
    """Matches if the sizes of the layer are within bounds."""

    min_in: int | None = None
    max_in: int | None = None
    min_out: int | None = None
    max_out: int | None = None
    multiple_of: int | None = None

    def match(self, layer: Layer) -> Match:
        """See `Filter.match`."""
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
class AtEnd(Filter):
    """Matches if the layer is among the first or last of its stack, or of the linears."""

    end: Literal["first", "last"]
    count: int
    unit: Literal["blocks", "linears"]

    def match(self, layer: Layer) -> Match:
        """See `Filter.match`."""
        place = layer.block if self.unit == "blocks" else layer.place
        if place is None:
            return Match(False, f"outside of all {self.unit}")
        index, of = place
        inside = index < self.count if self.end == "first" else index >= of - self.count
        ends = self.end if self.count == 1 else f"{self.end} {self.count}"
        return Match(inside, f"{'' if inside else 'not '}in the {ends} of {of} {self.unit}")

    def mismatch(self, layers: Sequence[Layer]) -> str | None:
        """See `Filter.mismatch`."""
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
            raise ValueError(
                f"filter raised {type(error).__name__} on {layer.fqn!r}: {error}. The model was left as it was"
            ) from error
        if not isinstance(verdict, bool):
            raise TypeError(f"filter(module, fqn) returns True or False; it returned {verdict!r} for {layer.fqn!r}")
        return Match(verdict, self.fact if verdict or not self.fact else f"not {self.fact}")


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return in_features and out_features of a linear, converted or not; of experts, those of each gate or up
    projection.
    """
    if looks_like_experts(module):
        _, hidden, _, inner = experts_shape(module)
        return hidden, inner
    kind = None if isinstance(module, LinearLike) else kind_of(module)
    in_features, out_features = (kind or LINEAR).sizes
    return getattr(module, in_features), getattr(module, out_features)


def _joined(*verdicts: Match) -> str:
    """Join the distinct reasons."""
    return ", ".join(dict.fromkeys(verdict.reason for verdict in verdicts if verdict.reason))


def _class_name(kind: type[nn.Module] | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__

"""What `octavo.nn.filters` is made of: layers as filters see them, verdicts with facts, the rules and their algebra."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, Union

from torch import nn

from octavo.numerics.names import nearest

ModuleFilter = Callable[[nn.Module, str], bool]
"""Takes a linear and its fully qualified name; True means convert."""
FilterLike = Union["Filter", ModuleFilter]
"""What is taken for a filter."""


class Verdict(NamedTuple):
    """Whether a layer is to be converted, and the fact that says so; empty where a callable gives none."""

    keeps: bool
    reason: str


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear and where it is in its model: one for each name of a linear that has several.

    Attributes:
        fqn: Its fully qualified name.
        module: Itself.
        names: Its name, and those of the modules around it: a.b.c → a.b.c, a.b, a.
        around: Itself and the modules around it.
        block: Its place in a stack of blocks, and how many those are; None outside of all stacks.
        place: The same among the linears that could be converted and are no vocabulary heads; None for others.
    """

    fqn: str
    module: nn.Module
    names: frozenset[str]
    around: tuple[nn.Module, ...]
    block: tuple[int, int] | None
    place: tuple[int, int] | None


class Filter(ABC):
    """A rule about layers. Combine them with `&`, `|` and `~`."""

    @abstractmethod
    def judge(self, layer: Layer) -> Verdict:
        """Decide one layer."""

    def parts(self) -> Iterator["Filter"]:
        """The filters that it is combined of; itself where it is simple."""
        yield self

    def misfit(self, layers: Sequence[Layer]) -> str | None:
        """What a person should be told who uses this simple filter for these layers: that it matches none of them.

        Raises:
            ValueError: Where it has no meaning for their model.
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


def as_filter(given: FilterLike) -> Filter:
    """A filter as it is, and any other callable as `where` takes it. Raises TypeError for anything else."""
    return given if isinstance(given, Filter) else where(given)


def where(function: ModuleFilter, reason: str = "") -> Filter:
    """Layers of which `function(module, fqn)` returns True; `reason` says what that means, as "wide enough".

    Raises:
        TypeError: For what cannot be called so; in `convert`, where it returns no bool.
        ValueError: In `convert`, where it raises.
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

    def judge(self, layer: Layer) -> Verdict:
        one = self.one.judge(layer)
        if not one.keeps:
            return one
        other = self.other.judge(layer)
        return Verdict(True, _joined(one, other)) if other.keeps else other

    def parts(self) -> Iterator[Filter]:
        yield from self.one.parts()
        yield from self.other.parts()


@dataclass(frozen=True)
class _Any(Filter):
    one: Filter
    other: Filter

    def judge(self, layer: Layer) -> Verdict:
        one = self.one.judge(layer)
        if one.keeps:
            return one
        other = self.other.judge(layer)
        return other if other.keeps else Verdict(False, _joined(one, other))

    def parts(self) -> Iterator[Filter]:
        yield from self.one.parts()
        yield from self.other.parts()


@dataclass(frozen=True)
class _Not(Filter):
    inner: Filter

    def judge(self, layer: Layer) -> Verdict:
        keeps, reason = self.inner.judge(layer)
        return Verdict(not keeps, reason)

    def parts(self) -> Iterator[Filter]:
        yield from self.inner.parts()


@dataclass(frozen=True)
class Named(Filter):
    """A name of the layer, or of a module around it, is like one of the patterns."""

    patterns: tuple[str, ...]

    def judge(self, layer: Layer) -> Verdict:
        """As `Filter.judge`."""
        found = next((p for p in self.patterns if any(fnmatchcase(each, p) for each in layer.names)), None)
        if found is not None:
            return Verdict(True, f"name matches {found!r}")
        return Verdict(False, f"name does not match {' or '.join(map(repr, self.patterns))}")

    def misfit(self, layers: Sequence[Layer]) -> str | None:
        """As `Filter.misfit`."""
        for pattern in self.patterns:
            if not any(Named((pattern,)).judge(layer).keeps for layer in layers):
                hint = nearest(pattern.strip("*."), {part for layer in layers for part in layer.fqn.split(".")})
                return f"filter pattern {pattern!r} matches no linear layer{hint}"
        return None


@dataclass(frozen=True)
class OfKind(Filter):
    """The layer, or a module around it, is of one of the classes."""

    types: tuple[type[nn.Module] | str, ...]

    def judge(self, layer: Layer) -> Verdict:
        """As `Filter.judge`."""
        for module in layer.around:
            classes = type(module).__mro__
            found = next((t for t in self.types if t in classes or t in {c.__name__ for c in classes}), None)
            if found is not None:
                return Verdict(True, f"{'is' if module is layer.module else 'inside'} a {_called(found)}")
        return Verdict(False, f"neither is nor is inside a {' or '.join(map(_called, self.types))}")

    def misfit(self, layers: Sequence[Layer]) -> str | None:
        """As `Filter.misfit`."""
        for each in self.types:
            if not any(OfKind((each,)).judge(layer).keeps for layer in layers):
                hint = nearest(_called(each), {type(m).__name__ for layer in layers for m in layer.around})
                return f"filter kind {_called(each)!r} matches no linear layer{hint}"
        return None


@dataclass(frozen=True, kw_only=True)
class Shaped(Filter):
    """Sizes of the layer are within bounds."""

    min_in: int | None = None
    max_in: int | None = None
    min_out: int | None = None
    max_out: int | None = None
    multiple_of: int | None = None

    def judge(self, layer: Layer) -> Verdict:
        """As `Filter.judge`."""
        held = []
        features = dict(zip(("in_features", "out_features"), sizes(layer.module), strict=True))
        bounds = ((self.min_in, self.max_in), (self.min_out, self.max_out))
        for (which, size), (least, most) in zip(features.items(), bounds, strict=True):
            if least is not None and size < least:
                return Verdict(False, f"{which} {size} < {least}")
            if most is not None and size > most:
                return Verdict(False, f"{which} {size} > {most}")
            held += [] if least is None else [f"{which} {size} ≥ {least}"]
            held += [] if most is None else [f"{which} {size} ≤ {most}"]
        if self.multiple_of is not None:
            for which, size in features.items():
                if size % self.multiple_of:
                    return Verdict(False, f"{which} {size} is no multiple of {self.multiple_of}")
            held.append(f"multiples of {self.multiple_of}")
        return Verdict(True, ", ".join(held))


@dataclass(frozen=True)
class AtEnd(Filter):
    """The layer is among the first or the last of its stack, or of the linears."""

    end: Literal["first", "last"]
    count: int
    unit: Literal["blocks", "linears"]

    def judge(self, layer: Layer) -> Verdict:
        """As `Filter.judge`."""
        place = layer.block if self.unit == "blocks" else layer.place
        if place is None:
            return Verdict(False, f"outside of all {self.unit}")
        index, of = place
        inside = index < self.count if self.end == "first" else index >= of - self.count
        ends = self.end if self.count == 1 else f"{self.end} {self.count}"
        return Verdict(inside, f"{'' if inside else 'not '}in the {ends} of {of} {self.unit}")

    def misfit(self, layers: Sequence[Layer]) -> str | None:
        """As `Filter.misfit`."""
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

    def judge(self, layer: Layer) -> Verdict:
        try:
            verdict = self.function(layer.module, layer.fqn)
        except Exception as error:
            raise ValueError(
                f"filter raised {type(error).__name__} on {layer.fqn!r}: {error}. The model was left as it was"
            ) from error
        if not isinstance(verdict, bool):
            raise TypeError(f"filter(module, fqn) returns True or False; it returned {verdict!r} for {layer.fqn!r}")
        return Verdict(verdict, self.fact if verdict or not self.fact else f"not {self.fact}")


def sizes(module: nn.Module) -> tuple[int, int]:
    """in_features and out_features of a linear: `nn.Linear`, or Transformers' `Conv1D`."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.nx, module.nf  # type: ignore[return-value]


def _joined(*verdicts: Verdict) -> str:
    """Facts one after the other, each once."""
    return ", ".join(dict.fromkeys(verdict.reason for verdict in verdicts if verdict.reason))


def _called(given: type[nn.Module] | str) -> str:
    return given if isinstance(given, str) else given.__name__

"""What a tensor is, told from the graph behind it: a parameter, or what is made of parameters alone; or masked scores.

Neither is kept in FP8. A parameter, because it is there anyway. Scores to which a mask was added may hold -inf, in FP8
a group of 32 that is lost; what follows, a softmax, is finite again. Values would have to be looked at, which stalls a
GPU, so it is the graph that is: a few steps back, as what makes either is near.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

_STEPS = 16
"""Nodes of the graph that are looked at."""
_SAME_VALUES = frozenset(
    "Alias AsStrided Clone Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T ToCopy Transpose "
    "Unbind UnsafeView Unsqueeze View".split()
)
"""Operations that give elements of their input, or casts of them."""
_INFINITE_STAYS = _SAME_VALUES | {"Add", "Clamp", "Div", "Maximum", "Minimum", "Mul", "Neg", "Sub"}
"""Operations whose output may be infinite where an input is. Not softmax, nor exp and tanh."""
_MASKING = frozenset("CopySlices IndexCopy IndexFill IndexPut MaskedFill MaskedScatter Where".split())
"""Operations that write over some elements."""
_ADDING = frozenset(("Add", "Sub", "Baddbmm"))
"""Operations that mask where what is added needs no gradient."""
_OF_DATA = frozenset("Convolution Embedding EmbeddingBag Gather IndexSelect".split())
"""Operations that make an activation of a parameter, with data that need no gradient."""
_PRODUCTS = frozenset("Addmm Baddbmm Bmm Linear Mm".split())
"""Operations that do so where one side needs no gradient."""


def is_parameter(tensor: Tensor, own: Collection[int] = ()) -> bool:
    """Whether a tensor is a parameter, a view or cast of one, or of the size of one and made of parameters alone, as
    `weight * 2` is, or what a parametrization makes.

    Args:
        tensor: One that needs a gradient.
        own: Identities of leaves that are parameters whatever their class.
    """
    if tensor.is_leaf:
        return isinstance(tensor, nn.Parameter) or id(tensor) in own
    sizes, same_values = [], True
    for kind, node in _lineage(tensor, through=None):
        if kind == "AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter) and id(node.variable) not in own:
                return False
            sizes.append(node.variable.numel())
        elif kind is None or kind in _OF_DATA or (kind in _PRODUCTS and _has_constant(node)):
            return False
        else:
            same_values &= kind in _SAME_VALUES
    return same_values or tensor.numel() in (*sizes, sum(sizes))


def is_masked(tensor: Tensor) -> bool:
    """Whether a tensor that needs a gradient was masked, by an addition of what needs none or by writing into it, and
    nothing since made it finite.
    """
    return any(
        kind in _MASKING or (kind in _ADDING and _has_constant(node))
        for kind, node in _lineage(tensor, through=_INFINITE_STAYS)
    )


def _has_constant(node: Any) -> bool:
    return any(function is None for function, _ in node.next_functions)


def _lineage(tensor: Tensor, through: Collection[str] | None) -> Iterator[tuple[str | None, Any]]:
    """Kinds and nodes behind a tensor, nearest first, not further than operations of the kinds `through`; the kind is
    None for a function written in Python, and where there are too many.
    """
    waiting = [] if tensor.grad_fn is None else [tensor.grad_fn]
    for _ in range(_STEPS):
        if not waiting:
            return
        node: Any = waiting.pop(0)
        kind = _kind(node)
        yield kind, node
        if kind != "AccumulateGrad" and (through is None or kind in through):
            waiting += [function for function, _ in node.next_functions if function is not None]
    if waiting:
        yield None, None


def _kind(node: Any) -> str | None:
    name = node.name().rpartition("::")[2]
    if name in ("AccumulateGrad", "CopySlices"):
        return name
    kind, backward, number = name.rpartition("Backward")
    return kind if backward and number.isdecimal() else None

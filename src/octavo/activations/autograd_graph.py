"""Read the autograd graph of a tensor: the operations behind it, and whether it depends on parameters alone.

Only names and edges of nodes are read, never values: reading values would stall a GPU.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

_STEPS = 16
"""Maximum number of nodes to inspect behind a tensor."""
SAME_VALUES = frozenset(
    "Alias AsStrided Clone Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T ToCopy Transpose "
    "Unbind UnsafeView Unsqueeze View".split()
)
"""Operations that return elements of their input, or casts of them."""
_OF_DATA = frozenset("Convolution Embedding EmbeddingBag Gather IndexSelect".split())
"""Operations of a parameter and data without gradient, which return an activation."""
_PRODUCTS = frozenset("Addmm Baddbmm Bmm Linear Mm".split())
"""Operations that return an activation if one operand needs no gradient."""


def created_nodes(roots: Iterable[Any], first: int) -> Iterator[Any]:
    """Yield nodes reachable from `roots`, inclusive, that this thread created from sequence number `first` on."""
    waiting = [node for node in roots if node is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        if operation_of(node) == "AccumulateGrad" or node._sequence_nr() < first:
            continue
        yield node
        for function, _ in node.next_functions:
            if function is not None and function not in visited:
                visited.add(function)
                waiting.append(function)


def operation_of(node: Any) -> str | None:
    """Return `"Mul"` for a node called MulBackward0; None for a function written in Python."""
    name = node.name().rpartition("::")[2]
    if name in ("AccumulateGrad", "CopySlices"):
        return str(name)
    kind, backward, number = name.rpartition("Backward")
    return str(kind) if backward and number.isdecimal() else None


def producer(node: Any) -> Any:
    """Return the operation that computed the output of a node: the first that is not a view or cast."""
    for _ in range(_STEPS):
        if node is None or operation_of(node) not in SAME_VALUES:
            return node
        node = node.next_functions[0][0]
    return None


def is_parameter(tensor: Tensor, own: Collection[int] = ()) -> bool:
    """Return whether a tensor is a parameter, a view or cast of one, or a function of parameters alone of its size."""
    if tensor.is_leaf:
        return isinstance(tensor, nn.Parameter) or id(tensor) in own
    leaves, same_values = _parameters_behind(tensor.grad_fn, own)
    sizes = [leaf.numel() for leaf in leaves]
    return bool(leaves) and (same_values or tensor.numel() in (*sizes, sum(sizes)))


def parameters_of(node: Any, own: Collection[int] = ()) -> list[Tensor]:
    """Return the parameters behind a node; [] if its output also depends on anything else."""
    return [] if node is None else _parameters_behind(node, own)[0]


def _parameters_behind(node: Any, own: Collection[int]) -> tuple[list[Tensor], bool]:
    """Return parameters behind a node, and whether its output has their values; none if there is anything else."""
    leaves: list[Tensor] = []
    same_values = True
    for kind, other in _behind(node):
        if kind == "AccumulateGrad":
            leaf = other.variable
            if not isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                return [], False
            leaves.append(leaf)
        elif (
            kind is None or kind in _OF_DATA or (kind in _PRODUCTS and any(f is None for f, _ in other.next_functions))
        ):
            return [], False
        else:
            same_values &= kind in SAME_VALUES
    return leaves, same_values


def _behind(node: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield kinds and nodes from a node on, nearest first; kind None for Python functions, and after too many nodes."""
    waiting = [node]
    for _ in range(_STEPS):
        if not waiting:
            return
        node = waiting.pop(0)
        yield operation_of(node), node
        waiting += [function for function, _ in node.next_functions if function is not None]
    if waiting:
        yield None, None

"""Decide which saved tensors may be rounded to FP8: those of listed operations, whose gradients are well-conditioned.

    product with a weight, convolution    ∂W = Gᵀ X    X; not learned queries, whose scores a softmax takes
    gating y = act(a)·b                   both factors
    silu, gelu                            x: f' is smooth, and f' of the rounded x within 2⁻⁴·|x|·|f''| of f'(x)

Measurements rule out q, k, v and the output of attention (backward combines them with softmax statistics of the
unrounded ones); results of sigmoid, tanh, exp and softmax (their derivatives are differences of nearly equal numbers);
operands of products of two activations (a common offset of the keys cancels in the gradient, its rounding does not);
inputs of sums of squares; arguments of sine and cosine; x of a norm if it is a scaled sum (docs/memory.md).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import starmap
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

# Operations whose result counts as the gate in a product of two activations
_ACTIVATIONS = frozenset("Elu Gelu HardSigmoid Hardswish LeakyRelu Mish Relu Sigmoid Silu Softplus Tanh".split())
_OWN_ACTIVATION = "_ActivationFunctionBackward"
_PRODUCTS = {
    "Addmm": {"mat1": 2, "mat2": 1}, "Baddbmm": {"batch1": 2, "batch2": 1}, "Bmm": {"self": 1, "mat2": 0},
    "Convolution": {"input": 1}, "GroupedMm": {"self": 1}, "Linear": {"input": 1}, "MkldnnLinear": {"self": 1},
    "Mm": {"self": 1, "mat2": 0},
}  # fmt: skip
"""For each saved operand of a product: the index of the other operand in `next_functions`."""
_INPUTS = {"Gelu": ("self",), "Silu": ("self",)}
_SUMS = frozenset(("Add", "Sub", "Sum"))
_MAX_TERMS = 16
_STEPS = 16  # Maximum number of nodes to inspect behind a tensor
SAME_VALUES = frozenset(
    "Alias AsStrided Clone Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T ToCopy Transpose "
    "Unbind UnsafeView Unsqueeze View".split()
)
"""Operations that return elements of their input, or casts of them."""
# Operations of a parameter and data without gradient, which return an activation
_OF_DATA = frozenset("Convolution Embedding EmbeddingBag Gather IndexSelect".split())
# Operations that return an activation if one operand needs no gradient
_AND_DATA = frozenset("Addmm Baddbmm Bmm Linear Mm".split())


def may_be_rounded(
    node: Node, own: Collection[int], is_weight: Callable[[Tensor], bool], saved: Callable[[str], Tensor | None]
) -> Iterator[str]:
    """Yield names of the tensors saved by a node that may be rounded to FP8."""
    # Reads names and edges of nodes, never values: that would stall a GPU.
    kind = operation_of(node) or ""
    yield from _INPUTS.get(kind, ())
    inputs = [function for function, _ in node.next_functions]
    for name, index in _PRODUCTS.get(kind, {}).items():
        operand = inputs[index] if index < len(inputs) else None
        parameters = [] if operand is None else _parameters_behind(operand, own)[0]
        if parameters and all(map(is_weight, parameters)):
            yield name
    if kind == "Mul" and len(inputs) == 2 and any(map(_is_activation, inputs)):
        one, other = saved("self"), saved("other")
        if one is not None and other is not None and one is not other and one.shape == other.shape:
            yield from ("self", "other")


def _is_activation(function: Node | None) -> bool:
    node = producer(function)
    return node is not None and (operation_of(node) in _ACTIVATIONS or node.name() == _OWN_ACTIVATION)


def is_scaled_sum(x: Tensor) -> bool:
    """Return whether x [..., K] is a sum of terms each times a factor of whole rows that needs a gradient."""
    waiting = [x.grad_fn]  # nearest first: a term without a factor ends the search
    for term in waiting:
        if (node := producer(term)) is None:
            return False
        kind = operation_of(node)
        if kind in _SUMS:
            waiting += [function for function, _ in node.next_functions]
        elif kind != "Mul" or not any(starmap(_is_row_factor, node.next_functions)):
            return False
        if len(waiting) > _MAX_TERMS:
            return False
    return True


def _is_row_factor(function: Any, index: int) -> bool:
    kind = None if function is None else operation_of(function)
    if kind is None:  # a constant, or of a Python function, which torch 2.11 may have freed
        return False
    shape = function.variable.shape if kind == "AccumulateGrad" else function._input_metadata[index].shape
    return bool(math.prod(shape[-1:]) == 1)


def created_nodes(roots: Iterable[Node | None], first: int) -> Iterator[Node]:
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


def operation_of(node: Node) -> str | None:
    """Return `"Mul"` for a node called MulBackward0; None for a function written in Python."""
    name = node.name().rpartition("::")[2]
    if name in ("AccumulateGrad", "CopySlices"):
        return name
    kind, backward, number = name.rpartition("Backward")
    return kind if backward and number.isdecimal() else None


def producer(node: Node | None) -> Node | None:
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


def _parameters_behind(node: Node | None, own: Collection[int]) -> tuple[list[Tensor], bool]:
    """Return parameters behind a node, and whether its output has their values; none if there is anything else."""
    leaves: list[Tensor] = []
    same_values = True
    for kind, other in _behind(node):
        if kind == "AccumulateGrad":
            leaf = other.variable
            if not isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                return [], False
            leaves.append(leaf)
        elif kind is None or kind in _OF_DATA:
            return [], False
        elif kind in _AND_DATA and any(function is None for function, _ in other.next_functions):
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

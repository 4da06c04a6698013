"""The elementwise parts of a Muon step on one matrix: its momentum, stored as AdamW's first moment, and its update.

    momentum_step    m = β m + (1 − β) g;  out = (1 − β) g + β m with Nesterov, else m
    subtract         p = p (1 − decay) − lr · update

In PyTorch operations on every device, in chunks: of a size that fits into a CPU's cache, and on a GPU of one that needs
few launches.
"""

from torch import Tensor

from octavo.kernels.adamw.moments import compress, expand
from octavo.kernels.adamw.reference import (
    CHUNK_ELEMENTS,
    ParamState,
    master_values,
    random_bits_of,
    saturated,
    write_parameter,
)

GPU_CHUNK_ELEMENTS = 1 << 26
"""Elements per chunk on a GPU: temporaries of some hundred MB."""


def momentum_step(
    state: ParamState, beta: float, out: Tensor, *, nesterov: bool, maximize: bool = False, factor: float = 1.0
) -> None:  # fmt: skip
    """Update the momentum of a matrix [R,C] by its gradient times `factor`, in place, and write what to orthogonalize
    to `out` [R,C].
    """
    for start, end in _chunks(state.param):
        part = state.rows(start, end)
        grad = saturated(part.grad if factor == 1.0 else part.grad.float() * factor)
        if maximize:
            grad = -grad
        momentum = part.exp_avg if part.scales is None else expand(part.exp_avg, part.scales[0], part.scales[1], True)
        momentum.lerp_(grad, 1 - beta)
        out[start:end].copy_(grad.lerp(momentum, beta) if nesterov else momentum)
        if part.scales is not None:
            compressed = compress(momentum, True, random_bits_of(part, 0))
            for old, new in zip((part.exp_avg, *part.scales), compressed, strict=True):
                old.copy_(new)


def subtract(state: ParamState, update: Tensor, lr: float, decay: float) -> None:
    """Decay the master of a matrix [R,C] by `decay` and subtract `lr` times `update` [R,C], in place."""
    for start, end in _chunks(state.param):
        part = state.rows(start, end)
        values = master_values(part)
        values.mul_(1 - decay).add_(update[start:end], alpha=-lr)
        write_parameter(part, values)


def _chunks(matrix: Tensor) -> list[tuple[int, int]]:
    rows, columns = matrix.shape
    size = max((GPU_CHUNK_ELEMENTS if matrix.is_cuda else CHUNK_ELEMENTS) // max(columns, 1), 1)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]

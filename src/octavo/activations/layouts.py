"""View the elements of a strided tensor as a matrix in memory order, and back."""

from typing import Any

from torch import Tensor

WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Candidate widths of the matrix for a dense tensor; all give the same groups of 32."""


def _dims(tensor: Tensor) -> list[tuple[int, int, int]]:
    """Return stride, size and index of the dimensions with more than one element, outermost first."""
    dims = [(tensor.stride(d), tensor.shape[d], d) for d in range(tensor.ndim)]
    return sorted((dim for dim in dims if dim[0] > 0 and dim[1] > 1), key=lambda dim: (-dim[0], dim[2]))


def _merged(tensor: Tensor) -> list[tuple[int, int]]:
    """Return size and stride of the dimensions in memory order, with contiguous dimensions merged."""
    merged: list[tuple[int, int]] = []
    for stride, size, _ in _dims(tensor):
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def element_key(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors with the same elements in memory."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor._version, tensor.dtype, tensor.is_neg(), tensor.storage_offset(), tuple(_merged(tensor))


def as_matrix(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, each once, as a matrix: a view if they are dense or evenly spaced rows."""
    merged = _merged(tensor)
    flat = tensor.detach().as_strided([size for size, _ in merged], [stride for _, stride in merged]).resolve_neg()
    if len(merged) > 1:
        return flat.reshape(-1, merged[-1][0])
    count = flat.numel()
    return flat.reshape(-1, next((width for width in WIDTHS if count % width == 0), count))


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return dense strides in the same order of dimensions; expanded dimensions keep stride 0."""
    strides = [stride if size == 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    step = 1
    for _, size, dim in reversed(_dims(tensor)):
        strides[dim], step = step, step * size
    return tuple(strides)

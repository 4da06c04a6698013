"""Row chunks: parts of a matrix whose intermediate results fit into a core's cache."""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 262144  # Elements per chunk: a megabyte in float32


def row_chunks(shape: tuple[int, int], multiple: int = 1) -> list[slice]:
    """Return slices over the rows of a matrix [R,C]; all but the last have a multiple of `multiple` rows."""
    # The list is empty for an empty matrix.
    rows, columns = shape
    step = max(CHUNK_ELEMENTS // max(columns * multiple, 1), 1) * multiple
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)] if columns else []


def visible(tensor: Tensor) -> bool:
    """Whether Python may look at a tensor's values at little cost: real ones, on a CPU, outside a graph."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()

"""What a forward pass keeps for backward, measured: the memory that FP8 training is about.

Counted by unique storage, as the allocator sees it: a tensor saved by three layers counts once, a view counts as the
storage it keeps alive. The model's own parameters and buffers do not count; they exist anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Kept:
    """Storages kept for backward.

    Attributes:
        by_dtype: Bytes by the dtype under which a storage was saved first.
    """

    by_dtype: dict[torch.dtype, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes over all dtypes."""
        return sum(self.by_dtype.values())


@contextmanager
def kept_for_backward(model: nn.Module) -> Iterator[Kept]:
    """Measure what the forward passes inside the block keep for backward.

    Works on CPU, CUDA and under FakeTensorMode (where nothing is allocated). Run the forward inside, read `.bytes`
    after.

    Args:
        model: Its parameters and buffers are left out of the count.
    """
    own = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept = Kept()

    def pack(tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in own:
            own.add(key)
            size = tensor.untyped_storage().nbytes()
            kept.by_dtype[tensor.dtype] = kept.by_dtype.get(tensor.dtype, 0) + size
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

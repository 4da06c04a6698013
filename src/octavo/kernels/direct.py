"""Calls of ops below the dispatcher, from plans that earlier calls left (docs/host_time.md).

The first call with given options, dtypes, shapes, strides and devices is checked and leaves a `Call`; later ones run
its plan: allocate, launch. Plans hold no tensors, and fix neither the stream nor the alignment of addresses.
"""

import threading
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.kernels.registry import GPU_TYPES, Backend, Case, Op, Shape
from octavo.runtime.execution_context import is_capturing
from octavo.runtime.torch_compat import eager_signature


def signature(x: Tensor, *others: Tensor | None, records: bool = False) -> tuple[Any, ...] | None:
    """Return what an op on these tensors depends on, but their values and addresses; None for the ordinary path."""
    # With `records`, also while autograd records: for a caller that is an autograd function itself.
    if x.device.type not in GPU_TYPES:
        return None
    # Last, since Dynamo cannot trace what `is_capturing` asks: under a compiler there is no eager signature.
    tensors = eager_signature(x, *others, records=records)
    return None if tensors is None or is_capturing(x.device) else tensors


class Call:
    """Calls of an op with the same signature and options."""

    def __init__(self, case: Case, shape: Shape | None = None) -> None:
        self._case, self._shape = case, shape
        self._backend: Backend[Any] | None = None
        self._plan: Any = None

    def plan(self, op: Op[Any], device: torch.device, *arguments: object) -> Any:
        """Return the plan of the backend that the registry chooses now; None if that backend makes no plans."""
        backend = op.choose(device, self._case, self._shape)
        if backend is not self._backend:
            self._plan = backend.plan(*arguments)
            self._backend = backend
        return self._plan


T = TypeVar("T")


class Plans(dict[Any, T]):
    """What calls with one signature and options have in common, by these."""

    def add(self, key: object, plan: T) -> T:
        """Add a plan; all are dropped beyond `MAX_PLANS`."""
        if len(self) >= MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan


MAX_PLANS = 1024


class ZeroBlocks(threading.local):
    """Zeros, cut from a block that one memory set clears, instead of a memory set for each call.

    Maxima by atomics start from zeros, and a memory set costs as much as another launch. Each part is handed out once,
    on the stream that cleared its block; a thread has a block per stream. Only for direct calls: elsewhere a block
    could come from the memory pool of a CUDA graph.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int | None, int], tuple[Tensor, int]] = {}  # And where what is left of each begins

    def cut(self, size: int, device: torch.device, stream: int) -> tuple[Tensor, int]:
        """Return a block of int32 zeros and the index in it, a multiple of 16, where `size` of them begin."""
        # `stream` is the current one of the device.
        if 8 * size > BLOCK:
            return new_zeros(size, device, stream)
        key = device.index, stream
        block = self._blocks.get(key)
        if block is None or block[1] + size > BLOCK:
            block = new_zeros(BLOCK, device, stream)
        zeros, start = block
        self._blocks[key] = zeros, start + (size + 15 & -16)
        return zeros, start


def new_zeros(size: int, device: torch.device, stream: int) -> tuple[Tensor, int]:
    """Return [size] int32 zeros, which begin at index 0."""
    return torch.zeros(size, dtype=torch.int32, device=device), 0


BLOCK = 1 << 18  # Elements of a block: 1 MiB of maxima, enough for 8 calls or more
ZEROS = ZeroBlocks()

"""Models and batches without storage: the same modules on tensors that have a shape, dtype and device, and no bytes."""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

M = TypeVar("M", bound=nn.Module)

INTEGER_INPUTS = ("ids", "mask", "labels", "positions", "targets")
"""Endings of the names of arguments that hold integers, where a batch gives shapes only."""


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """FakeTensorMode that takes real tensors too, and leaves the process's random numbers as they were."""
    state = torch.get_rng_state()
    try:
        with _unpacked_sequences(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        torch.set_rng_state(state)


@contextmanager
def _unpacked_sequences() -> Iterator[None]:
    """Transformers looks at position ids to see whether sequences are packed. Of fake ones it assumes so, and makes a
    mask of [sequences, length, length], which takes attention off its flash kernel; here they are taken for what they
    are in nearly every run.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    looks = getattr(masks, name, None)
    if looks is not None:
        setattr(masks, name, lambda position_ids: None)
    try:
        yield
    finally:
        if looks is not None:
            setattr(masks, name, looks)


def stand_in(device: torch.device) -> torch.device:
    """Where fake tensors for a device live: on it, or on the CPU if this PyTorch has no such device.

    Attention and the FP8 ops have shape functions of their own, equal on both, so what is kept is the same.
    """
    return device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")


def fake_copy(model: M, mode: FakeTensorMode, device: torch.device, *, without: Iterable[nn.Module] = ()) -> M:
    """A copy of a model without storage. Real and meta parameters become fake ones; ties stay ties.

    Args:
        model: Any module; it is not changed.
        mode: The mode that is active when the copy is used.
        device: Where the copy is said to be.
        without: Modules in whose place the copy has an `nn.Identity`.
    """
    memo: dict[int, Any] = {id(module): nn.Identity() for module in without}
    parts = _parts(model, set(memo))
    with mode:
        for tensor in (t for part in parts for kind in (part._parameters, part._buffers) for t in kind.values()):
            if tensor is not None and id(tensor) not in memo:
                twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(twin, requires_grad=tensor.requires_grad) if is_parameter else twin
    with FakeCopyMode(mode):
        return copy.deepcopy(model, memo)


def _parts(model: nn.Module, without: set[int]) -> list[nn.Module]:
    """A module and all in it, but some and what is in those."""
    found = [model]
    for child in model.children():
        if id(child) not in without:
            found += _parts(child, without)
    return found


def fake_batch(batch: Any, size: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """A batch without storage, in the form it was given: a mapping, a tuple or list, or one tensor.

    Args:
        batch: Holds tensors, of which only shape and dtype are read, or shapes (tuples of int), whose dtype is int64
            where the name says so (`INTEGER_INPUTS`) and else `dtype`. Other values stay as they are.
        size: Replaces the first dimension of every tensor; None keeps it.
        dtype: Of floating-point inputs given as shapes.
        device: Where the tensors are said to be.
    """

    def make(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            shape, kind = tuple(value.shape), value.dtype
        elif isinstance(value, tuple | list | torch.Size) and value and all(isinstance(n, int) for n in value):
            shape, kind = tuple(value), torch.int64 if name.endswith(INTEGER_INPUTS) else dtype
        else:
            return value
        if size is not None and shape:
            shape = (size, *shape[1:])
        return torch.zeros(shape, dtype=kind, device=device)

    if isinstance(batch, Mapping):
        return {name: make(name, value) for name, value in batch.items()}
    if isinstance(batch, Tensor):
        return make("", batch)
    if isinstance(batch, tuple | list):
        return tuple(make("", value) for value in batch)
    raise TypeError(f"a batch is a mapping, a tuple or a tensor, of tensors or shapes; got {type(batch).__name__}")

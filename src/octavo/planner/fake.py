"""Fake models and batches: the same modules on tensors with a shape, dtype and device but no storage."""

import copy
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.resident import ResidentWeight
from octavo.runtime.torch_compat import FakeCopyMode, FakeTensorMode

M = TypeVar("M", bound=nn.Module)

INTEGER_INPUTS = ("ids", "mask", "labels", "positions", "targets")
"""Argument names with these endings hold integers if a batch gives only shapes."""

_lock = threading.Lock()
_unpacked: Counter[int] = Counter()  # Contexts of `unpacked_sequences` under way, by thread


@contextmanager
def fake_tensors(device: str = "cuda", *, packed: bool = False) -> Iterator[FakeTensorMode]:
    """FakeTensorMode that also accepts real tensors and restores the random number state on exit."""
    # `device` is the type of device to predict: with "cuda", attention is fused wherever it is on a GPU. `packed`:
    # whether Transformers masks the documents of batches with positions.
    state = torch.get_rng_state()
    fused = _fused_attention() if device == "cuda" else nullcontext()
    sequences = nullcontext() if packed else unpacked_sequences()
    log, unraised = logging.getLogger("torch._subclasses.fake_tensor"), _Unraised()
    log.addFilter(unraised)
    try:
        with sequences, fused, FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        log.removeFilter(unraised)
        torch.set_rng_state(state)


class _Unraised(logging.Filter):
    """Leaves out PyTorch's records of errors that it raises as well: who catches one says what it means."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Keep attention fused on fake tensors of a CPU if values have another size than queries and keys."""
    # As in multi-head latent attention. GPUs have fused kernels for it; CPUs make two products and a softmax of it.
    original = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        on_cpu = query.device.type == "cpu" and query.ndim == 4 and query.dtype in (torch.bfloat16, torch.float16)
        if not on_cpu or attn_mask is not None or enable_gqa or query.shape[-1] == value.shape[-1]:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, trains, dropout_p, is_causal, scale=scale
        )[0]
        return out

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Keep Transformers from looking for packed sequences in a batch."""
    # It reads position ids to detect packing: on a GPU the host waits for them. For fake ones it assumes packing and
    # builds a mask of [sequences, length, length], which disables flash attention. Most runs do not pack.
    masks = sys.modules.get("transformers.masking_utils")
    name, thread = "find_packed_sequence_indices", threading.get_ident()
    original = getattr(masks, name, None)
    with _lock:
        _unpacked[thread] += 1
        if original is not None and not isinstance(original, _FindOnOtherThreads):
            setattr(masks, name, _FindOnOtherThreads(original))
    try:
        yield
    finally:
        with _lock:
            _unpacked[thread] -= 1
            if original is not None and not _unpacked.total():
                setattr(masks, name, getattr(masks, name).original)


class _FindOnOtherThreads:
    """Transformers' function on threads outside of `unpacked_sequences`; None on those inside."""

    def __init__(self, original: Callable[[Tensor], Tensor | None]) -> None:
        self.original = original

    def __call__(self, position_ids: Tensor) -> Tensor | None:
        return None if _unpacked[threading.get_ident()] else self.original(position_ids)


def fake_device(device: torch.device) -> torch.device:
    """Return the device for fake tensors: the given one, or the CPU if this PyTorch has no such device."""
    # Attention and the FP8 ops have the same shape functions on both, so they save the same tensors.
    return device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")


def fake_copy(
    model: M, mode: FakeTensorMode, device: torch.device, *, without: Sequence[nn.Module] = (),
    dtype: torch.dtype | None = None,
) -> M:  # fmt: skip
    """Copy a model without storage. Real and meta parameters become fake ones; tied parameters stay tied."""
    # `dtype`: of what has another floating dtype.
    memo: dict[int, Any] = {id(module): nn.Identity() for module in without}
    parts = [module for _, module in model.named_modules(set(without))]

    def empty(tensor: Tensor) -> Tensor:
        own = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=own, device=device)

    with mode:
        for tensor in (t for part in parts for kind in (part._parameters, part._buffers) for t in kind.values()):
            if tensor is not None and id(tensor) not in memo:
                twin = tensor.map(empty) if isinstance(tensor, ResidentWeight) else empty(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(twin, requires_grad=tensor.requires_grad) if is_parameter else twin
    with FakeCopyMode(mode):
        return copy.deepcopy(model, memo)


def fake_batch(batch: object, size: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Build a batch without storage in the form of the given one: a mapping, a tuple or list, or one tensor."""

    def make(name: str, value: object) -> Any:
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


@contextmanager
def batch_errors(shapes: Sequence[tuple[int, ...]]) -> Iterator[None]:
    """Report errors inside a model as errors of the model and a batch of these shapes."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the model cannot run a batch of shapes {[list(s) for s in shapes]}: {reason}") from error

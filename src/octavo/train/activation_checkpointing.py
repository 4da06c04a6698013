"""Activation checkpointing of the repeated block.

The block is found, not named (`octavo.runtime.blocks`). "full" keeps a block's input
and recomputes the rest in backward; "selective" also keeps what matrix products and attention put out, and
recomputes the cheap rest. Only the `forward` of each block is wrapped: modules, names, hooks and `state_dict` stay
as they are. The recomputation runs the same kernels on the same inputs, so gradients are bitwise those without
checkpointing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import octavo.kernels  # noqa: F401  registers the ops named below
from octavo.runtime.blocks import find_blocks
from octavo.runtime.torch_compat import TorchDispatchMode
from octavo.train.config.run_config import ConfigError

aten = torch.ops.aten
SAVED_OPS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.octavo.scaled_mm.default,
]
"""Ops whose outputs "selective" keeps: costly to compute, cheap to hold."""


class Checkpointing:
    """Activation checkpointing applied to `model` ("none", "full" or "selective"); `in_graphs` where blocks compile.

    Raises ConfigError for a model without a repeated block.
    """

    def __init__(self, model: nn.Module, mode: str, *, in_graphs: bool = False) -> None:
        self._recorder: _Recorder | None = None
        if mode == "none":
            return
        # A graph saves what its partitioner decides, where saved-tensor hooks see it.
        contexts = partial(create_selective_checkpoint_contexts, SAVED_OPS) if in_graphs else self._contexts
        context: dict[str, Any] = {} if mode == "full" else {"context_fn": contexts}
        blocks = find_blocks(model)
        if not blocks:
            raise ConfigError(
                f'precision.checkpointing: {type(model).__name__} has no list of equal blocks to recompute; take "none"'
            )
        for block in blocks:
            recomputed = partial(checkpoint, block.forward, use_reentrant=False, **context)
            block.forward = update_wrapper(recomputed, block.forward, updated=())  # its signature

    @contextmanager
    def saved_outputs(self) -> Iterator["_Recorder"]:
        """Counts what "selective" keeps of the forwards inside: it holds them itself, unseen by saved-tensor hooks."""
        self._recorder = _Recorder()
        try:
            yield self._recorder
        finally:
            self._recorder = None

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        caching, cached = create_selective_checkpoint_contexts(SAVED_OPS)
        return (caching if self._recorder is None else _nested(self._recorder, caching)), cached


class _Recorder(TorchDispatchMode):
    """Adds up the outputs of SAVED_OPS, each storage once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in SAVED_OPS:
            for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
                if isinstance(output, torch.Tensor):
                    storage = output.untyped_storage()
                    self._storages[storage.data_ptr()] = storage
        return outputs


@contextmanager
def _nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield

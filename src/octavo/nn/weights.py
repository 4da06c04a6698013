"""FP8 copies of weights that are used more than once: `convert(keep_weights=True)` and `accumulating`.

By default a weight is quantized in each forward and cast again in each backward: 6 bytes of memory traffic per
parameter and micro-batch, and no memory. A copy saves that traffic but must never be stale, so there are two kinds,
each with its own proof of freshness:

    one pass              Forward quantizes W once, and autograd saves the copy that dgrad reads: 4 bytes of traffic, 1
                          byte per parameter between forward and backward. There is no lookup: backward reads the copy
                          that its own forward made. A W that autograd sees change in between raises, as without.
    accumulating(model)   Inside, forwards share one copy: 4 bytes of traffic per optimizer step and 5 for the check at
                          the end, 2 bytes per parameter (1 on a CPU). The caller promises that weights do not change;
                          changes that PyTorch reports are seen, and all others raise at the end.

No broader reuse can be proven. The version counter misses writes through `.data`, NumPy or a custom kernel, which
hand-written optimizers and weight averaging use; FSDP refills the same parameter, in the same memory, with the same
version; parameters that are views of one buffer share a base; and looking at the values costs most of what it saves.

At 2048 tokens per micro-batch, quantizing a weight costs about 11 % of its products on an H200, and 3 % at 8192 tokens
(6 bytes at 4.3 TB/s against 6·tokens operations at 1 PFLOP/s; predicted, not measured): use both for small
micro-batches.

`keep_weights` has no effect, and weights are quantized at each use, where

    FSDP shards the weight      a copy would keep on each rank what FSDP frees; weights that are gathered in FP8
                                (`octavo.parallelize`) need none
    it is no `nn.Parameter`     `torch.func.functional_call`, parametrizations
    torch.compile traces        the graph quantizes weights where it uses them

`accumulating` shares nothing under a dispatch mode (selective checkpointing, fake tensors), in inference mode and while
a CUDA graph is captured.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo.kernels import quantize, quantize_pair, wants_copies
from octavo.numerics.recipe import Recipe
from octavo.runtime.execution_context import execution_context
from octavo.tensor import ScaledTensor

WeightCasts = tuple[ScaledTensor, ScaledTensor]
"""W for forward and W for dgrad."""


@dataclass
class _SharedCasts:
    """The casts of one parameter inside `accumulating`, for as long as the parameter is in `state`."""

    name: str
    parameter: Tensor
    state: tuple[Any, ...] = ()
    casts: dict[Any, tuple[Tensor, Recipe, WeightCasts]] = field(default_factory=dict)

    def get(self, w_NK: Tensor, recipe: Recipe) -> WeightCasts:
        """The casts of the parameter, or of a view of it."""
        state = _state(self.parameter)
        if state != self.state:
            self.state, self.casts = state, {}
        key = (w_NK.shape, w_NK.stride(), w_NK.storage_offset(), recipe.w, recipe.dgrad_w)
        if key not in self.casts:
            self.casts[key] = w_NK.detach(), recipe, _cast(w_NK, recipe)
        return self.casts[key][2]

    def stale(self) -> list[Tensor]:
        """For each cast of the present state a flag [], bool: whether a new cast would differ."""
        if self.state != _state(self.parameter):
            return []
        return [_differ(_tensors(casts), _tensors(_cast(w_NK, recipe))) for w_NK, recipe, casts in self.casts.values()]


_SHARED: dict[int, _SharedCasts] = {}
"""By id of the parameter, which the entry keeps alive."""
_FSDP_ROOTS: WeakSet[nn.Module] = WeakSet()
_FSDP_MODULES: WeakSet[nn.Module] = WeakSet()


def keeps_weight(module: nn.Module) -> bool:
    """Whether a layer that was converted with `keep_weights=True` may use a copy of its weight more than once now."""
    if not module.keeps_weight or torch.compiler.is_compiling():
        return False
    return isinstance(module._parameters.get("weight"), nn.Parameter) and not _is_sharded(module)


def cast_weight(w_NK: Tensor, recipe: Recipe, needs_dgrad: bool) -> tuple[ScaledTensor, ScaledTensor | None]:
    """Quantize a weight that may be kept, or take what was quantized inside `accumulating`.

    Args:
        w_NK: A parameter, or its transposed view.
        recipe: Of the layer.
        needs_dgrad: Whether backward reads W.

    Returns:
        W for forward, and W for dgrad where that is needed.
    """
    shared = _shared(w_NK)
    if shared is not None:
        return shared.get(w_NK, recipe)
    return _cast(w_NK, recipe) if needs_dgrad else (quantize(w_NK, recipe.w), None)


@contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """Quantize each weight once for all forwards and backwards inside, in layers converted with `keep_weights=True`.

    Use it around the micro-batches of one optimizer step:

        with octavo.nn.accumulating(model):
            for micro_batch in micro_batches:
                loss_of(model, micro_batch).backward()
        optimizer.step()

    Weights must not change inside. A change that PyTorch reports (in-place operations, a new `.data`, a step of a
    `torch.optim.Optimizer`) makes the next forward quantize again. One that it does not report (a write through
    `.data`, NumPy or a custom kernel) raises at the end, or when an optimizer steps: all weights are quantized and
    compared there. Only such a write that is undone, or followed by a reported change, before that goes unseen.

    Args:
        model: Any module; layers that are not converted so, and those that FSDP shards, run as without.

    Raises:
        RuntimeError: On leaving, or at an optimizer step inside, if weights changed unreported since they were
            quantized. Names the layers.
    """
    opened = {}
    for fqn, module in model.named_modules():
        weight = module._parameters.get("weight") if getattr(module, "keeps_weight", False) else None
        if type(weight) is nn.Parameter and id(weight) not in _SHARED and not _is_sharded(module):
            opened[id(weight)] = _SharedCasts(fqn, weight)
    _SHARED.update(opened)

    def check(*_: Any) -> None:
        _check(list(opened.values()))

    def forget(*_: Any) -> None:
        for shared in opened.values():
            shared.casts = {}

    hooks = [register_optimizer_step_pre_hook(check), register_optimizer_step_post_hook(forget)]
    try:
        yield
        check()
    finally:
        for hook in hooks:
            hook.remove()
        for key in opened:
            _SHARED.pop(key, None)


def _shared(w_NK: Tensor) -> _SharedCasts | None:
    """The entry of a parameter, or of the one that a weight is a view of, if its casts may be shared now."""
    if not _SHARED or torch.is_inference_mode_enabled():
        return None
    owner = w_NK if w_NK._base is None else w_NK._base
    shared = _SHARED.get(id(owner))
    if shared is None or shared.parameter is not owner:
        return None
    mode, *stream = execution_context(w_NK)
    return None if mode is not None or stream[1:] == [True] else shared


def _state(parameter: Tensor) -> tuple[Any, ...]:
    """What differs once a parameter has other values, as far as PyTorch reports it; and the stream."""
    return (
        parameter._version, parameter._cdata, parameter.data_ptr(), parameter.untyped_storage()._cdata,
        parameter.untyped_storage().nbytes(), parameter.storage_offset(), parameter.shape, parameter.stride(),
        parameter.dtype, parameter.device, *execution_context(parameter)[1:],
    )  # fmt: skip


@torch.no_grad()
def _check(entries: list[_SharedCasts]) -> None:
    flags = [(shared.name, flag) for shared in entries for flag in shared.stale()]
    if not flags:
        return
    stale = torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist()  # one wait for all
    names = list(dict.fromkeys(name for (name, _), changed in zip(flags, stale, strict=True) if changed))
    if names:
        raise RuntimeError(
            f"octavo: {len(names)} weights changed inside octavo.nn.accumulating, and PyTorch did not report it "
            f"(first: {names[0]!r}): something wrote into them through .data, NumPy or a custom kernel, and later "
            "micro-batches ran with the FP8 copy of the values before. Change weights outside of accumulating, or by "
            "in-place operations under torch.no_grad()"
        )


def _tensors(casts: WeightCasts) -> list[Tensor]:
    w, w_t = casts
    return [tensor for cast in (w, w_t) for tensor in (cast.data, cast.scale) if tensor is not None]


def _differ(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """Whether any bit differs, []."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    pairs = zip(ours, theirs, strict=True)
    return torch.stack(
        [(a.view(bits[a.element_size()]) != b.view(bits[b.element_size()])).any() for a, b in pairs]
    ).any()


def _is_sharded(module: nn.Module) -> bool:
    """Whether a module is inside one that FSDP2 shards. (FSDP1's weights are no parameters while they are in use.)"""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None:
        return False
    known = states._module_state_mapping
    if len(known) != len(_FSDP_ROOTS):
        from torch.distributed.fsdp import FSDPModule

        new: list[nn.Module] = [root for root in list(known) if root not in _FSDP_ROOTS]
        for root in new:
            _FSDP_ROOTS.add(root)
            if isinstance(root, FSDPModule):
                _FSDP_MODULES.update(nn.Module.modules(root))
    return module in _FSDP_MODULES


@torch.no_grad()
def _cast(w_NK: Tensor, recipe: Recipe) -> WeightCasts:
    spec, spec_t, copies = recipe.w, recipe.dgrad_w, wants_copies(w_NK.device)
    if spec == spec_t:
        w = quantize(w_NK, spec, order="both" if copies else "rows")
        return w, w
    if copies:
        return quantize_pair(w_NK, spec, None, spec_t, None)
    return quantize(w_NK, spec), quantize(w_NK, spec_t)

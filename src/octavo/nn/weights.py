"""Reuse FP8 casts of weights: `convert(keep_weights=True)` and `accumulating`.

    one pass              Forward quantizes W once, and autograd saves the cast that dgrad reads: 4 bytes of traffic, 1
                          byte per parameter between forward and backward. A change of W that autograd sees raises.
    accumulating(model)   Inside, forwards share one cast: 4 bytes of traffic per optimizer step and 5 for the check at
                          the end, 2 bytes per parameter (1 on a CPU). A change that PyTorch reports makes a new cast,
                          any other raises at the end.

No broader reuse is safe. The version counter misses writes through `.data`, NumPy or a custom kernel; FSDP refills the
same parameter with the same version; and comparing values costs most of what reuse saves. No effect if FSDP shards the
weight, if it is no `nn.Parameter`, in compiled graphs, and, of `accumulating`, for experts that are distributed or
stored as [E,K,N], under a dispatch mode, in inference mode and while a CUDA graph is captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo.kernels import needs_both_orders, quantize, quantize_pair
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.runtime.execution_context import execution_context
from octavo.runtime.torch_compat import composable_modules
from octavo.tensor import ScaledTensor

WeightCasts = tuple[ScaledTensor, ScaledTensor]  # W for forward and W for dgrad


@dataclass
class WeightCastCache:
    """The casts of one parameter inside `accumulating`; valid while the parameter is in `state`."""

    name: str
    parameter: Tensor
    state: tuple[Any, ...] = ()
    casts: dict[Any, tuple[Tensor, Recipe, Tensor | None, WeightCasts]] = field(default_factory=dict)

    def get(self, w_NK: Tensor, recipe: Recipe, factor: Tensor | None) -> WeightCasts:
        """Return the casts of the parameter, or of a view of it, times `factor`."""
        state = _state(self.parameter)
        if state != self.state:
            self.state, self.casts = state, {}
        key = (w_NK.shape, w_NK.stride(), w_NK.storage_offset(), recipe.w, recipe.dgrad_w)
        if key not in self.casts or self.casts[key][2] is not factor:
            self.casts[key] = w_NK.detach(), recipe, factor, _cast(w_NK, recipe, factor)
        return self.casts[key][3]

    def stale(self) -> list[Tensor]:
        if self.state != _state(self.parameter):
            return []
        return [_bits_differ(casts, _cast(w_NK, recipe, factor)) for w_NK, recipe, factor, casts in self.casts.values()]


_CACHES: dict[int, WeightCastCache] = {}  # By id of the parameter; the cache holds a reference to it
_FSDP_ROOTS: WeakSet[nn.Module] = WeakSet()
_FSDP_MODULES: WeakSet[nn.Module] = WeakSet()


def cast_weight(
    w_NK: Tensor, recipe: Recipe, needs_dgrad: bool, factor: Tensor | None = None
) -> tuple[ScaledTensor, ScaledTensor | None]:
    """Quantize a weight, or return its cached casts inside `accumulating`."""
    cache = _cache_of(w_NK)
    if cache is not None:
        return cache.get(w_NK, recipe, factor)
    return _cast(w_NK, recipe, factor) if needs_dgrad else (quantize(w_NK, recipe.w, factor), None)


def shares_cast(w_NK: Tensor) -> bool:
    """Whether `cast_weight` would return cached casts of a weight now, and cache new ones."""
    return bool(_CACHES) and _cache_of(w_NK) is not None


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
    `.data`, NumPy or a custom kernel) raises at the end, or when an optimizer steps, when all weights are quantized
    again and compared. It goes unnoticed only if it is undone, or followed by a reported change, before that.

    Raises:
        RuntimeError: At exit, or at an optimizer step inside, if weights changed without PyTorch reporting it.

    Examples:
        >>> model = octavo.convert(torch.nn.Linear(64, 64), keep_weights=True)
        >>> with octavo.nn.accumulating(model):
        ...     for x in torch.randn(4, 8, 64):
        ...         model(x).sum().backward()
    """
    caches = {}
    for fqn, module in model.named_modules():
        if not getattr(module, "keep_weights", False) or is_fsdp_sharded(module):
            continue
        for name, weight in module._parameters.items():
            if type(weight) is nn.Parameter and weight.ndim > 1 and id(weight) not in _CACHES:
                caches[id(weight)] = WeightCastCache(fqn if name == "weight" else f"{fqn}.{name}", weight)
    _CACHES.update(caches)

    def check(*_: object) -> None:
        _raise_if_stale(list(caches.values()))

    def forget(*_: object) -> None:
        for cache in caches.values():
            cache.casts = {}

    try:
        with register_optimizer_step_pre_hook(check), register_optimizer_step_post_hook(forget):
            yield
            check()
    finally:
        for key in caches:
            _CACHES.pop(key, None)


def _cache_of(w_NK: Tensor) -> WeightCastCache | None:
    """Return the cache of a parameter, or of the base of a view, if its casts may be shared now."""
    if not _CACHES or torch.is_inference_mode_enabled():
        return None
    owner = w_NK if w_NK._base is None else w_NK._base
    cache = _CACHES.get(id(owner))
    if cache is None or cache.parameter is not owner:
        return None
    mode, *stream = execution_context(w_NK)
    return None if mode is not None or stream[1:] == [True] else cache


def _state(parameter: Tensor) -> tuple[Any, ...]:
    """Return what changes with the values of a parameter, as far as PyTorch reports it, and the stream."""
    return (
        parameter._version, parameter._cdata, parameter.data_ptr(), parameter.untyped_storage()._cdata,
        parameter.untyped_storage().nbytes(), parameter.storage_offset(), parameter.shape, parameter.stride(),
        parameter.dtype, parameter.device, *execution_context(parameter)[1:],
    )  # fmt: skip


@torch.no_grad()
def _raise_if_stale(caches: list[WeightCastCache]) -> None:
    flags = [(cache.name, flag) for cache in caches for flag in cache.stale()]
    if not flags:
        return
    stale = torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist()  # one wait for all
    names = list(dict.fromkeys(name for (name, _), changed in zip(flags, stale, strict=True) if changed))
    if names:
        raise RuntimeError(
            f"octavo: {len(names)} weights changed inside octavo.nn.accumulating, and PyTorch did not report it "
            f"(first: {names[0]!r}): something wrote into them through .data, NumPy or a custom kernel, and later "
            "micro-batches used FP8 copies of the old values. Change weights outside of accumulating, or by "
            "in-place operations under torch.no_grad()"
        )


def _bits_differ(ours: WeightCasts, theirs: WeightCasts) -> Tensor:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    one, other = (
        [part.view(bits[part.element_size()]) for cast in casts for part in (cast.data, cast.scale) if part is not None]
        for casts in (ours, theirs)
    )
    return torch.stack([(a != b).any() for a, b in zip(one, other, strict=True)]).any()


def is_fsdp_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 shards a module. (FSDP1's weights are not parameters while in use.)"""
    composable = composable_modules()
    if len(composable) != len(_FSDP_ROOTS):
        from torch.distributed.fsdp import FSDPModule

        new: list[nn.Module] = [root for root in list(composable) if root not in _FSDP_ROOTS]
        for root in new:
            _FSDP_ROOTS.add(root)
            if isinstance(root, FSDPModule):
                _FSDP_MODULES.update(nn.Module.modules(root))
    return module in _FSDP_MODULES


@torch.no_grad()
def _cast(w_NK: Tensor, recipe: Recipe, factor: Tensor | None) -> WeightCasts:
    return quantize_both(w_NK, recipe.w, factor, recipe.dgrad_w, factor)


def quantize_both(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None
) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantize a matrix for a product over its columns and for one over its rows: once, if both casts are equal."""
    copies = needs_both_orders(x.device)
    if spec == spec_t and fold is fold_t:
        q = quantize(x, spec, fold, order="both" if copies else "rows")
        return q, q
    if copies:
        return quantize_pair(x, spec, fold, spec_t, fold_t)
    return quantize(x, spec, fold), quantize(x, spec_t, fold_t)

"""Verify registered modules: compare outputs and every gradient of a copy on the CPU with those of its declaration."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.activations.detect import Activation, Glu, ModuleSpec, Norm, activation_of, original_class
from octavo.activations.functional import FUNCTIONS
from octavo.activations.modules import gate_and_up
from octavo.numerics.error import sqnr
from octavo.runtime.torch_compat import unset_fake_temporarily

_SHAPES = ((1,), (6,), (2, 3), (1, 40), (3, 2, 5))  # Leading dimensions of the inputs
# Required agreement: operations may differ in order, and each rounds once
_LEAST_DB = {torch.float32: 80.0, torch.bfloat16: 30.0}


def check_registered(module: nn.Module, spec: ModuleSpec) -> None:
    """Compare a module with the declaration of its class."""
    name = original_class(module).__name__
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for dtype, least in _LEAST_DB.items():
            probe, reference = (_copy(module, dtype) for _ in range(2))
            expected = _reference(reference, spec)
            for leading in _SHAPES:
                for scale in (1.0, 1e3):
                    x = torch.randn(*leading, _width(probe, spec), dtype=dtype, device="cpu") * scale
                    _compare(name, spec, probe, expected, reference, x, least)


def _compare(
    name: str, spec: ModuleSpec, probe: nn.Module, expected: Callable[[Tensor], Tensor], reference: nn.Module,
    x: Tensor, least: float,
) -> None:  # fmt: skip
    results, registered = [], f"{name} was registered as {spec}"
    for function, owner in ((expected, reference), (probe, probe)):
        leaf = x.clone().requires_grad_()
        try:
            y = function(leaf)
            g = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(y)
            parameters = [p for p in owner.parameters() if p.requires_grad]
            grads = torch.autograd.grad(y, [leaf, *parameters], g, allow_unused=True)
        except Exception as error:
            what = f"raises {type(error).__name__} on an input {list(x.shape)} of {x.dtype}: {error}"
            raise ValueError(f"{registered}, and {what}") from error
        results.append([y.detach(), *grads])
    labels = ["the output", "the gradient of the input", *(f"the gradient of {n}" for n, _ in probe.named_parameters())]
    for label, one, other in zip(labels, *results, strict=False):
        kinds = ["missing" if gradient is None else str(gradient.dtype) for gradient in (one, other)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"{registered}; {label} is {kinds[1]}, expected {kinds[0]}")
        if one is not None and one.norm() > 0 and sqnr(one, other) < least:
            raise ValueError(
                f"{registered}; {label} differs from that, on an input {list(x.shape)} of {x.dtype}: they agree to "
                f"{sqnr(one, other):.0f} dB, but {least:.0f} dB are required"
            )


def _copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module to the CPU in one dtype, with random parameters that are the same each time."""
    clone = copy.deepcopy(module)
    on_meta = any(tensor.is_meta for tensor in (*clone.parameters(), *clone.buffers()))
    clone = clone.to_empty(device="cpu") if on_meta else clone.to("cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in clone.parameters():
            values = torch.randn(parameter.shape, generator=generator, device="cpu") * 0.2
            parameter.data = (values + (1.0 if parameter.ndim == 1 else 0.0)).to(dtype)
    return clone.train(module.training)


def _width(module: nn.Module, spec: ModuleSpec) -> int:
    if isinstance(spec, Norm):
        return 48 if spec.weight is None else int(getattr(module, spec.weight).numel())
    matrices = [p.shape[-1] for p in module.parameters() if p.ndim == 2]
    return int(matrices[0]) if matrices and isinstance(spec, Glu) else 48


def _reference(module: nn.Module, spec: ModuleSpec) -> Callable[[Tensor], Tensor]:
    if isinstance(spec, Norm):
        return lambda x: _normed(module, spec, x)
    act = spec.function
    if isinstance(spec, Activation):
        act = activation_of(module) if act is None else act
        return lambda x: _activated(x, act)
    if spec.activation is not None:
        act = activation_of(getattr(module, spec.activation))

    def gated(x: Tensor) -> Tensor:
        gate, up, _ = gate_and_up(module, spec.gate, spec.up, spec.up_first, x)
        y: Tensor = getattr(module, spec.down)(_activated(gate, act) * up)
        return y

    return gated


def _normed(module: nn.Module, spec: Norm, x: Tensor) -> Tensor:
    weight, bias = (None if name is None else getattr(module, name).float() for name in (spec.weight, spec.bias))
    eps = getattr(module, spec.eps) if isinstance(spec.eps, str) else spec.eps
    if weight is not None and spec.add_unit_offset:
        weight = weight + 1.0
    if spec.center:
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    if activation not in FUNCTIONS:
        raise ValueError(f"there is no activation {activation!r}; known are {', '.join(map(repr, FUNCTIONS))}")
    return FUNCTIONS[activation](x)

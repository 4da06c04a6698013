"""Second derivatives: a gradient penalty through a converted model is right, or raises Octavo's own error.

Beside float64, as first derivatives; inside `octavo.disabled()` they are the plain model's. A penalty that reaches no
weight, as a constant, would be missing from their gradients.
"""

import copy
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.activations import convert
from benchmarks.fuzz.build import Case, build, inputs, reference
from benchmarks.fuzz.outcome import NOISE_DB, PASS, Exact, Grads, Invalid, Outcome, compare_gradients, fail, with_noise
from octavo.nn.loss import linear_cross_entropy

_CLASSES, _THERE_DB = 7, (12.0, 8.0)
"""Gradients of a penalty read FP8 values of both passes; without the penalty they are below 0 dB."""


def check(case: Case) -> Outcome:
    plain, x = build(case), inputs(case)
    model, exact = copy.deepcopy(plain), reference(copy.deepcopy(plain), case)
    expected = _plain(plain, case, x)
    gradients = Exact(_plain(exact, case, x.double()), with_noise(exact, lambda: _plain(exact, case, x.double())))
    if not convert(model, octavo.Precision(**{"matmul": "bf16", **case.get("precision", {"matmul": "fp8"})})):
        return PASS
    disabled = bool(case.get("disabled"))
    try:
        with outcome.around_octavo(model), octavo.disabled() if disabled else nullcontext():
            actual = _gradients(model, case, x, linear_cross_entropy if case.get("head") and not disabled else _loss)
    except RuntimeError as error:
        own = "octavo" in str(error) and ("second derivative" in str(error) or "ordinary backward" in str(error))
        return PASS if own and not disabled else fail("error", f"{type(error).__name__}: {error}")
    return compare_gradients(gradients, expected, actual, NOISE_DB[x.dtype], _THERE_DB)


def _plain(model: nn.Module, case: Case, x: Tensor) -> Grads:
    try:
        grads = _gradients(model, case, x, _loss)
    except (RuntimeError, IndexError, ValueError) as error:
        raise Invalid(str(error)) from error
    if any(g is not None and not g.isfinite().all() for g in grads.values()):
        raise Invalid("plain PyTorch gives what is not finite")
    return grads


def _loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), targets)


def _gradients(model: nn.Module, case: Case, x: Tensor, head: Any) -> Grads:
    """Gradients of a loss with a penalty on the gradient of its input, or of its first parameter."""
    x = x.clone().requires_grad_()
    generator = torch.Generator().manual_seed(case.get("seed", 0) + 3)
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        y = checkpoint(model, x, use_reentrant=False) if case.get("checkpoint") else model(x)
        if case.get("head"):
            weight = (torch.randn(_CLASSES, y.shape[-1], generator=generator) / math.sqrt(y.shape[-1])).to(y.dtype)
            targets = torch.randint(_CLASSES, (y.shape[0] * y.shape[1],), generator=generator)
            loss = head(y.flatten(0, 1), weight, targets)
        else:
            loss = (y * torch.randn(y.shape, generator=generator).to(y.dtype)).mean()
        by = [x, *(p for p in model.parameters() if p.requires_grad)][-1 if case.get("by") == "parameter" else 0]
        (g,) = torch.autograd.grad(loss, by, create_graph=True)
        penalty = {"square": lambda: g.square().mean(), "norm": lambda: (g.norm(dim=-1) - 1).square().mean(),
                   "hessian": lambda: (g * by.detach()).mean()}[case.get("penalty", "square")]()  # fmt: skip
        total = loss.detach() + penalty * x.numel()
        if total.requires_grad:
            total.backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"input": x.grad}

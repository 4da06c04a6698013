"""Second derivatives: a gradient penalty through a converted model is as in float64, or raises Octavo's own error."""

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
from benchmarks.fuzz.activations import convert, exact_run, plain_run, precision_of
from benchmarks.fuzz.build import Case, Run, build, inputs, reference
from benchmarks.fuzz.outcome import NOISE_DB, PASS, Outcome, compare_gradients, fail
from octavo.nn.loss import linear_cross_entropy

_CLASSES, _THERE_DB = 7, (12.0, 8.0)
"""Gradients of a penalty read FP8 values of both passes; without the penalty they are below 0 dB."""


def check(case: Case) -> Outcome:
    plain, x = build(case), inputs(case)
    model, exact = copy.deepcopy(plain), reference(copy.deepcopy(plain), case)
    expected = plain_run(plain, case, x, _run)
    _, gradients = exact_run(exact, case, x, _run)
    convert(model, precision_of(case))
    disabled = bool(case.get("disabled"))
    try:
        with outcome.around_octavo(model), octavo.disabled() if disabled else nullcontext():
            actual = _run(model, case, x, head=linear_cross_entropy if case.get("head") and not disabled else _loss)
    except RuntimeError as error:
        own = "octavo" in str(error) and ("second derivative" in str(error) or "ordinary backward" in str(error))
        return PASS if own and not disabled else fail("error", f"{type(error).__name__}: {error}")
    return compare_gradients(gradients, expected.grads, actual.grads, NOISE_DB[x.dtype], _THERE_DB)


def _loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), targets)


def _run(model: nn.Module, case: Case, x: Tensor, head: Any = _loss) -> Run:
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
    grads = {name: p.grad for name, p in model.named_parameters()} | {"input": x.grad}
    return Run(loss.detach(), grads, torch.random.get_rng_state(), {})

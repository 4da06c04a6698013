"""octavo.AdamW beside torch.optim.AdamW on float64 copies of the same parameters and gradients.

What may differ: with float32 states, float32 arithmetic; with FP8 states, moments that are off by their 8 bits from the
second step on; without a master, one rounding of the parameter per step. Parameters hold the master, rounded once.
"""

import io
import math
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.build import DTYPES, Case
from benchmarks.fuzz.modules import Part
from benchmarks.fuzz.outcome import PASS, Outcome, fail, same
from octavo.numerics import sqnr

FP8_DB = 14.0
"""Of what FP8 states move a parameter by, beside exact ones, where all elements have gradients of one size."""
_FEWEST = 512
_ALL_ONES = 0x7FFFFFFF
"""Bits of a NaN whose mantissa is all ones: rounding it up overflows into the sign."""


def check(case: Case) -> Outcome:
    torch.manual_seed(case.get("seed", 0))
    parts = case["params"]
    params = [_parameter(part) for part in parts]
    start = [p.detach().double() for p in params]
    twins = [nn.Parameter(p.detach().double().contiguous()) for p in params]
    strides = [p.stride() for p in params]
    optimizer = _optimizer(case, params)
    hyper = {name: case[name] for name in ("lr", "weight_decay", "maximize") if name in case}
    exact = torch.optim.AdamW(twins, betas=tuple(case.get("betas", (0.9, 0.999))), foreach=False, **hyper)
    bad, behaviour, skipped = case.get("bad"), case.get("nonfinite", "raise"), 0
    with outcome.around_octavo(nn.ParameterList(params)):
        for step in range(case.get("steps", 1)):
            grads = [_gradient(part, p) for part, p in zip(parts, params, strict=True)]
            poisoned = bad and step == case.get("steps", 1) - 1 and _poison(grads, bad)
            for p, twin, grad in zip(params, twins, grads, strict=True):
                p.grad = grad
                twin.grad = None if grad is None else grad.double().contiguous()
            before = [p.detach().clone() for p in params]
            try:
                optimizer.step()
            except FloatingPointError as error:
                if not (poisoned and behaviour == "raise"):
                    return fail("error", f"step {step} raised: {error}")
            else:
                if poisoned and behaviour == "raise":
                    return fail("nonfinite", "a gradient that is not finite raised nothing")
            if poisoned and behaviour != "ignore":
                skipped += behaviour == "skip"
                for p, was in zip(params, before, strict=True):
                    if (mismatch := same("parameter", was, p.detach())) is not None:
                        return fail("nonfinite", f"a step that was left out changed something: {mismatch}")
            else:
                exact.step()
            if case.get("resume") and step == 0 and case.get("steps", 1) > 1:
                optimizer = _resumed(case, params, optimizer)
    if optimizer.skipped != skipped:
        return fail("nonfinite", f"skipped is {optimizer.skipped}, expected {skipped}")
    for i, (part, p, twin, was, stride) in enumerate(zip(parts, params, twins, start, strides, strict=True)):
        if p.stride() != stride:
            return fail("strides", f"parameter {i} had strides {stride}, has {p.stride()}")
        mismatch = _off(case, part, p.detach(), twin.detach(), was, optimizer.state[p])
        if mismatch is not None:
            return fail("parameter", f"parameter {i} {part}: {mismatch}")
    return PASS


def _optimizer(case: Case, params: list[nn.Parameter]) -> Any:
    names = ("lr", "weight_decay", "maximize", "states", "stochastic_rounding", "nonfinite")
    settings = {name: case[name] for name in names if name in case}
    settings["master"] = None if case.get("master") == "none" else case.get("master", "fp32")
    return octavo.AdamW(params, betas=tuple(case.get("betas", (0.9, 0.999))), **settings)


def _resumed(case: Case, params: list[nn.Parameter], optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = _optimizer(case, params)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def _strided(x: Tensor, layout: str | None) -> Tensor:
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided" and x.ndim:
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "reversed" and x.ndim > 1:
        order = tuple(range(x.ndim))[::-1]
        return x.permute(order).contiguous().permute(order)
    return x


def _parameter(part: Part) -> nn.Parameter:
    values = torch.randn(part.get("shape", [4, 64])).to(DTYPES[part.get("dtype", "fp32")])
    return nn.Parameter(_strided(values, part.get("layout")))


def _gradient(part: Part, p: Tensor) -> Tensor | None:
    form, grad = part.get("grad"), torch.randn(p.shape)
    if form == "none":
        return None
    if form == "tiny":
        grad *= 1e-6
    elif form == "large":
        grad *= 1e4
    elif form == "spread" and grad.ndim:
        grad = grad * torch.logspace(-6, 2, max(grad.shape[-1], 1))[: grad.shape[-1]]
    elif form == "zeros":
        grad.zero_()
    elif form == "sparse_rows" and grad.ndim:
        grad[::2] = 0.0
    elif form == "constant":
        grad.fill_(0.37)
    grad = grad.to(p.dtype)
    if part.get("grad_layout") == "expanded" and grad.ndim > 1 and grad.numel():
        return grad[:, :1].expand(grad.shape)
    return _strided(grad, part.get("grad_layout"))


def _poison(grads: list[Tensor | None], bad: str) -> bool:
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            grad = grads[i] = grad.contiguous()
            if bad == "nan_all_ones":
                bits, value = {4: (torch.int32, _ALL_ONES), 2: (torch.int16, 0x7FFF)}[grad.element_size()]
                grad.view(bits).view(-1)[-1] = value
            else:
                grad.view(-1)[-1] = float(bad)
            return True
    return False


def _off(case: Case, part: Part, p: Tensor, exact: Tensor, start: Tensor, state: dict[str, Tensor]) -> str | None:
    """Describe how a parameter is further from its float64 twin than the form allows, if it is."""
    if p.isnan().ne(exact.isnan()).any():
        index = tuple(p.isnan().ne(exact.isnan()).nonzero()[0].tolist())
        return f"at {index} {p[index].item()}, expected {exact[index].item()}"
    if "exp_avg" not in state:
        return same("without a gradient", start, p.double())
    steps, lr = case.get("steps", 1), case.get("lr", 1e-3)
    own = p.dtype == torch.float32 or "remainder" in state or "master" in state
    precise = "master" not in state and "remainder" not in state
    master = state["master"].double() if "master" in state else p.double()
    relative = (
        0.0 if "master" in state else torch.finfo(p.dtype).eps * (steps if precise and p.dtype != torch.float32 else 1)
    )
    relative += steps * 2.0**-22
    fp8 = "exp_avg_hi" in state and steps > 1
    update = lr * steps * (3.0 if fp8 else 2e-4)
    finite = exact.isfinite()
    over = (master - exact).abs() - relative * (exact.abs() + lr * steps) - update
    if finite.any() and over[finite].max() > 0:
        index = tuple(torch.where(finite, over, -math.inf).eq(over[finite].max()).nonzero()[0].tolist())
        return (
            f"at {index} {master[index].item():.9g}, expected {exact[index].item():.9g}; {over[finite].max():.2g} over"
        )
    if (
        "master" in state
        and (rounded := same("parameter beside its master", state["master"].to(p.dtype), p)) is not None
    ):
        return rounded
    even = part.get("grad") is None and part.get("grad_layout") != "expanded" and p.numel() >= _FEWEST
    if fp8 and own and even and finite.all() and "remainder" not in state:
        moved = exact - start
        if (db := sqnr(moved, master - start)) < FP8_DB:
            return f"what the steps changed: {db:.1f} dB, at least {FP8_DB:g} dB expected"
    return None

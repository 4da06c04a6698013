"""FP8 products: layers element by element beside their emulation, up to roundings of the dtype and of float32 sums;
models beside the model of emulated layers, by SQNR where it does not move as much when its input moves by a rounding.

The emulation is by the definitions in `octavo.numerics`, in float64 and without Octavo's kernels: scales
max(amax / max, 2⁻¹²⁶) in float32, codes round(x · (1/s)) with the product in float32, exact sums of products.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.activations import convert, plain_run
from benchmarks.fuzz.build import DTYPES, Case, build, inputs, run, strided, values
from benchmarks.fuzz.outcome import CANCELLED_DB, PASS, WHOLE_DB, Exact, Outcome, compare_gradients, fail, with_noise
from octavo.numerics import RECIPES, Recipe, sqnr
from octavo.numerics.spec import QuantSpec

_FEWEST = 256  # Elements from which on SQNR says something


def check(case: Case) -> Outcome:
    return _model(case) if case.get("form") == "model" else _layer(case)


def _model(case: Case) -> Outcome:
    model, x = build(case), inputs(case)
    emulation, recipe = copy.deepcopy(model), RECIPES[case.get("recipe", "rowwise")]
    convert(model, octavo.Precision(recipe=recipe.name))
    emulate(emulation, {name for name, m in model.named_modules() if isinstance(m, octavo.nn.Linear)}, recipe)
    expected = plain_run(emulation, case, x)
    x_moved = (x * (1 + 2.0**-9 * torch.randn(x.shape))).to(x.dtype)
    moved = with_noise(emulation, lambda: plain_run(emulation, case, x_moved))
    with outcome.around_octavo(model):
        actual = run(model, case, x)
    if actual.y.shape != expected.y.shape or actual.y.dtype != expected.y.dtype:
        return fail("shape", f"output: plain {list(expected.y.shape)}, Octavo {list(actual.y.shape)}")
    if sqnr(expected.y, moved[0].y) >= CANCELLED_DB and not (db := sqnr(expected.y, actual.y)) >= WHOLE_DB:
        return fail("output", f"{db:.1f} dB beside the emulation, at least {WHOLE_DB:g} dB expected")
    return compare_gradients(Exact(expected.grads, [one.grads for one in moved]), expected.grads, actual.grads, 0.0)


def _layer(case: Case) -> Outcome:
    recipe, dtype = RECIPES[case.get("recipe", "rowwise")], DTYPES[case.get("dtype", "fp32")]
    torch.manual_seed(case.get("seed", 0))
    rows, features, outputs = case.get("rows", 4), case.get("inputs", 16), case.get("outputs", 16)
    x = values([rows, features], case.get("x"), dtype)
    if case.get("bad") and rows:
        x[rows // 2, features // 2] = float(case["bad"])
    x = strided(x, case.get("x_layout"))
    layers = [
        nn.Linear(features, outputs, bias=case.get("bias", True)).to(dtype) for _ in range(case.get("siblings", 1))
    ]
    model = nn.ModuleList(layers)
    for layer in layers:  # each by itself: of a model, those that are narrow would be left out
        weight = strided(layer.weight.detach(), case.get("layout"))
        layer.weight = nn.Parameter(weight, case.get("frozen") != "weight")
        octavo.convert(layer, recipe.name, keep_weights=bool(case.get("keep_weights")), verbose=False)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_(case.get("frozen") != "input")
    read = leaf * 1 if leaf.requires_grad else leaf
    with outcome.around_octavo(model):
        ys = [layer(read) for layer in model]
        gs = [values([rows, outputs], case.get("g"), dtype) for _ in ys]
        if any(y.requires_grad for y in ys):
            torch.autograd.backward([y for y in ys if y.requires_grad], gs)
    dx_sum = torch.zeros(rows, features, dtype=torch.float64)
    dx_limit = torch.zeros_like(dx_sum)
    for layer, y, g in zip(layers, ys, gs, strict=True):
        w, bias, g_wide = layer.weight.detach(), layer.bias, g.double()
        scales = getattr(vars(layer).get("equalizer"), "scales", None)  # of channels, in the first forward
        s, inverse = (1.0, 1.0) if scales is None else (scales.factor.double(), scales.inverse.double())
        x_scaled, w_scaled = (x, w) if recipe.equalization == 0 else (x.float() * inverse, w.float() * s)
        a, b = quantized(x_scaled, recipe.x).value, quantized(w_scaled, recipe.w).value
        exact = a @ b.t() + (0.0 if bias is None else bias.detach().double())
        dx, dw = gradients(x_scaled, w_scaled, g, recipe)
        rows_of: list[Any] = [("output", exact, y, a.abs() @ b.abs().t() + exact.abs(), features)]
        if layer.weight.requires_grad:
            rows_of.append(("weight gradient", dw * s, layer.weight.grad, g_wide.abs().t() @ x.double().abs(), rows))
        if bias is not None:
            rows_of.append(("bias gradient", g_wide.sum(0), bias.grad, g_wide.abs().sum(0), rows))
        for name, expected, actual, magnitude, terms in rows_of:
            if mismatch := _over(expected, actual, _allowed(magnitude, terms, dtype)):
                return fail(name, mismatch)
        # Well-scaled operands far from exact products would be a mistake of the definition.
        if not {"x", "bad"} & case.keys() and exact.numel() >= _FEWEST:
            if (db := sqnr(x.double() @ w.double().t(), a @ b.t())) < WHOLE_DB:
                return fail("exact product", f"{db:.1f} dB, at least {WHOLE_DB:g} dB expected")
        dx_sum += dx * inverse
        dx_limit += _allowed(g_wide.abs() @ w.double().abs(), outputs, dtype) + dx.abs() * torch.finfo(dtype).eps
    if leaf.grad is not None and (mismatch := _over(dx_sum, leaf.grad, dx_limit)):
        return fail("input gradient", mismatch)
    return PASS


def _allowed(magnitude: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Error of a sum in float32, and of its rounding: magnitude is the sum of magnitudes."""
    # What is below the normal numbers each scale rounds, and a CPU's bf16 products (VDPBF16PS) set to zero.
    return magnitude * (terms + 8) * 2.0**-22 + torch.finfo(dtype).smallest_normal


def _over(exact: Tensor, actual: Tensor | None, limit: Tensor) -> str | None:
    """Describe the element that is off by more than its limit and one rounding, if there is one."""
    if actual is None or exact.shape != actual.shape:
        return f"has shape {None if actual is None else list(actual.shape)}, expected {list(exact.shape)}"
    if not exact.numel():
        return None
    largest = 0.98 * torch.finfo(actual.dtype).max
    overflows = exact.isfinite() & (exact.abs() >= largest)
    if not torch.equal(exact.isfinite(), actual.isfinite() | overflows):
        return "NaN or Inf is not where the emulation has it"
    over = (actual.double() - exact).abs() - limit - exact.abs() * torch.finfo(actual.dtype).eps
    over = torch.where(exact.isfinite() & ~overflows, over, -1.0)
    if not over.isnan().any() and over.max() <= 0:
        return None
    index = tuple(int(i) for i in torch.unravel_index(over.nan_to_num(nan=torch.inf).argmax(), exact.shape))
    return f"at {index} expected {exact[index].item():.6g}, got {actual[index].item():.6g}"


# The emulation


@dataclass(frozen=True)
class Quantized:
    """FP8 values [R,C] and the scales of each element, both float64."""

    q: Tensor
    scale: Tensor

    @property
    def value(self) -> Tensor:
        return self.q * self.scale


def quantized(x: Tensor, spec: QuantSpec, fold: Tensor | None = None) -> Quantized:
    """Quantize a matrix; `fold` is multiplied in first, in float32."""
    x = x.float() if fold is None else x.float() * fold.float()
    rows, columns = x.shape
    if not x.numel():
        return Quantized(x.double(), torch.ones_like(x, dtype=torch.float64))
    height, length = spec.granularity.block((rows, columns))
    padded = F.pad(x, (0, -columns % length, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, length)).unflatten(0, (-1, height))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale = (amax.double() / spec.format.max).float().clamp_min(2.0**-126)
    if spec.scale_rule != "amax":
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
    inverse = (1.0 / scale.double()).float()
    codes = (blocks * inverse).clamp(-spec.format.max, spec.format.max).to(spec.format.dtype).double()
    finite = amax.isfinite()
    codes = torch.where(finite, codes, torch.nan)
    scale = torch.where(finite, scale.double(), 1.0).expand_as(codes)
    q, s = (t.flatten(2, 3).flatten(0, 1)[:rows, :columns] for t in (codes, scale))
    return Quantized(q, s)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.recipe, ctx.bias = recipe, bias is not None
        y = quantized(x_MK, recipe.x).value @ quantized(w_NK, recipe.w).value.t()
        return (y if bias is None else y + bias.double()).to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx, dw = gradients(x, w, g_MN, ctx.recipe)
        return dx.to(x.dtype), dw.to(w.dtype), g_MN.double().sum(0).to(w.dtype) if ctx.bias else None, None


def gradients(x_MK: Tensor, w_NK: Tensor, g_MN: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    w = quantized(w_NK, recipe.dgrad_w)
    if recipe.folds_w:
        dx = quantized(g_MN, recipe.dgrad_g, w.scale[:, :1].t()).value @ w.q
    else:
        dx = quantized(g_MN, recipe.dgrad_g).value @ w.value
    if recipe.wgrad_x is None or recipe.wgrad_g is None:
        return dx, g_MN.double().t() @ x_MK.double()
    x = quantized(x_MK, recipe.wgrad_x)
    if recipe.folds_x:
        dw = quantized(g_MN, recipe.wgrad_g, x.scale[:, :1]).value.t() @ x.q
    else:
        dw = quantized(g_MN, recipe.wgrad_g).value.t() @ x.value
    return dx, dw


def emulate(model: nn.Module, names: set[str], recipe: Recipe) -> None:
    for name, fc in model.named_modules():
        if name in names:
            fc.forward = partial(_forward, fc, recipe)  # type: ignore[method-assign]


def _forward(fc: Any, recipe: Recipe, x: Tensor) -> Tensor:
    y: Tensor = _Emulated.apply(x.flatten(0, -2), fc.weight, fc.bias, recipe)
    return y.unflatten(0, x.shape[:-1])

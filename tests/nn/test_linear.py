import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
from casts import counted, set_copies
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MLP
from torch import nn

import octavo
from octavo.kernels import quantize
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.quantize import QUANTIZE
from octavo.nn.linear import linear
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import COLUMN, E4M3, RECIPES, ROW, QuantSpec, get_recipe, sqnr
from support.dispatch_modes import Passing
from tensors import randn, same

by_recipe = pytest.mark.parametrize("name", RECIPES)
sizes = st.one_of(st.sampled_from([0, 1, 2, 16, 31, 127, 257]), st.integers(0, 300))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The values of docs/numerics.md in dB (Y, ∂X, ∂W), on normal operands.
M, K, N = 1024, 512, 768
NORMAL_SQNR = {
    "tensorwise": (28.5, 24.6, 24.6),
    "rowwise": (28.6, 28.6, 28.6),
    "rowwise_hp_wgrad": (28.6, 28.6, 100.0),  # and more: float32
    "blockwise": (28.7, 28.7, 28.8),
    "mxfp8": (28.5, 28.5, 28.5),
}


def three_products(x, w, g, recipe, bias=None):
    """Y, ∂X, ∂W (and ∂b) of one FP8 linear."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    b = None if bias is None else bias.clone().requires_grad_()
    y = linear(x, w, b, get_recipe(recipe))
    y.backward(g)
    return (y.detach(), x.grad, w.grad) + (() if b is None else (b.grad,))


def exact_products(x, w, g, bias=None):
    x, w, g = x.double(), w.double(), g.double()
    tokens = math.prod(x.shape[:-1])
    flat_x, flat_g = x.reshape(tokens, x.shape[-1]), g.reshape(tokens, g.shape[-1])
    y = x @ w.t() if bias is None else x @ w.t() + bias.double()
    return (y, g @ w, flat_g.t() @ flat_x) + (() if bias is None else (flat_g.sum(0),))


@pytest.mark.parametrize("name", NORMAL_SQNR)
def test_reaches_the_stated_accuracy_on_normal_operands(name):
    operands = randn(M, K), randn(N, K, seed=1), randn(M, N, seed=2)
    reached = map(sqnr, exact_products(*operands), three_products(*operands, name))
    assert [min(value, 100.0) for value in reached] == pytest.approx(NORMAL_SQNR[name], abs=0.3)


@settings(max_examples=10, deadline=None)
@given(m=st.integers(64, 300), k=st.integers(64, 300), n=st.integers(64, 300), seed=st.integers(0, 1000))
def test_rowwise_reaches_the_formats_tolerance_at_any_shape_from_64(m, k, n, seed):
    operands = randn(m, k, seed=seed), randn(n, k, seed=seed + 1), randn(m, n, seed=seed + 2)
    assert min(map(sqnr, exact_products(*operands), three_products(*operands, "rowwise"))) >= E4M3.tolerance_db


# The same with outlier channels and tokens in X and log-normal gradients; lower bounds.
OUTLIER_SQNR = {
    "tensorwise": (28.1, 25.4, 24.5),
    "rowwise": (29.6, 29.1, 31.7),
    "blockwise": (30.5, 29.3, 28.9),
    "mxfp8": (28.7, 28.5, 27.7),
}


def outliers():
    """X with outlier channels and tokens, W, and G of log-normal magnitude: what one scale per tensor handles worst."""
    x, w, g = randn(M, K), randn(N, K, seed=1), randn(M, N, seed=2)
    x[:, ::128] *= 32
    x[::102] *= 8
    return x, w, g.sign() * torch.exp(3 * randn(M, N, seed=3))


@pytest.mark.parametrize("name", OUTLIER_SQNR)
def test_reaches_the_stated_accuracy_on_outliers(name):
    operands = outliers()
    reached = map(sqnr, exact_products(*operands), three_products(*operands, name))
    assert all(value >= least - 0.3 for value, least in zip(reached, OUTLIER_SQNR[name], strict=True))


def test_folding_is_as_good_as_two_copies_on_outliers():
    """Folded backward products against the usual row-wise recipe, which quantizes X and W a second time."""
    x, w, g = outliers()
    _, dx, dw = three_products(x, w, g, "rowwise")
    _, exact_dx, exact_dw = exact_products(x, w, g)
    row, column = QuantSpec(granularity=ROW), QuantSpec(granularity=COLUMN)
    two_copies_dx = quantize(g, row).dequantize(torch.float64) @ quantize(w, column).dequantize(torch.float64)
    two_copies_dw = quantize(g, column).dequantize(torch.float64).t() @ quantize(x, column).dequantize(torch.float64)
    assert sqnr(exact_dx, dx) >= sqnr(exact_dx, two_copies_dx) - 0.3
    assert sqnr(exact_dw, dw) >= sqnr(exact_dw, two_copies_dw) - 0.3


@by_recipe
@settings(max_examples=10, deadline=None)
@given(m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(DTYPES), bias=st.booleans())
def test_any_size_and_dtype(name, m, n, k, dtype, bias):
    x, w, g = randn(m, k, dtype=dtype), randn(n, k, seed=1, dtype=dtype), randn(m, n, seed=2, dtype=dtype)
    b = randn(n, seed=3, dtype=dtype) if bias else None
    actual = three_products(x, w, g, name, b)
    for want, got in zip(exact_products(x, w, g, b), actual, strict=True):
        assert (got.shape, got.dtype) == (want.shape, dtype)
        assert got.isfinite().all()
    magnitudes = exact_products(x.abs(), w.abs(), g.abs(), None if b is None else b.abs())
    for want, got, bound in zip(exact_products(x, w, g, b), actual, magnitudes, strict=True):
        # Casts to e4m3 and e5m2 are off by 2⁻⁴ and 2⁻³ at most: (1 + 2⁻⁴)(1 + 2⁻³) − 1 < 0.2 of the terms' magnitudes.
        assert torch.linalg.vector_norm(got.double() - want) <= 0.2 * torch.linalg.vector_norm(bound)
    if min(m, n, k) == 0:
        products = zip(actual[:3], exact_products(x, w, g, b)[:3], strict=True)
        assert all(torch.equal(got, want.to(dtype)) for got, want in products)


@by_recipe
@pytest.mark.parametrize("shape", [(40,), (2, 3, 4, 40), (0, 7, 40)])
def test_leading_dimensions_are_tokens(name, shape):
    x, w, b = randn(*shape), randn(24, 40, seed=1), randn(24, seed=2)
    g = randn(*shape[:-1], 24, seed=3)
    y, dx, dw, db = three_products(x, w, g, name, b)
    flat = three_products(x.reshape(-1, 40), w, g.reshape(-1, 24), name, b)
    assert y.shape == g.shape and dx.shape == x.shape
    for got, want in zip((y, dx, dw, db), flat, strict=True):
        assert torch.equal(got.reshape(want.shape), want)


@by_recipe
@pytest.mark.parametrize("strides", ["transposed", "sliced"])
def test_strides_of_operands_do_not_matter(name, strides):
    x, w, g = randn(48, 80), randn(32, 80, seed=1), randn(48, 32, seed=2)
    if strides == "transposed":
        views = (x.t().contiguous().t(), w.t().contiguous().t(), g.t().contiguous().t())
    else:
        views = tuple(torch.cat([t, t], dim=1)[:, : t.shape[1]] for t in (x, w, g))
    assert same(three_products(x, w, g, name), three_products(*views, name))


def bytes_of_w_scales(layer):
    """What dgrad needs to cast W again: the scales of its forward copy, where the recipe uses that."""
    recipe, shape = layer.recipe, tuple(layer.weight.shape)
    return 4 * math.prod(recipe.w.granularity.scale_shape(shape)) if recipe.dgrad_w == recipe.w else 0


@by_recipe
def test_frozen_weight_costs_no_wgrad_and_keeps_no_input(name):
    layer = octavo.convert(nn.Linear(64, 32), name, verbose=False).requires_grad_(False)
    x = randn(16, 64).requires_grad_()
    with counted(SCALED_MM) as products, saved_for_backward(layer) as kept:
        y = layer(x)
        assert kept.bytes == bytes_of_w_scales(layer)
        y.sum().backward()
    assert [call[2] for call in products] == ["nt", "nn"]
    assert x.grad is not None and layer.weight.grad is None


@by_recipe
def test_frozen_input_costs_no_dgrad(name):
    layer = octavo.convert(nn.Linear(64, 32), name, verbose=False)
    with counted(SCALED_MM) as products:
        layer(randn(16, 64)).sum().backward()
    assert [call[2] for call in products] == (["nt"] if name == "rowwise_hp_wgrad" else ["nt", "tn"])
    assert layer.weight.grad is not None


@pytest.mark.parametrize(("name", "of_g"), [("rowwise", 2), ("tensorwise", 1)])
def test_one_copy_of_x_serves_all_products(name, of_g):
    """Forward casts X and W; backward casts W again, and G once per form. X is never quantized a second time."""
    layer = octavo.convert(nn.Linear(64, 32), name, verbose=False)
    x = randn(16, 64).requires_grad_()
    with counted(QUANTIZE) as casts:
        layer(x).sum().backward()
    assert [tuple(call[0].shape) for call in casts] == [(16, 64), (32, 64), (32, 64), *[(16, 32)] * of_g]


@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "blockwise", "mxfp8"])
def test_keeps_at_most_55_percent_of_bf16(name):
    x = randn(256, 512, dtype=torch.bfloat16).requires_grad_()
    layer = nn.Linear(512, 256, dtype=torch.bfloat16)
    with saved_for_backward(layer) as bf16:
        layer(x * 1).sum()
    octavo.convert(layer, name, verbose=False)
    with saved_for_backward(layer) as fp8:
        layer(x * 1).sum()
    assert bf16.bytes == x.nbytes
    assert fp8.bytes <= 0.55 * bf16.bytes
    assert torch.bfloat16 not in fp8.by_dtype


@by_recipe
def test_gate_and_up_share_one_copy(name):
    mlp = octavo.convert(MLP(dtype=torch.bfloat16), name, verbose=False)
    x = randn(32, 64, dtype=torch.bfloat16).requires_grad_() * 1
    with counted(QUANTIZE) as casts, saved_for_backward(mlp) as both:
        outputs = mlp.gate_proj(x), mlp.up_proj(x)
    forms = 2 if RECIPES[name].wgrad_x not in (None, RECIPES[name].x) else 1
    assert sum(call[0].shape == (32, 64) for call in casts) == forms
    y = x * 1
    with saved_for_backward(mlp) as one:
        outputs += (mlp.gate_proj(y),)
    assert 0 < both.bytes == one.bytes + bytes_of_w_scales(mlp.up_proj)


def test_only_what_autograd_made_is_shared():
    """A receive buffer, a graph's static input or NumPy's memory changes without autograd noticing."""
    layer = octavo.convert(nn.Linear(32, 16, bias=False), verbose=False)
    x = randn(8, 32).requires_grad_() * 1
    with counted(QUANTIZE) as casts:
        layer(x), layer(x)
    assert sum(call[0].shape == x.shape for call in casts) == 1
    array = np.ones((8, 32), dtype=np.float32)
    buffer = torch.from_numpy(array)
    first = layer(buffer)
    array *= 2
    assert torch.equal(layer(buffer), 2 * first)


def test_copies_of_another_dispatch_mode_are_not_taken():
    layer = octavo.convert(nn.Linear(32, 16), verbose=False)
    x = randn(8, 32).requires_grad_() * 1
    with counted(QUANTIZE) as casts:
        layer(x)
        with Passing():
            layer(x)
    assert sum(call[0].shape == x.shape for call in casts) == 2


@by_recipe
@pytest.mark.parametrize("shape", [(48, 64, 32), (37, 19, 2), (0, 64, 32), (1, 7, 5)])
def test_both_memory_orders_give_the_same_numbers(name, shape, monkeypatch):
    m, k, n = shape
    x, w, g, bias = randn(m, k), randn(n, k, seed=1), randn(m, n, seed=2), randn(n, seed=3)
    set_copies(monkeypatch, True)
    with counted(SCALED_MM) as products:
        with_copies = three_products(x, w, g, name, bias)
    for a, b, layout, *_ in products:
        left, right = (a.t() if layout[0] == "t" else a), (b.t() if layout[1] == "t" else b)
        assert m == 0 or (left.along(1) is not None and right.along(0) is not None), layout
    set_copies(monkeypatch, False)
    for one, other in zip(with_copies, three_products(x, w, g, name, bias), strict=True):
        # Equal FP8 bytes; sums in float32 may run in another order where their scales are inside them.
        assert torch.equal(one, other) or (name == "blockwise" and sqnr(one, other) > 120)


@by_recipe
def test_both_memory_orders_keep_one_byte_per_element(name, monkeypatch):
    set_copies(monkeypatch, True)
    layer = octavo.convert(nn.Linear(64, 32, dtype=torch.bfloat16), name, verbose=False)
    with saved_for_backward(layer) as kept:
        y = layer(randn(32, 64, dtype=torch.bfloat16).requires_grad_() * 1)
    assert y.requires_grad and kept.by_dtype.get(torch.float8_e4m3fn, 0) == (0 if name == "rowwise_hp_wgrad" else 2048)


@by_recipe
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_autocast_gives_its_dtype_and_full_precision_gradients(name, parameters):
    layer = nn.Linear(64, 32, dtype=parameters)
    octavo.convert(layer, name, verbose=False)
    x = randn(16, 64).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().pow(2).sum().backward()
    assert x.grad.dtype == torch.float32 and layer.weight.grad.dtype == parameters
    assert layer.bias.grad.dtype == parameters


@by_recipe
def test_bad_values_reach_the_output(name):
    layer = octavo.convert(nn.Linear(64, 32), name, verbose=False)
    x = randn(300, 64)
    clean = layer(x)
    x = x.clone()
    x[7, 3] = torch.inf
    y = layer(x)
    assert y[7].isnan().all()
    if name != "tensorwise":
        assert not y[200:].isnan().any()
    if name == "rowwise":
        others = torch.arange(300) != 7
        assert torch.equal(y[others], clean[others])


def test_power_of_two_row_scales_fold_too():
    row = QuantSpec.parse("e4m3/row/e8m0")
    recipe = dataclasses.replace(RECIPES["rowwise"], name="mine", x=row, w=row, dgrad_w=row, wgrad_x=row)
    operands = randn(64, 96), randn(80, 96, seed=1), randn(64, 80, seed=2)
    assert min(map(sqnr, exact_products(*operands), three_products(*operands, recipe))) > 27


def test_blocks_of_disabled_may_overlap_in_threads():
    """The first thread ends its block inside the second's; FP8 is off until the second's ends, and on after that."""
    layer, x = octavo.convert(nn.Linear(64, 32), verbose=False), randn(16, 64)
    fp8 = layer(x)
    first_ended, second_began = threading.Event(), threading.Event()

    def first():
        with octavo.disabled():
            second_began.wait(10)
        first_ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    with octavo.disabled(), octavo.disabled():
        second_began.set()
        assert first_ended.wait(10)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    thread.join()
    assert torch.equal(layer(x), fp8)


@pytest.mark.parametrize(
    ("input", "error", "message"),
    [
        (torch.zeros(4, 65), ValueError, r"in_features = 64; got shape \(4, 65\)"),
        (torch.zeros(4, 64, dtype=torch.bfloat16), ValueError, "weight is torch.float32"),
        (torch.zeros(4, 64, dtype=torch.int64), TypeError, "got torch.int64"),
    ],
)
def test_wrong_input_is_named(input, error, message):
    with pytest.raises(error, match=message):
        linear(input, torch.zeros(32, 64), None, RECIPES["rowwise"])

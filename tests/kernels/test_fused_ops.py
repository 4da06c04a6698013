"""Norms and gated activations: kernels against the reference byte for byte, and the reference against PyTorch."""

import math

import pytest
import torch
import torch.nn.functional as F
from fused_inputs import SPECS, assert_quantizes, assert_same, both_backends, outputs_of, randn, spread

from octavo.kernels.fused import (
    activations,
    glu,
    glu_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from octavo.kernels.fused import reference as fused_reference
from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.fused.glu import GLU, GLU_BACKWARD
from octavo.kernels.fused.norm import LAYER_NORM, RMS_NORM
from octavo.numerics import QuantSpec, sqnr
from tensors import needs_triton

by_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
by_norm = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
ROW = QuantSpec.parse("e4m3/row")
OF_PYTORCH = {"silu": F.silu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"), "gelu": F.gelu}


def norm_of(kind, x, weight, bias, *arguments, **options):
    if kind == "rms_norm":
        return rms_norm(x, weight, *arguments, **options)
    return layer_norm(x, weight, bias, *arguments, **options)


def op_of(kind):
    return RMS_NORM if kind == "rms_norm" else LAYER_NORM


def assert_configurations(name, *call):
    """Each configuration of a kernel gives the bytes of the reference."""
    from octavo.kernels.fused import triton as backend

    expected = dict(enumerate(getattr(fused_reference, name)(*call)))
    for config in range(2):
        assert_same(expected, dict(enumerate(getattr(backend, name)(*call, config=config))))


ROUTES = {"default": {}, "two steps": {"WIDEST_ROW_BLOCK": 0}, "row blocks": {"WIDEST_ROW": 0}}


@needs_triton
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "glu"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.slow
def test_every_configuration_and_route_equals_reference(kind, spec, monkeypatch):
    x, weight = spread(21, 600, dtype=torch.bfloat16), randn(600, seed=2)
    gate, up = spread(21, 300, dtype=torch.bfloat16), randn(21, 300, seed=1, dtype=torch.bfloat16)
    bias = randn(600, seed=3) if kind == "layer_norm" else None
    for route, constants in ROUTES.items():
        with monkeypatch.context() as patch:
            for constant, value in constants.items():
                patch.setattr(f"octavo.kernels.fused.triton.{constant}", value)
            if kind != "glu":
                for order in ("rows", "both") if route == "default" else ("both",):
                    call = (x, weight, bias, 1e-5, bias is None, bias is not None)
                    assert_configurations("norm", *call, spec, order)
            elif route == "default" or (route == "row blocks" and str(spec.granularity) == "row"):
                for order in ("rows", "both"):
                    assert_configurations("glu", gate, up, "silu", spec, order)


@needs_triton
@by_activation
def test_every_configuration_of_the_gradients_of_activations_equals_reference(activation):
    assert_configurations("glu_backward", *(spread(21, 300, seed=s) for s in range(3)), activation, False)


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("widest", [8192, 0])
def test_every_configuration_and_route_of_the_gradients_of_norms_equals_reference(widest, monkeypatch):
    monkeypatch.setattr("octavo.kernels.fused.triton.WIDEST_SUMS", widest)
    x, grad, weight = spread(70, 1100), randn(70, 1100, seed=1), randn(1100, seed=2)
    call = (grad, x, weight, randn(70, 1, seed=3).abs(), randn(70, 1, seed=4), False, True)
    assert_configurations("norm_backward", *call)


@pytest.mark.thorough
@needs_triton
@by_norm
@pytest.mark.parametrize("order", [pytest.param("rows", marks=pytest.mark.slow), "both"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
def test_special_values_of_norms_poison_their_own_row_and_stay_visible(kind, order):
    for special in (math.nan, math.inf, -math.inf):
        x = randn(20, 150)
        x[3, 7] = special
        x[5] = 0
        x[6] = 1e30  # its squares overflow
        for spec in (None, *SPECS):
            call = lambda x=x, spec=spec: norm_of(kind, x, torch.ones(150), None, 0.0, spec, order)  # noqa: E731
            expected, actual = both_backends(op_of(kind), call)
            assert_same(outputs_of(expected), outputs_of(actual))
            if spec is None:
                assert expected.y[3, 7].isnan()
            y = expected.y if spec is None else expected.quantized.dequantize()
            finite = y.isfinite().all(1)
            assert not finite[3] and finite[[0, 1, 2, 4, *range(7, 20)]].all()


EXTREMES = [0.0, -0.0, 1e-40, -1e-40, 16.5, -16.5, 86.2, -86.2, 86.3, -86.3, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30]


@pytest.mark.thorough
@needs_triton
@by_activation
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
def test_special_values_of_gates_poison_their_own_row_and_stay_visible(activation, dtype):
    gate, up = randn(20, 150, dtype=dtype), randn(20, 150, seed=1, dtype=dtype)
    gate[0, : len(EXTREMES)] = torch.tensor(EXTREMES)
    gate[3, 7], gate[4, 8], up[5, 9], gate[6, 1] = math.nan, math.inf, math.inf, -math.inf
    for spec in (None, *SPECS):
        expected, actual = both_backends(GLU, lambda spec=spec: glu(gate, up, activation, spec, "both"))
        assert_same(outputs_of(expected), outputs_of(actual))
        finite = (expected if spec is None else expected.dequantize()).isfinite()
        assert not any(finite[row, column] for row, column in ((3, 7), (4, 8), (5, 9), (6, 1)))
        assert finite[[0, 1, 2, *range(7, 20)]].all()
    calls = both_backends(GLU_BACKWARD, lambda: glu_backward(up, gate, up, activation))
    assert_same(*(dict(enumerate(result)) for result in calls))
    assert all(result[[0, 1, 2, *range(7, 20)]].isfinite().all() for result in calls[0])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    ("kind", "order"), [("rms_norm", "rows"), ("layer_norm", "columns"), ("rms_norm", "both"), ("layer_norm", "both")]
)
def test_fusing_a_norm_changes_no_byte(kind, order, spec):
    x, weight = (randn(50, 170, seed=s, dtype=torch.bfloat16) for s in range(2))
    fused, plain = (norm_of(kind, x, weight[0], weight[1], 1e-5, *rest) for rest in ((spec, order), ()))
    assert_quantizes(plain.y, fused.quantized, spec, order)
    assert fused.y is plain.quantized is None and torch.equal(fused.rstd, plain.rstd)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("activation", "order"), list(zip(ACTIVATIONS, ("rows", "columns", "both"), strict=True)))
def test_fusing_an_activation_changes_no_byte(activation, spec, order):
    gate, up = (randn(50, 170, seed=s, dtype=torch.bfloat16) for s in range(2))
    assert_quantizes(glu(gate, up, activation), glu(gate, up, activation, spec, order), spec, order)


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 1000])
def test_norms_are_those_of_pytorch(columns):
    x, weight, bias = spread(33, columns), randn(columns, seed=1), randn(columns, seed=2)
    exact = F.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    assert sqnr(exact, rms_norm(x, weight, 1e-6).y) > 130
    assert sqnr(exact, rms_norm(x, weight - 1, 1e-6, add_unit_offset=True).y) > 130
    exact = F.layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-6)
    assert sqnr(exact, layer_norm(x, weight, bias, 1e-6).y) > 120
    assert sqnr(exact, layer_norm(x + 1000, weight, bias, 1e-6).y) > 60 or columns == 1
    half = x.bfloat16()
    exact = F.rms_norm(half.double(), (columns,), weight.double(), 1e-6)
    assert sqnr(exact, rms_norm(half, weight, 1e-6).y) > sqnr(exact, exact.bfloat16()) - 0.01


@pytest.mark.parametrize("offset", [False, True])
def test_gradients_of_norms_are_those_of_autograd(offset):
    x, grad = spread(70, 48), randn(70, 48, seed=1)
    weight, bias = randn(48, seed=3), randn(48, seed=4)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact_x, exact_w, exact_b = leaves
    y = F.rms_norm(exact_x, (48,), exact_w + 1 if offset else exact_w, 1e-5)
    expected = torch.autograd.grad(y, [exact_x, exact_w], grad.double())
    normed = rms_norm(x, weight, 1e-5, add_unit_offset=offset)
    result = rms_norm_backward(grad, x, weight, normed.rstd, add_unit_offset=offset)
    for want, got in zip(expected, result, strict=True):
        assert sqnr(want, got) > 125
    y = F.layer_norm(exact_x, (48,), exact_w, exact_b, 1e-5)
    expected = torch.autograd.grad(y, leaves, grad.double())
    normed = layer_norm(x, weight, bias, 1e-5)
    result = layer_norm_backward(grad, x, weight, normed.mean, normed.rstd)
    for want, got in zip(expected, result, strict=True):
        assert sqnr(want, got) > 120


@by_activation
def test_activations_are_those_of_pytorch(activation):
    gate, up = 3 * randn(300, 400), randn(300, 400, seed=1)
    exact = OF_PYTORCH[activation](gate.double())
    ours = sqnr(exact, gate * activations.factor(gate, activation))
    theirs = sqnr(exact, OF_PYTORCH[activation](gate))
    assert ours > 140 and ours > theirs - 3
    exact = OF_PYTORCH[activation](gate.bfloat16().double()) * up.bfloat16().double()
    result = glu(gate.bfloat16(), up.bfloat16(), activation)
    assert sqnr(exact, result) > sqnr(exact, exact.bfloat16()) - 1e-4


@by_activation
def test_gradients_of_activations_are_those_of_autograd(activation):
    gate, up, grad = 3 * randn(100, 48), randn(100, 48, seed=1), randn(100, 48, seed=2)
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    h = OF_PYTORCH[activation](leaves[0]) * leaves[1]
    for want, got in zip(
        torch.autograd.grad(h, leaves, grad.double()), glu_backward(grad, gate, up, activation), strict=True
    ):
        assert sqnr(want, got) > 130
    joined = glu_backward(grad, gate, up, activation, joined=True)
    assert joined[0]._base is joined[1]._base and joined[0]._base.shape == (100, 96)
    assert_same(
        dict(enumerate(glu_backward(grad, gate, up, activation))), {i: t.contiguous() for i, t in enumerate(joined)}
    )


def test_exponential_is_within_its_bound():
    x = -torch.cat([torch.linspace(0, 86.25, 500_001), torch.logspace(-30, 0, 1000)])
    exact = x.double().exp()
    unit = 2.0 ** (exact.log2().floor() - 23)
    assert (((activations.exp_of_negative(x).double() - exact) / unit).abs() <= 2.4).all()
    assert activations.exp_of_negative(torch.tensor([0.0, -0.0, -87.0, -1e30, -math.inf])).tolist() == [1, 1, 0, 0, 0]


def test_gelu_keeps_relative_precision_in_its_tail():
    g = -torch.linspace(0.01, 12, 5001)
    exact = torch.special.log_ndtr(g.double()).exp()
    assert ((activations.factor(g, "gelu").double() - exact) / exact).abs().max() < 1e-5
    assert ((activations.factor(g[g > -3], "gelu").double() - exact[g > -3]) / exact[g > -3]).abs().max() < 1e-6


@needs_triton
@pytest.mark.parametrize("spec", ["e4m3/row", "e4m3/1x32/e8m0"])
@by_norm
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the division by the norm of rows beyond the last
def test_columns_are_padded_with_zeros_to_what_matrix_units_want(kind, spec):
    x, weight, bias = randn(37, 64), randn(64, seed=1), randn(64, seed=2) + 9
    with op_of(kind).force("triton"):
        transposed = norm_of(kind, x, weight, bias, 0.0, QuantSpec.parse(spec), "columns").quantized.data
    assert (transposed.shape, transposed.stride()) == ((37, 64), (1, 48))
    assert (transposed.as_strided((64, 48), (48, 1))[:, 37:].float() == 0).all()


WRONG = {
    "3 dimensions": (lambda x, w: rms_norm(x[None], w, 1e-5), "x must be a float32, .* matrix .* shape \\(1, 8, 32\\)"),
    "dtype": (lambda x, w: rms_norm(x.double(), w, 1e-5), "float64"),
    "weight": (lambda x, w: rms_norm(x, w[:3], 1e-5), "weight must be torch.bfloat16 or torch.float32 \\[32\\].*\\[3"),
    "bias": (lambda x, w: layer_norm(x, w, w.float(), 1e-5), "bias must be torch.bfloat16"),
    "order": (lambda x, w: rms_norm(x, w, 1e-5, ROW, "row"), "order is .*did you mean 'rows'"),
    "granularity": (lambda x, w: rms_norm(x, w, 1e-5, QuantSpec.parse("e4m3/tensor")), "got e4m3/tensor"),
    "odd blocks": (lambda x, w: rms_norm(x, w, 1e-5, QuantSpec.parse("e4m3/1x48")), "got e4m3/1x48"),
    "device": (lambda x, w: rms_norm(x, w.to("meta"), 1e-5), "on cpu; got .* on meta"),
    "grad": (lambda x, w: rms_norm_backward(x.float(), x, w, x[:, :1].float()), "grad must be torch.bfloat16"),
    "rstd": (lambda x, w: rms_norm_backward(x, x, w, x[:, 0].float()), "rstd must be torch.float32 \\[8, 1\\]"),
    "mean": (lambda x, w: layer_norm_backward(x, x, w, x[:, :1], x[:, :1].float()), "mean must be torch.float32"),
    "dimensions of a gate": (lambda g, _: glu(g[None], g[None]), "gate must be a float32, .* shape \\(1, 8, 32\\)"),
    "up": (
        lambda g, _: glu(g, g[:, 1:]),
        "must be torch.bfloat16 \\[8, 32\\] on cpu; got torch.bfloat16 \\[8, 31\\]",
    ),
    "up's dtype": (lambda g, _: glu(g, g.float()), "up must be torch.bfloat16 .* got torch.float32"),
    "activation": (
        lambda g, _: glu(g, g, "gelu_tan"),
        "activation is 'silu', .* got 'gelu_tan'.*did you mean 'gelu_tanh'",
    ),
    "order of a gate": (lambda g, _: glu(g, g, "silu", ROW, "column"), "did you mean 'columns'"),
    "granularity of a gate": (lambda g, _: glu(g, g, "silu", QuantSpec.parse("e4m3/128x128")), "got e4m3/128x128"),
    "grad of a gate": (lambda g, _: glu_backward(g[1:], g, g), "grad must be torch.bfloat16 \\[8, 32\\]"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_arguments_are_named(mistake):
    call, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        call(randn(8, 32, dtype=torch.bfloat16), randn(32, dtype=torch.bfloat16))


@pytest.mark.thorough
def test_ops_trace_and_their_fakes_are_right():
    x, weight = randn(20, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    gate, up = randn(20, 128, dtype=torch.bfloat16).chunk(2, 1)
    rstd, ops, check = torch.ones(20, 1), torch.ops.octavo, torch.library.opcheck
    for spec in ("", "e4m3/row", "e4m3/1x32/e8m0"):
        for order in ("rows", "columns", "both"):
            check(ops.rms_norm.default, (x, weight, 1e-5, True, spec, order))
            check(ops.layer_norm.default, (x, weight, weight, 1e-5, spec, order))
            check(ops.glu.default, (gate, up, "silu", spec, order))
    check(ops.rms_norm_backward.default, (x, x, weight, rstd, False))
    check(ops.layer_norm_backward.default, (x, x, weight, rstd, rstd))
    for joined in (False, True):
        check(ops.glu_backward.default, (gate, gate, up, "gelu", joined))

    def block(x, gate, up):
        normed = rms_norm(x, weight, 1e-5, ROW, "both").quantized
        gated = glu(gate, up, "silu", ROW, "both").dequantize(), *glu_backward(gate, gate, up, joined=True)
        return normed.dequantize(), normed.other_order, *gated

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected, actual = block(x, gate, up), compiled(x, gate, up)
    assert_same(dict(enumerate(expected)), dict(enumerate(actual)))


@by_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_looked_up_activations_are_the_computed_ones(activation, dtype, monkeypatch):
    every_number = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    gate, up, grad = every_number.t(), randn(256, 256, dtype=dtype), randn(256, 256, seed=1, dtype=dtype)
    monkeypatch.setattr(activations, "MOST_LOOKUP_THREADS", 1 << 10)
    looked_up = [*fused_reference.glu(gate, up, activation, None, "rows")]
    looked_up += fused_reference.glu_backward(grad, gate, up, activation, False)
    monkeypatch.setattr(activations, "MOST_LOOKUP_THREADS", 0)
    computed = [*fused_reference.glu(gate, up, activation, None, "rows")]
    computed += fused_reference.glu_backward(grad, gate, up, activation, False)
    for a, b in zip(looked_up, computed, strict=True):
        numbers = ~a.isnan()  # which NaN is left to PyTorch's conversions
        assert torch.equal(numbers, ~b.isnan())
        assert torch.equal(a.view(torch.int16)[numbers], b.view(torch.int16)[numbers])


@needs_triton
def test_a_probe_covers_results_that_are_not_in_fp8():
    device = torch.device("cpu")
    for op, case in ((RMS_NORM, ("rms_norm", "")), (LAYER_NORM, ("layer_norm", "")), (GLU, ("silu", ""))):
        assert case in op.cases.values()
        assert op.run_probe(op.backends["triton"], device, case) is None

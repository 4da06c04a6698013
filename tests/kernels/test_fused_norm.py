import math

import pytest
import torch
from fused_inputs import SPECS, assert_quantizes, assert_same, both_backends, outputs_of, randn, spread

from octavo.kernels.fused import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from octavo.kernels.fused import reference as fused_reference
from octavo.kernels.fused.glu import GLU
from octavo.kernels.fused.norm import LAYER_NORM, RMS_NORM
from octavo.numerics import QuantSpec, sqnr
from tensors import needs_triton

ROW = QuantSpec.parse("e4m3/row")


def norm_of(kind, x, weight, bias, *arguments, **options):
    if kind == "rms_norm":
        return rms_norm(x, weight, *arguments, **options)
    return layer_norm(x, weight, bias, *arguments, **options)


@needs_triton
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.slow
def test_every_configuration_and_route_equals_reference(kind, spec, monkeypatch):
    from octavo.kernels.fused import triton as backend

    x, weight = spread(21, 600, dtype=torch.bfloat16), randn(600, seed=2)
    bias = randn(600, seed=3) if kind == "layer_norm" else None
    for route in ("default", "two steps", "row blocks"):
        monkeypatch.setattr(backend, "WIDEST_ROW_BLOCK", 0 if route == "two steps" else 4096)
        monkeypatch.setattr(backend, "WIDEST_ROW", 0 if route == "row blocks" else 32768)
        for order in ("rows", "both") if route == "default" else ("both",):
            call = (x, weight, bias, 1e-5, bias is None, bias is not None, spec, order)
            expected = dict(enumerate(fused_reference.norm(*call)))
            for config in range(2):
                assert_same(expected, dict(enumerate(backend.norm(*call, config=config))))


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("widest", [8192, 0])
def test_every_configuration_and_route_of_the_gradients_equals_reference(widest, monkeypatch):
    from octavo.kernels.fused import triton as backend

    monkeypatch.setattr(backend, "WIDEST_SUMS", widest)
    x, grad, weight = spread(70, 1100), randn(70, 1100, seed=1), randn(1100, seed=2)
    call = (grad, x, weight, randn(70, 1, seed=3).abs(), randn(70, 1, seed=4), False, True)
    expected = dict(enumerate(fused_reference.norm_backward(*call)))
    for config in range(2):
        assert_same(expected, dict(enumerate(backend.norm_backward(*call, config=config))))


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("order", [pytest.param("rows", marks=pytest.mark.slow), "both"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
def test_special_values_poison_their_own_row_and_stay_visible(kind, order):
    for special in (math.nan, math.inf, -math.inf):
        x = randn(20, 150)
        x[3, 7] = special
        x[5] = 0
        x[6] = 1e30  # its squares overflow
        for spec in (None, *SPECS):
            call = lambda x=x, spec=spec: norm_of(kind, x, torch.ones(150), None, 0.0, spec, order)  # noqa: E731
            expected, actual = both_backends(RMS_NORM if kind == "rms_norm" else LAYER_NORM, call)
            assert_same(outputs_of(expected), outputs_of(actual))
            if spec is None:
                assert expected.y[3, 7].isnan()
            y = expected.y if spec is None else expected.quantized.dequantize()
            finite = y.isfinite().all(1)
            assert not finite[3] and finite[[0, 1, 2, 4, *range(7, 20)]].all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    ("kind", "order"), [("rms_norm", "rows"), ("layer_norm", "columns"), ("rms_norm", "both"), ("layer_norm", "both")]
)
def test_fusing_changes_no_byte(kind, order, spec):
    x, weight = (randn(50, 170, seed=s, dtype=torch.bfloat16) for s in range(2))
    fused, plain = (norm_of(kind, x, weight[0], weight[1], 1e-5, *rest) for rest in ((spec, order), ()))
    assert_quantizes(plain.y, fused.quantized, spec, order)
    assert fused.y is plain.quantized is None and torch.equal(fused.rstd, plain.rstd)


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 1000])
def test_norms_are_those_of_pytorch(columns):
    x, weight, bias = spread(33, columns), randn(columns, seed=1), randn(columns, seed=2)
    exact = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    assert sqnr(exact, rms_norm(x, weight, 1e-6).y) > 130
    assert sqnr(exact, rms_norm(x, weight - 1, 1e-6, add_unit_offset=True).y) > 130
    exact = torch.nn.functional.layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-6)
    assert sqnr(exact, layer_norm(x, weight, bias, 1e-6).y) > 120
    assert sqnr(exact, layer_norm(x + 1000, weight, bias, 1e-6).y) > 60 or columns == 1
    half = x.bfloat16()
    exact = torch.nn.functional.rms_norm(half.double(), (columns,), weight.double(), 1e-6)
    assert sqnr(exact, rms_norm(half, weight, 1e-6).y) > sqnr(exact, exact.bfloat16()) - 0.01


@pytest.mark.parametrize("offset", [False, True])
def test_gradients_are_those_of_autograd(offset):
    x, grad = spread(70, 48), randn(70, 48, seed=1)
    weight, bias = randn(48, seed=3), randn(48, seed=4)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact_x, exact_w, exact_b = leaves
    y = torch.nn.functional.rms_norm(exact_x, (48,), exact_w + 1 if offset else exact_w, 1e-5)
    expected = torch.autograd.grad(y, [exact_x, exact_w], grad.double())
    normed = rms_norm(x, weight, 1e-5, add_unit_offset=offset)
    result = rms_norm_backward(grad, x, weight, normed.rstd, add_unit_offset=offset)
    for want, got in zip(expected, result, strict=True):
        assert sqnr(want, got) > 125
    y = torch.nn.functional.layer_norm(exact_x, (48,), exact_w, exact_b, 1e-5)
    expected = torch.autograd.grad(y, leaves, grad.double())
    normed = layer_norm(x, weight, bias, 1e-5)
    result = layer_norm_backward(grad, x, weight, normed.mean, normed.rstd)
    for want, got in zip(expected, result, strict=True):
        assert sqnr(want, got) > 120


@needs_triton
@pytest.mark.parametrize("spec", ["e4m3/row", "e4m3/1x32/e8m0"])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the division by the norm of rows beyond the last
def test_columns_are_padded_with_zeros_to_what_matrix_units_want(kind, spec):
    x, weight, bias = randn(37, 64), randn(64, seed=1), randn(64, seed=2) + 9
    with (RMS_NORM if kind == "rms_norm" else LAYER_NORM).force("triton"):
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
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_arguments_are_named(mistake):
    call, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        call(randn(8, 32, dtype=torch.bfloat16), randn(32, dtype=torch.bfloat16))


@pytest.mark.thorough
def test_ops_trace_and_their_fakes_are_right():
    x, weight = randn(20, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    rstd = torch.ones(20, 1)
    ops = torch.ops.octavo
    for spec in ("", "e4m3/row", "e4m3/1x32/e8m0"):
        for order in ("rows", "columns", "both"):
            torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-5, True, spec, order))
            torch.library.opcheck(ops.layer_norm.default, (x, weight, weight, 1e-5, spec, order))
    torch.library.opcheck(ops.rms_norm_backward.default, (x, x, weight, rstd, False))
    torch.library.opcheck(ops.layer_norm_backward.default, (x, x, weight, rstd, rstd))

    def block(x):
        normed = rms_norm(x, weight, 1e-5, ROW, "both")
        return normed.quantized.dequantize(), normed.quantized.other_order

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for want, got in zip(block(x), compiled(x), strict=True):
        assert_same({"": want}, {"": got})


@needs_triton
def test_a_probe_covers_results_that_are_not_in_fp8():
    device = torch.device("cpu")
    for op, case in ((RMS_NORM, ("rms_norm", "")), (LAYER_NORM, ("layer_norm", "")), (GLU, ("silu", ""))):
        assert case in op.cases.values()
        assert op.run_probe(op.backends["triton"], device, case) is None

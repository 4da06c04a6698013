import math

import pytest
import torch
import torch.nn.functional as F
from fused_inputs import SPECS, assert_quantizes, assert_same, both_backends, outputs_of, randn, spread

from octavo.kernels.fused import activations, glu, glu_backward
from octavo.kernels.fused import reference as fused_reference
from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.fused.glu import GLU, GLU_BACKWARD
from octavo.numerics import QuantSpec, sqnr
from tensors import needs_triton

by_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
ROW = QuantSpec.parse("e4m3/row")
OF_PYTORCH = {"silu": F.silu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"), "gelu": F.gelu}


@needs_triton
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.slow
def test_every_configuration_and_route_equals_reference(spec, monkeypatch):
    from octavo.kernels.fused import triton as backend

    gate, up = spread(21, 300, dtype=torch.bfloat16), randn(21, 300, seed=1, dtype=torch.bfloat16)
    for widest in (32768, 0) if str(spec.granularity) == "row" else (32768,):
        monkeypatch.setattr(backend, "WIDEST_ROW", widest)
        for order in ("rows", "both"):
            call = (gate, up, "silu", spec, order)
            expected = dict(enumerate(fused_reference.glu(*call)))
            for config in range(2):
                assert_same(expected, dict(enumerate(backend.glu(*call, config=config))))


@needs_triton
@by_activation
def test_every_configuration_of_the_gradients_equals_reference(activation):
    from octavo.kernels.fused import triton as backend

    call = (*(spread(21, 300, seed=s) for s in range(3)), activation, False)
    expected = dict(enumerate(fused_reference.glu_backward(*call)))
    for config in range(2):
        assert_same(expected, dict(enumerate(backend.glu_backward(*call, config=config))))


EXTREMES = [0.0, -0.0, 1e-40, -1e-40, 16.5, -16.5, 86.2, -86.2, 86.3, -86.3, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30]


@pytest.mark.thorough
@needs_triton
@by_activation
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
def test_special_values_poison_their_own_row_and_stay_visible(activation, dtype):
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
@pytest.mark.parametrize(("activation", "order"), list(zip(ACTIVATIONS, ("rows", "columns", "both"), strict=True)))
def test_fusing_changes_no_byte(activation, spec, order):
    gate, up = (randn(50, 170, seed=s, dtype=torch.bfloat16) for s in range(2))
    assert_quantizes(glu(gate, up, activation), glu(gate, up, activation, spec, order), spec, order)


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
def test_gradients_are_those_of_autograd(activation):
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


WRONG = {
    "dimensions": (lambda g: glu(g[None], g[None]), "gate must be a float32, .* shape \\(1, 8, 32\\)"),
    "up": (lambda g: glu(g, g[:, 1:]), "up must be torch.bfloat16 \\[8, 32\\] on cpu; got torch.bfloat16 \\[8, 31\\]"),
    "up's dtype": (lambda g: glu(g, g.float()), "up must be torch.bfloat16 .* got torch.float32"),
    "activation": (
        lambda g: glu(g, g, "gelu_tan"),
        "activation is 'silu', .* got 'gelu_tan'.*did you mean 'gelu_tanh'",
    ),
    "order": (lambda g: glu(g, g, "silu", ROW, "column"), "did you mean 'columns'"),
    "granularity": (lambda g: glu(g, g, "silu", QuantSpec.parse("e4m3/128x128")), "got e4m3/128x128"),
    "grad": (lambda g: glu_backward(g[1:], g, g), "grad must be torch.bfloat16 \\[8, 32\\]"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_arguments_are_named(mistake):
    call, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        call(randn(8, 32, dtype=torch.bfloat16))


def test_ops_trace_and_their_fakes_are_right():
    both = randn(20, 128, dtype=torch.bfloat16)
    gate, up = both[:, :64], both[:, 64:]
    for spec in ("", "e4m3/row", "e4m3/1x32/e8m0"):
        for order in ("rows", "columns", "both"):
            torch.library.opcheck(torch.ops.octavo.glu.default, (gate, up, "silu", spec, order))
    for joined in (False, True):
        torch.library.opcheck(torch.ops.octavo.glu_backward.default, (gate, gate, up, "gelu", joined))

    def block(gate, up):
        return glu(gate, up, "silu", ROW, "both").dequantize(), *glu_backward(gate, gate, up, joined=True)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for want, got in zip(block(gate, up), compiled(gate, up), strict=True):
        assert_same({"": want}, {"": got})


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

"""Calls below the dispatcher: the same results, the same errors, and only where nothing would see the op.

CPU tensors take the GPU path here: Triton's interpreter runs the kernels, `cublas_rules` the products.
"""

import contextlib
import gc
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cublas_rules import Rules, install
from test_gemm import operands, shifted
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.kernels import direct, launch, quantize, quantize_pair, registry, scaled_mm
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.gemm import reference as gemm_reference
from octavo.kernels.gemm import triton as triton_products
from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR
from octavo.kernels.quantize import triton as triton_quantize
from octavo.numerics import RECIPES, QuantSpec
from octavo.runtime.torch_compat import eager_signature
from octavo.tensor import ScaledTensor
from support.dispatch_modes import Passing

ROW, COLUMN = QuantSpec.parse("e4m3/row"), QuantSpec.parse("e4m3/column")


@pytest.fixture
def on_gpu_path():
    registry.GPU_TYPES.add("cpu")
    yield
    registry.GPU_TYPES.remove("cpu")


@pytest.fixture
def dispatched():
    with mock.patch.object(torch.ops.octavo, "quantize", wraps=torch.ops.octavo.quantize) as calls:
        yield calls


def same(expected, actual):
    for name in ("data", "other_order", "scale"):
        e, a = getattr(expected, name), getattr(actual, name)
        assert (e is None) == (a is None), name
        if e is not None:
            assert e.dtype == a.dtype and e.shape == a.shape, name
        if e is not None and e.numel():
            assert e.stride() == a.stride(), name
            assert torch.equal(e.contiguous().view(torch.uint8), a.contiguous().view(torch.uint8)), name


@torch.no_grad()
@pytest.mark.parametrize("shape", [(16, 32), (17, 5), (0, 3)], ids=str)
@pytest.mark.parametrize("text", ["e4m3/row", "e5m2/tensor", "e4m3/1x32/e8m0"])
def test_plans_compute_what_the_reference_computes(on_gpu_path, dispatched, text, shape):
    """Twice: the first call leaves the plan. Strides, alignment and what is given vary under one shape."""
    spec, x = QuantSpec.parse(text), torch.randn(shape).bfloat16()
    apart = torch.randn(shape[0], shape[1] + 3).bfloat16()[:, 3:]
    amax = torch.full(spec.granularity.scale_shape(shape), 3.0)
    calls = [("rows", {}), ("columns", {"scale": quantize(x, spec).scale}), ("both", {}), ("rows", {"amax": amax})]
    for matrix, (order, precomputed) in [(x, calls[0]), *itertools.product((x, apart, x.t().contiguous().t()), calls)]:
        with QUANTIZE.force("reference"):
            expected = quantize(matrix, spec, order=order, **precomputed)
        dispatched.reset_mock()
        with QUANTIZE.force("triton"):
            same(expected, quantize(matrix, spec, order=order, **precomputed))
        dispatched.assert_not_called()


@torch.no_grad()
def test_plans_of_pairs_tell_folds_apart(on_gpu_path):
    """[R,1] and [1,C] are the same tensor shape if R = C = 1, and differ otherwise."""
    for rows, columns in ((16, 48), (17, 17), (1, 1)):
        x, by_row, by_column = torch.randn(rows, columns), torch.rand(rows, 1), torch.rand(1, columns)
        for folds in ((by_column, by_row), (by_row, by_column), (None, by_row), (None, None), (by_column, by_row)):
            with QUANTIZE_PAIR.force("reference"):
                expected = quantize_pair(x, ROW, folds[0], COLUMN, folds[1])
            with QUANTIZE_PAIR.force("triton"):
                actual = quantize_pair(x, ROW, folds[0], COLUMN, folds[1])
            for e, a in zip(expected, actual, strict=True):
                same(e, a)


@torch.no_grad()
@pytest.mark.parametrize("label", [label for label in SCALED_MM.cases if label.split()[0] in ("rowwise", "tensorwise")])
def test_planned_products_pass_what_the_general_path_passes(on_gpu_path, monkeypatch, label):
    """Data, scales and bias of the same shapes, strides and addresses, also where the plan does not apply."""
    seen = []

    class Recorded(Rules):
        def _product(self, kind, a, b, *rest):
            seen.append([(t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in (a, b, *rest)])
            return super()._product(kind, a, b, *rest)

    install(monkeypatch, Recorded())
    for shape in ((64, 32, 48), (16, 16, 16), (1, 16, 32), (5, 16, 16), (16, 17, 16), (16, 16, 5), (0, 16, 16)):
        a, b, layout = operands(*shape, SCALED_MM.cases[label])
        for bias in (None, torch.randn(shape[1]).bfloat16(), torch.randn(shape[1] + 1).bfloat16()[1:]):
            if bias is not None and layout != "nt":
                continue
            arguments = dict(out_dtype=torch.bfloat16, bias=bias, fast_accum=True)
            with SCALED_MM.force("torch_scaled"):
                with mock.patch.object(direct, "GPU_TYPES", {"cuda"}):
                    expected = scaled_mm(a, b, layout, **arguments)
                general = seen.copy()
                for _ in range(2):
                    seen.clear()
                    assert torch.equal(expected, scaled_mm(a, b, layout, **arguments))
                    assert seen[-1:] == general[-1:]
                # The stand-in for cuBLAS refuses scales that are not aligned, which have the same signature.
                assert torch.equal(expected, scaled_mm(shifted(a), shifted(b), layout, **arguments))
            seen.clear()


@torch.no_grad()
@pytest.mark.parametrize("label", ["rowwise forward", "tensorwise wgrad"])
def test_planned_products_by_triton_are_those_of_the_ordinary_path(on_gpu_path, label):
    """Any sizes, memory orders, alignments and biases, under autocast, and where a dispatch mode sees the op."""
    for shape in ((16, 32, 64), (17, 5, 33), (0, 3, 16)):
        a, b, layout = operands(*shape, SCALED_MM.cases[label])
        bias = torch.randn(shape[1] + 1) if layout == "nt" else None
        for dtype, added, order in (
            (torch.bfloat16, None, lambda x: x), (torch.float32, bias, shifted), (torch.float16, bias, by_column),
        ):  # fmt: skip
            left, right = order(a), order(b)
            added = None if added is None else added[1:] if order is shifted else added[:-1]
            arguments = dict(out_dtype=dtype, bias=added, fast_accum=True)
            with SCALED_MM.force("triton"):
                with mock.patch.object(direct, "GPU_TYPES", {"cuda"}):
                    expected = scaled_mm(left, right, layout, **arguments)
                with Passing() as mode:
                    actual = [scaled_mm(left, right, layout, **arguments)]
                if shape[0]:  # nothing is launched for empty operands
                    with mock.patch.object(torch.ops.octavo, "scaled_mm") as calls, torch.autocast("cpu"):
                        actual += [scaled_mm(left, right, layout, **arguments) for _ in range(2)]
                    calls.default.assert_not_called()
            assert torch.ops.octavo.scaled_mm.default in mode.seen
            for y in actual:
                assert y.dtype == dtype and y.stride() == expected.stride() and torch.equal(expected, y), shape


def by_column(x):
    return ScaledTensor(x.data.t().contiguous().t(), x.scale, x.spec)


@torch.no_grad()
def test_products_by_triton_launch_on_their_device(monkeypatch):
    a, b, layout = operands(16, 16, 32, SCALED_MM.cases["rowwise forward"])
    plan = triton_products.plan_of(a, b, layout, torch.bfloat16, None, True)
    plan._device, current = torch.device("cuda", 1), [0]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    seen, call = [], launch.PreparedLaunch.__call__
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(
        launch.PreparedLaunch, "__call__", lambda self, tensors: (seen.append(current[-1]), call(self, tensors))
    )
    plan(a.data, b.data, a.scale, b.scale, None)
    assert seen == [1] and current == [0]


class Subclass(torch.Tensor):
    pass


def contexts():
    x = torch.randn(16, 16)
    lazy = torch.randn(16, 16, dtype=torch.complex64).conj().imag
    seen, outlived = [], []
    torch.func.grad(lambda y: (outlived.append(y), y.sum())[1])(x)
    torch.func.grad(lambda y: (seen.append(eager_signature(y)), y.sum())[1])(x)
    torch.func.vmap(lambda y: (seen.append(eager_signature(y)), y)[1])(x)
    torch.jit.trace(lambda y: (seen.append(eager_signature(y)), y)[1], x, check_trace=False)
    yield "transforms and tracers", seen
    for mode in (Passing(), FakeTensorMode(), torch.device("cpu"), torch.enable_grad()):
        with mode:
            yield type(mode).__name__, [eager_signature(x)]
    for tensor in (lazy, torch._efficientzerotensor(4, 4), x.as_subclass(Subclass), *outlived):
        yield "tensor", [eager_signature(x, tensor)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@torch.no_grad()
def test_ops_are_dispatched_where_something_would_see_them():
    x = torch.randn(16, 16)
    assert eager_signature(x, None, nn.Parameter(x)) is not None
    for name, signatures in contexts():
        assert signatures and not any(signatures), name
    with torch.inference_mode():
        assert eager_signature(x) is not None


@torch.no_grad()
def test_errors_are_the_same_after_a_good_call(on_gpu_path):
    x = torch.randn(16, 32)
    with QUANTIZE.force("triton"):
        scale = quantize(x, ROW, order="rows").scale
        for wrong in (
            {"order": "diagonal"}, {"scale": scale.t()}, {"scale": scale.double()}, {"fold": torch.rand(3, 1)},
            {"amax": scale, "scale": scale}, {"fold": torch.rand(16, 1).half()}, {"scale": scale.to("meta")},
        ):  # fmt: skip
            with pytest.raises(ValueError, match="quantize"):
                quantize(x, ROW, **wrong)
        for matrix in (x.int(), x[0], x.double()):
            with pytest.raises(ValueError, match="quantize: x must be a"):
                quantize(matrix, ROW)
    with pytest.raises(ValueError, match="one format"):
        quantize_pair(x, ROW, None, QuantSpec.parse("e5m2/column"), None)
    a, b, layout = operands(16, 16, 32, SCALED_MM.cases["rowwise forward"])
    scaled_mm(a, b, layout, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out_dtype"):
        scaled_mm(a, b, layout, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="bias must be"):
        scaled_mm(a, b, layout, out_dtype=torch.bfloat16, bias=torch.zeros(15))


@torch.no_grad()
def test_the_backend_is_asked_for_at_every_call(on_gpu_path, dispatched):
    x = torch.randn(16, 32)
    with QUANTIZE.force("triton"):
        quantize(x, ROW)
    dispatched.reset_mock()
    with QUANTIZE.force("reference"):
        quantize(x, ROW)
    dispatched.assert_called_once()  # the reference has no plan


@torch.no_grad()
def test_zeros_are_handed_out_once_and_not_under_a_dispatch_mode(on_gpu_path, monkeypatch):
    monkeypatch.setattr(direct, "BLOCK", 1024)
    zeros, cpu = direct.ZeroBlocks(), torch.device("cpu")
    parts = []
    for size in (1, 17, 100, 128, 129, *[100] * 20):
        block, start = zeros.cut(size, cpu, 0)
        parts.append(block[start : start + size])
    for size, part in zip((1, 17, 100, 128, 129, *[100] * 20), parts, strict=True):
        assert len(part) == size and part.dtype == torch.int32
        assert part.data_ptr() % 64 == 0 and not part.any()
        part.fill_(1)  # what is handed out later is zero all the same
    assert len({part.untyped_storage()._cdata for part in parts}) == 4  # three blocks; 129 is large
    x, recipe = torch.randn(16, 32), RECIPES["tensorwise"]
    with mock.patch.object(direct.ZeroBlocks, "cut", side_effect=direct.new_zeros) as used, QUANTIZE.force("triton"):
        quantize(x, recipe.x)
        used.assert_called_once()
        with Passing():
            quantize(x, recipe.x)
        used.assert_called_once()


@torch.no_grad()
def test_plans_hold_no_tensor(on_gpu_path):
    x, recipe = torch.randn(16, 32), RECIPES["rowwise"]
    with QUANTIZE.force("triton"), QUANTIZE_PAIR.force("triton"):
        quantize(x, ROW, order="both")
        quantize_pair(x, recipe.dgrad_g, torch.rand(1, 32), recipe.wgrad_g, torch.rand(16, 1))
    todo, visited = [*triton_quantize._PLANS.values()], set()
    assert todo
    while todo:
        item = todo.pop()
        assert not isinstance(item, torch.Tensor)
        if id(item) not in visited and not isinstance(item, type | type(gc) | type(contexts)):
            visited.add(id(item))
            if type(item).__module__.startswith(("octavo", "builtins", "operator")):
                todo += gc.get_referents(item)


@pytest.mark.parametrize("shape", [(8_400_000, 16), (16, 4_300_000), (1, 70_000 * 128)], ids=str)
@torch.no_grad()
def test_grids_fit_cuda_at_any_size(monkeypatch, shape):
    """CUDA allows 65535 in the second and third dimension."""
    grids = []
    monkeypatch.setattr(launch.PreparedLaunch, "__call__", lambda self, tensors: grids.append(self.grid))
    x = torch.empty(shape, dtype=torch.bfloat16)
    scale = torch.empty(shape[0], 1)
    for recipe in (RECIPES["rowwise"], RECIPES["tensorwise"], RECIPES["blockwise"], RECIPES["mxfp8"]):
        for order in ("rows", "columns", "both"):
            triton_quantize.quantize(x, recipe.x, None, None, None, order)
        if recipe.wgrad_g != recipe.dgrad_g:
            triton_quantize.quantize_pair(x, recipe.dgrad_g, None, recipe.wgrad_g, None)
    from octavo.kernels.dequantize import triton as dequantize

    dequantize.dequantize(torch.empty(shape, dtype=ROW.format.dtype), scale, ROW, torch.bfloat16)
    assert len(grids) >= 15
    assert all(0 < grid[0] < 2**31 and max((0, *grid[1:])) <= 65535 for grid in grids), grids


def test_the_probe_calls_plans_often_enough(on_gpu_path):
    """The first call of a plan goes through Triton, the second directly, the third by a generated function."""
    case, calls = ("e4m3/row", "e4m3/row", "nt"), []

    def plan_of(*operands):
        def plan(a, b, a_scale, b_scale, bias):
            calls.append(1)
            y = gemm_reference.scaled_mm(*operands[:4], bias, False)
            return y * 2 if len(calls) % 4 == 3 else y

        return plan

    backend = replace(SCALED_MM.backends["reference"], plan=plan_of)
    assert "call 3 of the plan" in SCALED_MM.run_probe(backend, torch.device("cpu"), case)
    assert SCALED_MM.run_probe(replace(backend, plan=lambda *_: None), torch.device("cpu"), case) is None

"""One weight per expert: the results of a linear for each expert alone."""

import pytest
import torch

import octavo
from octavo.kernels import grouped, registry
from octavo.kernels.grouped import GROUPED_MM, is_grouped, reference
from octavo.nn import grouped_linear, linear
from octavo.numerics import sqnr
from octavo.runtime.torch_compat import FakeTensorMode
from octavo.tensor import ScaledTensor
from tensors import same

RECIPES = octavo.RECIPES
COUNTS = [5, 0, 1, 33, 16]
TAIL = 3


def operands(dtype=torch.float32, biased=True, n=70, k=40, tail=TAIL):
    """Rows with outliers, weights whose experts differ in size, and a gradient; the tail is NaN."""
    torch.manual_seed(0)
    experts, m = len(COUNTS), sum(COUNTS) + tail
    x, g = torch.randn(m, k), torch.randn(m, n) * torch.rand(m, 1)
    x[sum(COUNTS) :] = g[sum(COUNTS) :] = torch.nan
    w = torch.randn(experts, n, k) * torch.tensor([1.0, 3, 0.01, 100, 1]).view(-1, 1, 1)
    bias = torch.randn(experts, n) if biased else None
    offsets = torch.tensor(COUNTS).cumsum(0).int()
    return *(None if t is None else t.to(dtype) for t in (x, w, bias, g)), offsets


def differentiated(x, w, bias, g, *arguments, function=grouped_linear):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, w, bias)]
    y = function(*leaves, *arguments)
    y.backward(g)
    return y.detach(), *(None if t is None else t.grad for t in leaves)


def per_expert(x, w, bias, g, recipe):
    """The same from a linear for each expert."""
    y, dx = torch.zeros_like(g), torch.zeros_like(x)
    dw, dbias = torch.zeros_like(w), None if bias is None else torch.zeros_like(bias)
    start = 0
    for expert, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        own = None if bias is None else bias[expert]
        y[rows], dx[rows], dw[expert], db = differentiated(x[rows], w[expert], own, g[rows], recipe, function=linear)
        if dbias is not None:
            dbias[expert] = db
        start += count
    return y, dx, dw, dbias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.equalization])
def test_each_expert_gets_the_bits_of_its_own_linear_and_nothing_reads_the_tail(name, biased, dtype):
    x, w, bias, g, offsets = operands(dtype, biased)
    expected = per_expert(x, w, bias, g, RECIPES[name])
    assert same(expected, differentiated(x, w, bias, g, offsets, RECIPES[name]))
    stored = w.transpose(1, 2).contiguous()
    y, dx, dw, db = differentiated(x, stored, bias, g, offsets, RECIPES[name], True)
    assert dw.shape == stored.shape and same(expected, (y, dx, dw.transpose(1, 2), db))


def test_one_quantization_of_x_and_three_products_serve_all_experts(monkeypatch):
    calls = []
    for owner, op in ((torch.ops.octavo, "quantize"), (grouped, "_GROUPED_MM")):
        original = getattr(owner, op)
        counted = lambda *a, name=op, run=original: calls.append((name, a[0].shape)) or run(*a)  # noqa: E731
        monkeypatch.setattr(owner, op, counted)
    x, w, _, g, offsets = operands(biased=False)
    differentiated(x, w, None, g, offsets, RECIPES["rowwise"])
    assert sum(name == "_GROUPED_MM" for name, _ in calls) == 3
    assert sum(name == "quantize" and shape == x.shape for name, shape in calls) == 1


def test_operands_in_both_memory_orders_as_on_gpus_give_the_same_bits(monkeypatch):
    x, w, bias, g, offsets = operands(tail=0)
    expected = differentiated(x, w, bias, g, offsets, RECIPES["rowwise"])
    monkeypatch.setattr(registry, "GPU_TYPES", {"cuda", "cpu"})
    monkeypatch.setattr("octavo.kernels.gemm.GPU_TYPES", {"cuda", "cpu"})
    y, dx, dw, db = differentiated(x, w, bias, g, offsets, RECIPES["rowwise"])
    assert torch.equal(y, expected[0]) and torch.equal(db, expected[3])
    assert sqnr(expected[1], dx) > 120 and sqnr(expected[2], dw) > 120  # another order of summation


def accuracy():
    """The least SQNR of the three products of an expert against float64."""
    x, w, _, g, offsets = operands(biased=False, n=256, k=192, tail=0)
    y, dx, dw, _ = differentiated(x, w, None, g, offsets, RECIPES["rowwise"])
    least, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start + 1:
            xe, we, ge = x[start:end].double(), w[expert].double(), g[start:end].double()
            least += [sqnr(xe @ we.T, y[start:end]), sqnr(ge @ we, dx[start:end]), sqnr(ge.T @ xe, dw[expert])]
        start = end
    return min(least)


def test_products_are_accurate_for_experts_of_any_size_and_a_skipped_scale_is_noticed(monkeypatch):
    assert accuracy() > 27
    run, last = reference.grouped_mm, len(COUNTS) - 1

    def skipping(a, b, offsets, layout, *arguments):
        scale = a.scale.clone()
        rows = slice(last, None) if layout == "tn" else slice(int(offsets[last - 1]), None)
        scale[rows] = 1.0
        return run(ScaledTensor(a.data, scale, a.spec), b, offsets, layout, *arguments)

    backend = GROUPED_MM.backends["reference"]
    monkeypatch.setitem(GROUPED_MM.backends, "reference", type(backend)(name="reference", run=skipping))
    with GROUPED_MM.force("reference"):
        assert accuracy() < 10


def test_nothing_is_read_on_the_host_and_frozen_operands_get_no_product():
    x, w, bias, g, offsets = operands()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (x, w, bias, g, offsets)]
        for name in ("rowwise", "blockwise"):
            y, dx, dw, db = differentiated(*fake, RECIPES[name])
            assert (y.shape, dx.shape, dw.shape, db.shape) == (g.shape, x.shape, w.shape, bias.shape)
    x.requires_grad_()
    y = grouped_linear(x, w, None, offsets, RECIPES["rowwise"])
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved) and any(t.data_ptr() == w.data_ptr() for t in saved)
    y[: sum(COUNTS)].sum().backward()
    assert x.grad.isfinite()[: sum(COUNTS)].all()


def test_what_does_not_fit_is_refused():
    x, w, bias, _, offsets = operands()
    for arguments, text in (
        ((x, w[0], bias, offsets), "takes input"),
        ((x, w, bias, offsets[1:]), "takes input"),
        ((x[:, 1:], w, bias, offsets), "in_features = 40"),
        ((x.bfloat16(), w, bias, offsets), "cast one of them"),
        ((x, w, bias, offsets.long()), "int32"),
        ((x, w, bias[:, 1:], offsets), r"bias is \[5,70\]"),
    ):
        with pytest.raises(ValueError, match=text):
            grouped_linear(*arguments, RECIPES["rowwise"])
    with pytest.raises(ValueError, match="'rowwise_equalized' needs channel scales, which experts do not keep"):
        grouped_linear(x, w, bias, offsets, RECIPES["rowwise_equalized"])
    assert [name for name, recipe in RECIPES.items() if is_grouped(recipe)] == ["rowwise"]

"""What torch_scaled hands to PyTorch's products, against the rules those have on a GPU."""

import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cublas_rules import Rules, install
from test_gemm import operands, shifted

from octavo.kernels import scaled_mm
from octavo.kernels.gemm import SCALED_MM, torch_scaled
from octavo.numerics import RECIPES, sqnr
from octavo.tensor import ScaledTensor

SHAPES = [(64, 128, 256), (48, 80, 176), (1, 17, 5), (16, 1, 32), (0, 4, 4), (3, 0, 4), (3, 4, 0), (257, 130, 131)]
PRODUCTS = {label: case for label, case in SCALED_MM.cases.items() if label.split()[0] != "rowwise_hp_wgrad"}
MIXED = {
    "mixed forward": ("e4m3/tensor", "e4m3/row", "nt"),
    "mixed dgrad": ("e5m2/row", "unit", "nn"),
    "mixed wgrad": ("e4m3/column", "e4m3/tensor", "tn"),
    "one scale": ("unit", "e4m3/tensor", "nn"),
    "blocks left": ("e4m3/128x128", "e4m3/1x128", "nt"),
}
HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture
def rules(monkeypatch):
    return install(monkeypatch, Rules())


def compare(a, b, layout, dtype, bias=None, case=""):
    expected = scaled_mm(a, b, layout, out_dtype=dtype, bias=bias)
    with SCALED_MM.force("torch_scaled"):
        actual = scaled_mm(a, b, layout, out_dtype=dtype, bias=bias)
    assert actual.shape == expected.shape and actual.dtype == dtype and actual.is_contiguous(), case
    if expected.numel() and expected.abs().max() > 0:
        assert sqnr(expected, actual) > {torch.bfloat16: 50, torch.float16: 65, torch.float32: 110}[dtype], case
    else:
        assert torch.equal(expected, actual), case


@pytest.mark.parametrize("label", PRODUCTS | MIXED)
def test_every_product_meets_the_rules_of_pytorch(rules, label):
    for shape in SHAPES:
        a, b, layout = operands(*shape, (PRODUCTS | MIXED)[label])
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for bias in (None, torch.linspace(-1, 1, shape[1], dtype=dtype)):
                case = f"{shape} {dtype} {'without' if bias is None else 'with'} bias"
                try:
                    compare(a, b, layout, dtype, bias, case)
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    pytest.fail(f"{case}: {error}")


@pytest.mark.parametrize("label", PRODUCTS)
def test_data_in_both_memory_orders_is_not_copied(rules, monkeypatch, label):
    a, b, layout = operands(64, 128, 256, PRODUCTS[label])

    def both(operand):
        return ScaledTensor(operand.data, operand.scale, operand.spec, operand.data.t().contiguous().t())

    a, b = both(a), both(b)
    pointers = {t.data_ptr() for operand in (a, b) for t in (operand.data, operand.other_order)}
    seen = []

    def spy(product):
        def seeing(x, y, *arguments, **named):
            seen.append((x, y))
            return product(x, y, *arguments, **named)

        return seeing

    monkeypatch.setattr(torch, "_scaled_mm", spy(rules.scaled_mm_v1))
    monkeypatch.setattr(F, "scaled_mm", spy(rules.scaled_mm_v2))
    compare(a, b, layout, torch.bfloat16)
    left, right = seen[-1]
    assert left.data_ptr() in pointers and right.data_ptr() in pointers


@pytest.mark.parametrize(
    "label", [label for label in PRODUCTS | MIXED if label.split()[0] in ("blockwise", "mxfp8", "blocks")]
)
def test_planned_products_of_blocks_are_those_of_the_backend(rules, label):
    """One call each, of later operands too; what a plan does not take, the backend's own function computes."""
    for m, n, k in ((128, 256, 512), (512, 128, 128), (128, 640, 384)):
        for bias in (None, torch.linspace(-1, 1, n).bfloat16()):
            first, later = (_contracted(*operands(m, n, k, (PRODUCTS | MIXED)[label], seed)) for seed in (0, 1))
            plan = torch_scaled.plan_of(*first, torch.bfloat16, bias, False)
            assert isinstance(plan, torch_scaled.BlockCall)
            for a, b, layout in (first, later):
                expected = torch_scaled.scaled_mm(a, b, layout, torch.bfloat16, bias, False)
                calls = len(rules.calls)
                assert torch.equal(expected, plan(a.data, b.data, a.scale, b.scale, bias))
                assert len(rules.calls) == calls + 1
        off = torch.zeros(n + 1).bfloat16()[1:]
        assert plan(a.data, b.data, a.scale, b.scale, off) is None
        assert not isinstance(torch_scaled.plan_of(*first, torch.bfloat16, bias.float(), False), torch_scaled.BlockCall)
        padded = _contracted(*operands(m + 1, n - 1, k, (PRODUCTS | MIXED)[label]))
        assert not isinstance(torch_scaled.plan_of(*padded, torch.bfloat16, None, False), torch_scaled.BlockCall)


def _contracted(a, b, layout):
    """Operands whose data are dense along the contraction, as quantizers for a GPU write them."""
    a, b = (ScaledTensor(x.data.t().contiguous().t(), x.scale, x.spec) if t else x
            for x, t in ((a, layout[0] == "t"), (b, layout[1] == "n")))  # fmt: skip
    return a, b, layout


@pytest.mark.parametrize("label", [label for label in PRODUCTS if label.split()[0] in ("rowwise", "tensorwise")])
def test_a_traced_product_is_one_call_that_meets_the_rules(rules, label):
    """What torch.compile traces; `unit` scales are ones, of any length."""
    bias = torch.linspace(-1, 1, 128).bfloat16() if "forward" in label else None
    for n in (128, 1 << 14):
        a, b, layout = _contracted(*operands(64, n, 256, PRODUCTS[label]))
        arguments = a, b, layout, torch.bfloat16, bias if n == 128 else None, False
        actual = torch_scaled.traced_scaled_mm(*arguments)
        assert torch.equal(torch_scaled.scaled_mm(*arguments), actual)
    for other in (torch.linspace(-1, 1, 128), torch.zeros(129).bfloat16()[1:], torch.zeros(256).bfloat16()[::2]):
        a, b, layout = operands(64, 128, 256, PRODUCTS["rowwise forward"])
        assert torch_scaled.traced_scaled_mm(a, b, layout, torch.bfloat16, other, False) is None
    assert torch_scaled.traced_scaled_mm(shifted(a), b, layout, torch.bfloat16, None, False) is None
    a, b, layout = operands(64, 130, 256, PRODUCTS["rowwise forward"])
    assert torch_scaled.traced_scaled_mm(a, b, layout, torch.bfloat16, None, False) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("label", ["rowwise forward", "rowwise dgrad", "rowwise wgrad", "tensorwise forward"])
def test_scales_and_bias_are_part_of_the_product_if_supported(rules, label, dtype):
    a, b, layout = operands(32, 48, 64, PRODUCTS[label])
    kind = "tensor" if "tensorwise" in label else "row"
    compare(a, b, layout, dtype, torch.ones(48, dtype=dtype))
    # PyTorch has no bias for float32 output on any device.
    assert rules.calls[-1] == (kind, dtype, dtype == torch.bfloat16)


def test_unsupported_output_runs_with_unit_scales(monkeypatch):
    rules = install(monkeypatch, Rules(refused=[("row", torch.float32), ("row", torch.float16)]))
    a, b, layout = operands(33, 48, 65, ("e4m3/row", "e4m3/row", "nt"))
    for dtype in (torch.float16, torch.float32):
        compare(a, b, layout, dtype, torch.ones(48, dtype=dtype))
        assert rules.calls[-1] == ("tensor", torch.float32, False)
    compare(a, b, layout, torch.bfloat16)
    assert rules.calls[-1] == ("row", torch.bfloat16, False)


def test_products_that_torch_computes_wrongly_are_not_used(monkeypatch):
    rules = install(monkeypatch, Rules())
    real = rules.scaled_mm_v1
    monkeypatch.setattr(torch, "_scaled_mm", lambda *matrices, **rest: real(*matrices, **rest) * 2)
    with SCALED_MM.force("torch_scaled"), pytest.raises(NotImplementedError, match="does not support scales"):
        scaled_mm(*operands(16, 16, 128, ("e4m3/tensor", "e4m3/tensor", "nt")), out_dtype=torch.float32)


def test_any_alignment_of_the_bias(rules):
    a, b, layout = operands(32, 48, 64, ("e4m3/row", "e4m3/row", "nt"))
    compare(a, b, layout, torch.bfloat16, torch.randn(97).to(torch.bfloat16)[1::2])
    compare(a, b, layout, torch.bfloat16, torch.randn(49).to(torch.bfloat16)[1:])
    assert rules.calls[-1] == ("row", torch.bfloat16, True)


@pytest.mark.parametrize("label", PRODUCTS)
def test_unaligned_scales_are_copied(rules, label):
    a, b, layout = operands(64, 128, 256, PRODUCTS[label])
    compare(shifted(a), shifted(b), layout, torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), HOPPER, BLACKWELL], ids=str)
def test_unsupported_cases_by_device(monkeypatch, name, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cases = [case for label, case in SCALED_MM.cases.items() if label.split()[0] == name]
    reasons = [torch_scaled.unsupported_reason(torch.device("cuda"), case) for case in cases]
    serves = {"blockwise": capability == HOPPER, "mxfp8": capability == BLACKWELL}.get(name, capability >= (8, 9))
    if serves:
        assert reasons == [None] * len(reasons) and reasons
    else:
        assert all(f"sm_{capability[0]}{capability[1]}" in reason for reason in reasons)


def test_unsupported_cases_by_version(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    cuda, case = torch.device("cuda"), ("e4m3/1x128", "e4m3/128x128", "nt")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA 12.9" in torch_scaled.unsupported_reason(cuda, case)
    assert torch_scaled.unsupported_reason(cuda, ("e4m3/row", "e4m3/row", "nt")) is None
    assert "E5M2" in torch_scaled.unsupported_reason(cuda, ("e5m2/tensor", "e5m2/tensor", "nt"))
    assert "no product for scales" in torch_scaled.unsupported_reason(cuda, ("e4m3/row", "e4m3/row", "nn"))


def test_unit_scales_are_cached_by_another_thread_and_never_in_a_capture(monkeypatch):
    """A tensor made in a graph's warm-up or capture lies in the graph's pool; one in the cache outlives every graph."""
    device, threads, capturing = torch.device("cuda", 0), [], [True]

    def new_ones(size, device):
        threads.append(threading.get_ident())
        return torch.ones((size, 1))

    monkeypatch.setattr(torch_scaled, "_ONES", {})
    monkeypatch.setattr(torch_scaled, "_MAX_ONES", 2)
    monkeypatch.setattr(torch_scaled, "_new_ones", new_ones)
    monkeypatch.setattr(torch_scaled, "is_capturing", lambda device: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    assert torch_scaled.ones(16, device) is not torch_scaled.ones(16, device) and not torch_scaled._ONES
    capturing[0] = False
    cached = torch_scaled.ones(16, device)
    assert torch_scaled.ones(16, device) is cached and threads[-1] != threading.get_ident()
    capturing[0] = True
    assert torch_scaled.ones(16, device) is not cached
    capturing[0] = False
    for size in (32, 64, 128):
        assert torch_scaled.ones(size, device).shape == (size, 1)
    assert torch_scaled.ones(16, device) is cached and len(torch_scaled._ONES) == 2

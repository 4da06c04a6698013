"""multiply: y and its FP8 form are those of torch.mul and quantize, byte for byte."""

import itertools

import pytest
import torch

from octavo.kernels import multiply, quantize
from octavo.kernels.multiply import MULTIPLY, plan_multiply, reference
from octavo.kernels.multiply import triton as kernels
from octavo.numerics import QuantSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = ((BF16, BF16, BF16), (FP16, FP16, FP16), (FP32, FP32, FP32), (FP32, BF16, BF16), (BF16, FP32, FP32))
SPEC = QuantSpec.parse("e4m3/row")


def factors(rows, columns, dtypes, by_column):
    generator = torch.Generator().manual_seed(rows + columns)
    a = torch.randn(rows, columns, generator=generator) * torch.exp(2 * torch.randn(rows, 1, generator=generator))
    b = torch.randn(columns if by_column else (rows, columns), generator=generator)
    return a.to(dtypes[0]), b.to(dtypes[1])


def same(expected, actual):
    pairs = list(zip(expected, actual, strict=True))
    assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(20, 136), (1, 1)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_the_kernel_equals_the_reference(shape, dtypes):
    for by_column, order in itertools.product((True, False), ("rows", "columns", "both")):
        call = (*factors(*shape, dtypes, by_column), dtypes[2], SPEC, order)
        assert same(reference(*call), kernels.multiply(*call))


@pytest.mark.thorough
def test_strides_and_special_values():
    a, b = factors(20, 160, (BF16, BF16), False)
    a[0, :4] = torch.tensor([float("inf"), float("nan"), 0.0, -0.0])
    a[1], a[2] = 0.0, 1e-39
    both = torch.cat((a, b), 1)
    calls = [(a, both[:, 160:], BF16, SPEC, "both"), (a.t().contiguous().t(), b, BF16, SPEC, "both")]
    for call in calls:
        expected, actual = reference(*call), kernels.multiply(*call)
        for x, y in zip(expected, actual, strict=True):
            x, y = x.float(), y.float()
            assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("config", range(3))
@pytest.mark.parametrize("order", ["rows", "both"])
def test_configurations(order, config):
    call = (*factors(5, 1100 if order == "both" else 300, (BF16, BF16), True), BF16, SPEC, order)
    assert same(reference(*call), kernels.multiply(*call, config))


@pytest.mark.thorough
def test_the_op():
    a, b = factors(24, 64, (BF16, BF16), False)
    for order in ("rows", "columns", "both"):
        y, q = multiply(a, b, BF16, SPEC, order)
        expected = quantize(a * b, SPEC, order=order)
        assert torch.equal(y, a * b) and torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(q.scale, expected.scale) and (q.other_order is None) is (order != "both")
        torch.library.opcheck(torch.ops.octavo.multiply, (a, b, BF16, SPEC.text, order))
    assert plan_multiply(a, b, BF16, SPEC, "rows", a.shape) is None  # the reference makes no plans
    for name, backend in MULTIPLY.backends.items():
        assert MULTIPLY.probe(backend, torch.device("cpu"), (SPEC.text,)) is None, name


def test_wrong_operands():
    a = torch.zeros(4, 8, dtype=BF16)
    for b, dtype, spec, order in (
        (a[:, :4], BF16, SPEC, "rows"), (a.int(), BF16, SPEC, "rows"), (a, FP16, SPEC, "rows"),
        (a, BF16, QuantSpec.parse("e4m3/tensor"), "rows"), (a, BF16, SPEC, "diagonal"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="multiply"):
            multiply(a, b, dtype, spec, order)

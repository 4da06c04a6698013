"""Inputs and comparisons that the tests of the fused producers share."""

import torch
from hypothesis import strategies as st

from octavo.kernels.conformance import difference
from octavo.numerics import QuantSpec
from tensors import randn

SPECS = [
    QuantSpec.parse(text)
    for text in ("e4m3/tensor", "e4m3/row", "e5m2/row", "e4m3/row/pow2", "e4m3/1x128", "e4m3/1x32/e8m0", "e5m2/1x64")
]
sizes = st.one_of(st.sampled_from([0, 1, 16, 31, 127, 128, 129]), st.integers(0, 140))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
specs = st.sampled_from([None, *SPECS])
orders = st.sampled_from(["rows", "columns", "both"])


def spread(*shape, seed=0, dtype=torch.float32):
    """Normal values times log-normal ones: several binades in every row."""
    return (randn(*shape, seed=seed) * torch.exp(randn(*shape, seed=seed + 100))).to(dtype)


def outputs_of(result):
    """All tensors of a `NormOutput` or `GluOutput`, by name."""
    tensors = {name: value for name, value in vars(result).items() if isinstance(value, torch.Tensor)}
    if result.quantized is not None:
        q = result.quantized
        tensors |= {"data": q.data, "scale": q.scale} | ({} if q.other_order is None else {"copy": q.other_order})
    return tensors


def assert_same(expected, actual):
    """Equal raw bytes, except that a NaN may carry either sign and any payload."""
    assert list(expected) == list(actual)
    for name, want in expected.items():
        got = actual[name]
        assert (want.shape, want.dtype, _layout(want)) == (got.shape, got.dtype, _layout(got)), name
    assert (mismatch := difference(list(expected.values()), list(actual.values()), list(expected))) is None, mismatch


def _layout(x):
    """Strides that matter."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def assert_quantizes(y, result, spec, order):
    """The FP8 output equals `quantize` of y."""
    from octavo.kernels import quantize

    if spec is None or str(spec.granularity) == "tensor":
        assert result.quantized is None
        if spec is not None:
            assert_same({"amax": y.float().abs().amax().reshape(1, 1)}, {"amax": result.amax})
        return
    expected = quantize(y, spec, order=order)
    got = result.quantized
    assert_same({"data": expected.data, "scale": expected.scale}, {"data": got.data, "scale": got.scale})
    assert (got.other_order is None) == (order != "both")
    if order == "both":
        assert_same({"copy": expected.other_order}, {"copy": got.other_order})

"""Inputs and comparisons that the tests of the fused producers share."""

import torch
from hypothesis import strategies as st

from octavo.kernels import quantize
from octavo.kernels.conformance.mismatches import difference
from octavo.numerics import QuantSpec
from octavo.tensor import ScaledTensor
from tensors import randn

SPECS = [
    QuantSpec.parse(text)
    for text in ("e4m3/row", "e5m2/row", "e4m3/row/pow2", "e4m3/1x128", "e4m3/1x32/e8m0", "e5m2/1x64")
]


sizes = st.one_of(st.sampled_from([0, 1, 16, 31, 127, 128, 129]), st.integers(0, 140))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def spread(*shape, seed=0, dtype=torch.float32):
    return (randn(*shape, seed=seed) * torch.exp(randn(*shape, seed=seed + 100))).to(dtype)


def outputs_of(result):
    if isinstance(result, torch.Tensor):
        return {"h": result}
    if isinstance(result, ScaledTensor):
        copies = {} if result.other_order is None else {"copy": result.other_order}
        return {"data": result.data, "scale": result.scale} | copies
    parts = {name: value for name, value in vars(result).items() if value is not None}
    quantized = outputs_of(parts.pop("quantized")) if "quantized" in parts else {}
    return parts | quantized


def assert_same(expected, actual):
    """Equal raw bytes, except that a NaN may carry either sign and any payload."""
    assert list(expected) == list(actual)
    for name, want in expected.items():
        got = actual[name]
        assert (want.shape, want.dtype, _layout(want)) == (got.shape, got.dtype, _layout(got)), name
    assert (mismatch := difference(list(expected.values()), list(actual.values()), list(expected))) is None, mismatch


def _layout(x):
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def both_backends(op, call):
    with op.force("reference"):
        expected = call()
    with op.force("triton"):
        return expected, call()


def assert_quantizes(y, got, spec, order):
    assert_same(outputs_of(quantize(y, spec, order=order)), outputs_of(got))
    assert (got.other_order is None) == (order != "both")

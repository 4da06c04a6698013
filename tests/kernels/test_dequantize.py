import pytest
import torch
from fused_inputs import assert_same, dtypes, randn, sizes, spread
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import dequantize, quantize
from octavo.kernels.dequantize import DEQUANTIZE
from octavo.kernels.dequantize import reference as dequantize_reference
from octavo.numerics import QuantSpec
from octavo.tensor import ScaledTensor
from tensors import needs_triton

SPECS = [QuantSpec.parse(text) for text in ("e4m3/1x32/e8m0", "e4m3/row", "e5m2/1x64", "e4m3/1x128/pow2")]
specs = st.sampled_from(SPECS)


@settings(max_examples=60)
@given(rows=sizes, columns=sizes, spec=specs, dtype=dtypes)
def test_is_data_times_scale(rows, columns, spec, dtype):
    x = quantize(spread(rows, columns), spec)
    y = dequantize(x, dtype)
    assert y.is_contiguous() and y.dtype == dtype
    assert_same({"y": x.dequantize(dtype).contiguous()}, {"y": y})


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_configuration_and_memory_order_equals_reference(spec):
    from octavo.kernels.dequantize import triton as backend

    rows = quantize(randn(33, 300), spec)
    columns = quantize(randn(33, 300), spec, order="columns")
    for x in (rows, columns):
        call = (x.data, x.scale, spec, torch.bfloat16)
        for config in range(len(backend.CONFIGS)):
            expected, actual = dequantize_reference.dequantize(*call), backend.dequantize(*call, config)
            assert_same({"y": expected}, {"y": actual})


@needs_triton
def test_every_code_is_the_value_that_pytorch_gives_it():
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        spec = SPECS[0] if dtype == torch.float8_e4m3fn else QuantSpec.parse("e5m2/1x32/e8m0")
        codes = torch.where(codes.view(dtype).float().isinf(), 0, codes)  # no cast makes one
        scale = torch.full((8, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        with DEQUANTIZE.force("triton"):
            y = dequantize(ScaledTensor(codes.view(dtype), scale, spec), torch.float32)
        assert_same({"y": codes.view(dtype).float()}, {"y": y})


def test_wrong_operands_are_named():
    x = quantize(randn(4, 64), SPECS[0])
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16; got torch.float64"):
        dequantize(x, torch.float64)
    with pytest.raises(ValueError, match=r"scales of \[4, 64\] by e4m3/1x32/e8m0 must be \[4, 2\]; got None"):
        dequantize(x.unscaled, torch.float32)
    with pytest.raises(ValueError, match=r"got \[4, 1\]"):
        dequantize(ScaledTensor(x.data, x.scale[:, :1], x.spec), torch.float32)


@needs_triton
def test_a_grid_that_cuda_cannot_launch_raises():
    from octavo.kernels.dequantize.triton import launch as launch_of

    step = launch_of(QuantSpec.parse("e4m3/row"))
    with pytest.raises(ValueError, match=r"dequantize_kernel cannot be launched on a grid of \(1, 70000\)"):
        step.run((1, 70000), {})

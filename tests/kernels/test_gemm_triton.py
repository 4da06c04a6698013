"""The Triton product, in Triton's interpreter where there is no GPU, against the reference."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.gemm import SCALED_MM
from octavo.numerics import QuantSpec, sqnr
from octavo.tensor import ScaledTensor

if not find_spec("triton"):
    pytest.skip("Triton is not installed", allow_module_level=True)

from benchmarks.variants import products
from test_gemm import SCALES, assert_exact_in_range, operands, wide

from octavo.kernels.gemm import triton as kernels

CASES = sorted({case for label, case in SCALED_MM.cases.items() if not label.startswith("mxfp8")})
MIXED = [
    ("e4m3/tensor", "e4m3/row", "nt"), ("unit", "unit", "nn"), ("e5m2/column", "e4m3/tensor", "tn"),
    ("e4m3/128x128", "e4m3/1x128", "nt"),
]  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
sizes = st.one_of(st.sampled_from([0, 1, 2, 16, 17, 64, 65, 127, 128, 129, 257]), st.integers(0, 140))


def moved(operand):
    scale = None if operand.scale is None else operand.scale.to(DEVICE)
    return ScaledTensor(operand.data.to(DEVICE), scale, operand.spec)


def whole(m, n, k, case, seed=0):
    """Operands whose values and scales are small integers and powers of two: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    a_text, b_text, layout = case
    made = []
    for text, shape, transposed in ((a_text, (m, k), layout[0] == "t"), (b_text, (k, n), layout[1] == "t")):
        spec = QuantSpec.parse("e4m3/tensor" if text == "unit" else text)
        shape = shape[::-1] if transposed else shape
        data = torch.randint(-8, 9, shape, generator=generator).float().to(spec.format.dtype)
        scale = torch.randint(-2, 3, spec.granularity.scale_shape(shape), generator=generator).float().exp2()
        made.append(ScaledTensor(data.to(DEVICE), None if text == "unit" else scale.to(DEVICE), spec))
    return *made, layout


def product(a, b, layout, dtype, bias=None, fast=False, config=None):
    expected = SCALED_MM.backends["reference"].run(a, b, layout, dtype, bias, fast)
    actual = kernels.scaled_mm(a, b, layout, dtype, bias, fast, config)
    assert actual.shape == expected.shape and actual.dtype == dtype and actual.is_contiguous()
    return expected, actual


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES + MIXED, ids=str)
@settings(max_examples=3)
@given(
    m=sizes, n=sizes, k=sizes, biased=st.booleans(), fast=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_exact_sums_give_the_bytes_of_the_reference(case, m, n, k, biased, fast, dtype):
    a, b, layout = whole(m, n, k, case, seed=m + n + k)
    bias = torch.arange(n, dtype=torch.float32, device=DEVICE) / 4 if biased else None
    expected, actual = product(a, b, layout, dtype, bias, fast)
    assert torch.equal(expected, actual)


@pytest.mark.thorough
@pytest.mark.parametrize("config", range(len(kernels.CONFIGS)))
def test_every_configuration_computes_the_same(config):
    dtype = (torch.bfloat16, torch.float32, torch.float16)[config % 3]
    for case in (("e4m3/row", "e4m3/row", "nt"), ("e4m3/128x1", "e4m3/128x1", "tn")):
        a, b, layout = whole(140, 260, 140, case)
        fast = layout == "nt"
        expected, actual = product(a, b, layout, dtype, torch.ones(260, dtype=dtype, device=DEVICE), fast, config)
        assert torch.equal(expected, actual)


@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # NumPy's, under the interpreter
@pytest.mark.parametrize("seed", range(2))
def test_scales_of_any_size_meet_as_in_the_reference(seed):
    a, b, layout = wide(("e4m3/row", "e4m3/row", "nt"), seed)
    expected, actual = product(moved(a), moved(b), layout, torch.float32)
    assert_exact_in_range(actual.cpu(), a, b, layout)
    finite = expected.isfinite()
    assert torch.equal(finite, actual.isfinite()) and sqnr(expected[finite], actual[finite]) > 120
    for kinds in (("row", "row"), ("tensor", "row"), ("tensor", "tensor")):
        case = *(f"e4m3/{kind}" for kind in kinds), "nt"
        for left in SCALES:
            a, b, layout = whole(9, 9, 40, case, seed)
            right = torch.tensor(SCALES, device=DEVICE).view(-1, 1)[: b.scale.shape[0]]
            a, b = replace(a, scale=a.scale * left), replace(b, scale=b.scale * right)
            expected, actual = product(a, b, layout, torch.float32)
            assert torch.equal(expected, actual), (case, left)


@pytest.mark.parametrize(
    ("layout", "where"),
    [("nt", "row-major"), ("nn", "column-major"), ("tn", "both"), ("nn", "strided"), ("nt", "unaligned")],
)
def test_any_memory_layout(layout, where):
    a, b, _ = whole(40, 48, 64, ("e4m3/tensor", "e4m3/tensor", layout))

    def laid(operand):
        data, other = operand.data, operand.data.t().contiguous().t()
        rows, columns = data.shape
        strided = torch.zeros((2 * rows, 3 * columns), dtype=torch.uint8, device=DEVICE).view(data.dtype)[::2, ::3]
        shifted = torch.zeros(rows * columns + 1, dtype=torch.uint8, device=DEVICE).view(data.dtype)[1:]
        places = {
            "row-major": data, "column-major": other, "both": data, "strided": strided.copy_(data),
            "unaligned": shifted.view(rows, columns).copy_(data),
        }  # fmt: skip
        return ScaledTensor(places[where], operand.scale, operand.spec, other if where == "both" else None)

    expected, actual = product(laid(a), laid(b), layout, torch.float32)
    assert torch.equal(expected, actual)


def test_loads_without_tma_compute_the_same(monkeypatch):
    pointers = kernels.target_of(89, 3)
    monkeypatch.setattr(kernels, "target_for", lambda device: pointers)
    for case in (("e4m3/row", "e4m3/row", "nt"), ("e4m3/1x128", "e4m3/128x128", "nn"), ("unit", "e4m3/tensor", "tn")):
        for shape in ((65, 130, 129), (1, 1, 1), (300, 2, 50)):
            a, b, layout = whole(*shape, case)
            expected, actual = product(a, b, layout, torch.float32)
            assert torch.equal(expected, actual)


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter reads the NaN code of E4M3 as 480")
def test_nan_reaches_its_row_only():
    a, b, layout = whole(8, 8, 40, ("e4m3/row", "e4m3/row", "nt"))
    a.data.view(torch.uint8)[2, 3] = 0x7F
    _, y = product(a, b, layout, torch.bfloat16)
    assert y[2].isnan().all() and not y[[0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_unsupported_cases_have_a_reason():
    groups = ("e4m3/1x32/e8m0", "e4m3/1x32/e8m0", "nt")
    assert "does not support scales of e4m3/1x32/e8m0" in kernels.unsupported_reason(groups)
    assert "does not support scales" in kernels.unsupported_reason(("e4m3/row", "e4m3/row", "nn"))
    assert "E5M2" in kernels.unsupported_reason(("e5m2/tensor", "e5m2/tensor", "nt"))
    assert kernels.unsupported_reason(("e4m3/1x128", "e4m3/128x128", "nt")) is None
    a, b, layout = operands(8, 8, 32, groups)
    with pytest.raises(NotImplementedError, match="does not support scales of e4m3/1x32/e8m0"):
        kernels.scaled_mm(a, b, layout, torch.float32, None, False)


def test_tiles_are_each_computed_once(monkeypatch):
    """More programs than tiles, fewer, and a last group of fewer rows than GROUP."""
    for multiprocessors in (1, 2, 7, 200):
        target = kernels.target_of(90, multiprocessors)
        monkeypatch.setattr(kernels, "target_for", lambda device, target=target: target)
        a, b, layout = whole(64 * 9, 64 * 2, 16, ("unit", "unit", "nt"))
        expected, actual = product(a, b, layout, torch.float32, None, True, 5)
        assert torch.equal(expected, actual)


def test_variants_are_what_is_launched():
    cases = {variant.case for variant in products()}
    assert len(cases) == 8 and {variant.config for variant in products()} == set(range(len(kernels.CONFIGS)))
    for capability in (89, 90, 100, 120):
        for variant in products(capability):
            names = set(variant.launch.kernel.arg_names)
            assert {*variant.types, *variant.equal_to_1, *variant.launch.constants} <= names
            overlaps = variant.launch.kernel.fn.__name__ == "promoted_kernel"
            assert overlaps == (capability == 90 and variant.case.endswith("promoted"))
            tma = overlaps or variant.launch.constants["TMA"]
            assert tma == variant.types["a"].startswith("tensordesc") and overlaps == ("NVMMA" in variant.types["a"])


def test_sums_are_promoted_while_products_are_under_way_on_hopper(monkeypatch):
    hopper = kernels.target_of(90, 132)
    assert kernels.overlaps(hopper, False) and not kernels.overlaps(hopper, True)
    assert not any(kernels.overlaps(kernels.target_of(other, 132), False) for other in (89, 100, 120))
    plain = SCALED_MM.backends["triton_plain"]
    cuda, backward = torch.device("cuda", 0), ("e4m3/row", "unit", "nn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert plain.unsupported_reason(cuda, backward) is None
    assert "the backend triton runs the same" in plain.unsupported_reason(cuda, ("e4m3/row", "e4m3/row", "nt"))


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_probes_have_more_tiles_than_programs(monkeypatch, capability):
    """In every configuration that products of many tiles pick, and in each that a calibration may pick."""
    target = kernels.target_of(capability, 132)
    monkeypatch.setattr(kernels, "target_for", lambda device: target)
    device = torch.device("cpu")
    for case in CASES:
        candidates = kernels.training_configurations(device, case)
        picked = dict(kernels.trials(device, case))
        for m, n in ((4096, 4096), (16384, 6144), (8192, 28672), (1536, 16384)):
            assert kernels.estimated_fastest(candidates, m, n, target) in picked
        assert picked.keys() <= set(candidates)
        for config in candidates:
            ((index, (m, n)),) = kernels.trials(device, case, config)
            programs, tiles = kernels.CONFIGS[config].programs(target), kernels.CONFIGS[config].tiles(m, n)
            assert index == config and programs >= 132 and tiles > 2 * programs


def test_the_probe_finds_a_fault_in_later_tiles_only():
    case = ("e4m3/row", "unit", "nn")
    backend = SCALED_MM.backends["triton"]

    def wrong_after_the_first_tile(a, b, layout, dtype, bias, fast, config=None):
        out = kernels.scaled_mm(a, b, layout, dtype, bias, fast, config)
        if kernels.CONFIGS[config or 0].tiles(*out.shape) > kernels.target_for(out.device).multiprocessors:
            out[-1] = 0
        return out

    faulty = replace(backend, run=wrong_after_the_first_tile)
    assert "many tiles in configuration" in SCALED_MM.run_probe(faulty, torch.device(DEVICE), case)
    assert SCALED_MM.run_probe(replace(backend, trials=lambda *_: ()), torch.device(DEVICE), case) is None
    configured = backend.configured(5)
    ((index, shape),) = configured.trials(torch.device(DEVICE), case, configured.config)
    assert index == 5 and shape == (4 * 64 - 7, 4 * 64 - 9)  # 16 tiles for the interpreter's 6 programs
    assert SCALED_MM.run_probe(backend.configured(5), torch.device(DEVICE), case) is None

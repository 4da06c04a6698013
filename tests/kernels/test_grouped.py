"""Grouped products: every backend computes what the reference does."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from octavo.kernels.grouped import GROUPED_MM, random_operands, reference, torch_scaled
from octavo.numerics import sqnr
from octavo.tensor import ScaledTensor

ROOT = Path(__file__).parents[2]
CASES = sorted(set(GROUPED_MM.cases.values()))
COUNTS = [5, 0, 1, 150, 16]
PYTORCH = [case for case in CASES if case[2] != "tn" and not case[3]]


def moved(operand, device):
    scale = None if operand.scale is None else operand.scale.to(device)
    return ScaledTensor(operand.data.to(device), scale, operand.spec)


@pytest.mark.parametrize(("n", "k"), [(70, 167), (272, 384)])
@pytest.mark.parametrize("case", PYTORCH, ids=" ".join)
def test_pytorch_takes_the_operands_that_it_is_given(case, n, k):
    """Its checks of dtypes, strides and scales run on meta tensors too."""
    a, b, offsets, bias = random_operands(case, COUNTS, n, k, torch.device("cpu"))
    columns_first = b.data.t().contiguous().t()
    for data in (b.data, columns_first) if case[2] == "nn" else (b.data,):
        operands = moved(a, "meta"), moved(ScaledTensor(data, b.scale, b.spec), "meta"), offsets.to("meta")
        y = torch_scaled.grouped_mm(*operands, case[2], torch.bfloat16, bias, True)
        assert y.shape == (sum(COUNTS) + 3, n if case[2] == "nt" else k) and y.dtype == torch.bfloat16


def test_pytorch_says_what_it_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    reasons = {case[2] + case[3]: torch_scaled.unsupported_reason(device, case) for case in CASES}
    assert reasons["nt"] is None and reasons["nn"] is None
    assert "multiples of 16" in reasons["tn"] and "no bias" in reasons["ntbias"]


needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (macOS, Windows)")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@needs_triton
@pytest.mark.parametrize("tma", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["tma", "pointers"])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_triton_computes_every_expert_as_the_reference_and_reads_no_other_rows(case, tma, monkeypatch):
    """Also if the rows of other experts, and of none, and their weights are NaN."""
    from octavo.kernels.grouped import triton

    if DEVICE == "cpu":
        monkeypatch.setattr(triton, "target_for", lambda device: triton.target_of(90 if tma else 89, 3))
    layout = case[2]
    a, b, offsets, bias = random_operands(case, COUNTS, 70, 135, torch.device(DEVICE))
    arguments = offsets, layout, torch.float32, bias, layout == "nt"
    expected = reference.grouped_mm(a, b, *arguments)
    assert sqnr(expected, triton.grouped_mm(a, b, *arguments)) > 120
    poisoned = [operand.data.clone() for operand in (a, b)]
    start, end = (offsets[2].item(), offsets[3].item())  # of the fourth expert
    for data, by_weight in zip(poisoned, (False, layout != "tn"), strict=True):
        keep = slice(3 * 70, 4 * 70) if by_weight else slice(start, end)
        own = data[keep].clone()
        data.fill_(torch.nan)
        data[keep] = own
    a, b = (ScaledTensor(data, t.scale, t.spec) for data, t in zip(poisoned, (a, b), strict=True))
    actual = triton.grouped_mm(a, b, *arguments)
    rows = slice(3, 4) if layout == "tn" else slice(start, end)
    assert sqnr(expected[rows], actual[rows]) > 120
    assert layout == "tn" or not actual[sum(COUNTS) :].any()


@needs_triton
@pytest.mark.thorough
def test_every_configuration_computes_the_same():
    from octavo.kernels.gemm.triton import CONFIGS
    from octavo.kernels.grouped import triton

    for case in (CASES[0], CASES[2]):
        a, b, offsets, bias = random_operands(case, COUNTS, 136, 80, torch.device(DEVICE))
        arguments = offsets, case[2], torch.bfloat16, bias, case[2] == "nt"
        expected = reference.grouped_mm(a, b, *arguments)
        for config in range(len(CONFIGS)):
            assert sqnr(expected, triton.grouped_mm(a, b, *arguments, config=config)) > 60


@pytest.mark.slow
@needs_triton
@pytest.mark.thorough
def test_it_compiles_for_hopper_without_spills_with_tma_and_wide_stores():
    code = (
        "from benchmarks.sass import describe\nfrom octavo.kernels.grouped import triton\n"
        "for v in {v.case: v for v in triton.variants(90)}.values():\n"
        "    row = describe(v, 90)\n"
        "    print(row.get('error', ''), row['stack'], *sorted(row['accesses']), *row['matrix'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done.stderr
    for line in lines:
        assert line.startswith(" 0 ") and "UTMALDG" in line and "STG.16" in line and "QGMMA" in line, line

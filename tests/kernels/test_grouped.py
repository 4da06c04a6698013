"""Grouped products: every backend computes what the reference does."""

import pytest
import torch

from octavo.kernels.grouped import GROUPED_MM, random_operands, torch_scaled
from octavo.tensor import ScaledTensor

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

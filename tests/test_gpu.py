"""What only a GPU with FP8 matrix units can show: that its backends run, and compute what the reference computes."""

import pytest
import torch
from torch import nn

import octavo
from octavo.kernels.registry import status
from octavo.numerics import RECIPES, sqnr

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_every_spec_is_quantized_by_triton():
    chosen = {row.op: row.backend for row in status("cuda") if row.chosen and row.op.startswith("quantize")}
    assert set(chosen.values()) == {"triton"}, [row for row in status("cuda") if row.backend == "triton"]


@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "rowwise_hp_wgrad"])
def test_products_run_on_matrix_units(name):
    chosen = {row.op: row.backend for row in status("cuda") if row.chosen and row.op.startswith(f"scaled_mm {name} ")}
    assert set(chosen.values()) == {"torch_scaled"}


@pytest.mark.filterwarnings("ignore:octavo. scaled_mm:RuntimeWarning")  # blockwise and mxfp8 are emulated, and say so
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(512, 256, 384), (37, 19, 2), (0, 64, 64), (1, 768, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_agrees_with_the_cpu(name, shape, bias):
    m, k, n = shape
    torch.manual_seed(0)
    layer = octavo.convert(nn.Linear(k, n, bias=bias, dtype=torch.bfloat16), name, verbose=False)
    x, g = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(m, n, dtype=torch.bfloat16)
    results = {}
    for device in ("cpu", "cuda"):
        layer.to(device)
        layer.zero_grad()
        own = x.to(device).detach().requires_grad_()
        y = layer(own)
        y.backward(g.to(device))
        results[device] = [t.detach().cpu() for t in (y, own.grad, layer.weight.grad)]
    for cpu, gpu in zip(results["cpu"], results["cuda"], strict=True):
        assert torch.equal(cpu, gpu) or sqnr(cpu, gpu) > 40

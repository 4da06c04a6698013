"""`python -m benchmarks step` without a GPU: to which part a kernel belongs, sums, and the prediction beside them."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from benchmarks import arms, run, session, step
from benchmarks.profiling import Kernel
from benchmarks.timing import CpuClock

from octavo.train import run_plan

BACKWARD, STEP = "autograd::engine::evaluate_function: ", "Optimizer.step#AdamW.step"
# By part: kernel, enclosing operations, phases.
KERNELS = {
    "products": [
        ("nvjet_hsh_128x256", "aten::linear aten::mm", ""), ("promoted_kernel", "_PlannedLinear", ""),
        ("Memset", "_PlannedLinear aten::_scaled_mm", ""), ("aten::add_", "_LinearFunction octavo::scaled_mm", ""),
    ],
    "quantizers": [
        ("rows_kernel", "", ""), ("Memset", "_PlannedLinearBackward", ""),
        ("aten::mul_", "_LinearFunction octavo::quantize aten::mul_", ""),
    ],
    "attention": [("flash_fwd_kernel", "", ""), ("copy", "ScaledDotProductFlashAttentionBackward0", "")],
    "head": [
        ("nvjet_hsh_128x256", "_ChunkedFunction aten::mm", ""), ("elementwise", "_ChunkedFunctionBackward", ""),
    ],
    "rest": [("norm_rows_kernel", "_NormFunction", ""), ("elementwise", "aten::silu", "")],
    "accumulation": [("elementwise", "aten::to", "accumulation")],
    "clipping": [
        ("multi_tensor_apply_kernel", "aten::_foreach_norm", "clipping"),
        ("multi_tensor_apply_kernel", "aten::_foreach_mul_", "update"),
    ],
    "optimizer": [
        ("multi_tensor_apply_kernel", "aten::_foreach_mul_", f"update {STEP}"), ("adamw_kernel", "", f"update {STEP}"),
        ("elementwise", "aten::copy_", "update"),
    ],
}  # fmt: skip


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """A session whose device is a GPU by name only."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    return session.Session("step", torch.device("cuda", 0), CpuClock(), argparse.Namespace(arguments=[], quick=False))


@pytest.mark.parametrize("name", step.PARTS)
def test_a_kernel_belongs_to_a_part(name):
    for kernel, stack, phases in KERNELS[name]:
        operations = [BACKWARD + each if each.endswith(("Backward", "Backward0")) else each for each in stack.split()]
        assert step.part(Kernel(kernel, 0.0, 1.0, tuple(operations), tuple(phases.split()))) == name, kernel


def test_parts_add_up_beside_the_prediction(on_gpu, monkeypatch):
    kernels = [Kernel("nvjet", 1000.0 * i, 500.0, ("aten::mm",), ()) for i in range(8)]
    kernels += [Kernel("rows_kernel", 8500.0, 250.0, (), ()), Kernel("rows_kernel", 8750.0, 250.0, (), ())]
    figures = step.take_apart(on_gpu, kernels, 6.0)
    assert figures["parts"]["products"] == {"ms": 4.0, "count": 8} and figures["kernels"] == 10
    assert figures["parts"]["quantizers"] == {"ms": 0.5, "count": 2}
    assert figures["kernel_ms"] == 4.5 and figures["parts"]["idle"]["ms"] == 1.5
    assert figures["profile"][0] == {"name": "nvjet", "count": 8, "us": 4000.0}

    times = dict.fromkeys(("linears", "products", "attention", "rest", "optimizer"), 0.001) | {"waiting": 0.0}
    planned = SimpleNamespace(time=SimpleNamespace(**times, seconds=0.0045))
    monkeypatch.setattr(run_plan, "plan_configured", lambda config, gpu: planned)
    predicted = step.predict(on_gpu, None, figures["parts"])
    assert predicted["predicted_wall_ms"] == 4.5
    assert predicted["predicted"]["linears"] == {"predicted_ms": 2.0, "ms": 4.5, "of_prediction": 2.25}
    assert predicted["predicted"]["idle"] == {"predicted_ms": 0.0, "ms": 1.5, "of_prediction": None}
    monkeypatch.setattr(run_plan, "plan_configured", lambda config, gpu: {}[gpu])  # the measurement outlives it
    assert step.predict(on_gpu, None, {})["not_predicted"] == "KeyError: 'NVIDIA H100 80GB HBM3'"


@pytest.mark.thorough
def test_rows_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "WARMUP", 1)
    monkeypatch.setattr(step, "STEPS", 1)
    options = argparse.Namespace(arguments=[], quick=False, compile="none")
    on_cpu = session.Session("step", torch.device("cpu"), CpuClock(), options)
    base = step.trainer(on_cpu, run.TINY, "bf16")
    monkeypatch.setattr(step, "predict", lambda session, config, parts: {"predicted": len(parts)})
    row = step.measure(on_cpu, run.TINY, "fp8", lambda: base)
    parts = row["parts"]
    assert row["predicted"] == len(parts) == len(step.PARTS) + 1
    taken = {name for name, part in parts.items() if part["ms"] > 0 and part["count"] > 0}
    assert taken >= {*step.PARTS} - {"accumulation"}, parts  # a step of one micro-batch adds up no gradients
    assert parts["accumulation"]["count"] == 0, parts
    assert row["wall_ms"] > 0 and row["bf16_wall_ms"] > 0 and row["wall_speedup_range"][0] <= row["wall_speedup"]
    assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["wall_ms"] * 1e3, rel=0.01)
    assert base.step == 1 + arms.ROUNDS  # of warm-up, and one in each turn

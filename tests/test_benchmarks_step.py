"""`python -m benchmarks step` without a GPU: to which part a kernel belongs, sums, and the prediction beside them."""

import pytest
from benchmarks import arms, run, step
from benchmarks.profiling import Kernel

from support.sessions import session_of

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


@pytest.mark.parametrize("name", step.PARTS)
def test_a_kernel_belongs_to_a_part(name):
    for kernel, stack, phases in KERNELS[name]:
        operations = [BACKWARD + each if each.endswith(("Backward", "Backward0")) else each for each in stack.split()]
        assert step.part(Kernel(kernel, 0.0, 1.0, tuple(operations), tuple(phases.split()))) == name, kernel


@pytest.mark.thorough
def test_rows_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "WARMUP", 1)
    monkeypatch.setattr(step, "STEPS", 1)
    on_cpu = session_of("step", tmp_path, compile="none")
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

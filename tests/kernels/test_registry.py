import pytest
import torch

from octavo.kernels.gemm import SCALED_MM, accelerated
from octavo.kernels.registry import Backend, Op, status
from octavo.numerics import RECIPES

CPU = torch.device("cpu")


def test_every_case_has_exactly_one_chosen_backend_and_every_refusal_a_reason():
    rows = status("cpu")
    for op in {row.op for row in rows}:
        assert [row.backend for row in rows if row.op == op and row.chosen] == ["reference"]
    assert all(bool(row.reason) != row.serves for row in rows)
    assert {f"scaled_mm {name} forward" for name in RECIPES} <= {row.op for row in rows}


def test_cpu_is_reported_as_emulation():
    assert not any(accelerated(recipe, CPU) for recipe in RECIPES.values())


def make_op(run):
    def probe(backend, device, case):
        return None if backend.run() == 42 else "wrong number"

    op = Op(name="answer", cases={"": ()}, probe=probe)
    op.add(Backend(name="reference", run=lambda: 42))
    op.add(Backend(name="triton", run=run))
    return op


def test_preference_goes_to_what_passes_its_probe():
    assert make_op(lambda: 42).choose(CPU, ()).name == "triton"
    assert make_op(lambda: 41).choose(CPU, ()).name == "reference"


def test_what_a_kernel_raises_is_the_reason():
    def broken():
        raise RuntimeError("no kernel image is available\nfor this device")

    op = make_op(broken)
    assert op.choose(CPU, ()).name == "reference"
    assert op.why_not(op.backends["triton"], CPU, ()) == "RuntimeError: no kernel image is available"


def test_probe_runs_once():
    calls = []
    op = make_op(lambda: calls.append(1) or 42)
    for _ in range(3):
        op.choose(CPU, ())
    assert len(calls) == 1


def test_force_overrides_and_restores():
    with SCALED_MM.force("torch_scaled"):
        assert SCALED_MM.choose(CPU, ("e4m3/row", "e4m3/row", "nt")).name == "torch_scaled"
    assert SCALED_MM.choose(CPU, ("e4m3/row", "e4m3/row", "nt")).name == "reference"
    with pytest.raises(ValueError, match="no backend 'torch_scale'.*did you mean 'torch_scaled'"):
        with SCALED_MM.force("torch_scale"):
            pass

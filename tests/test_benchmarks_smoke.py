"""`smoke` and `host_gpu` without a GPU: profiles from traces, arms in turns, wrong numbers, host time."""

import json

import pytest
import torch
from benchmarks import arms, host_gpu, profiling, smoke
from benchmarks.timing import Timing

from support.sessions import CPU, session_of

SHAPE = (48, 64, 32)


class Drifting:
    """A clock on which each measurement takes one millisecond longer than the last."""

    timed, l2_bytes = True, 0.0

    def __init__(self):
        self.ms = 0.0

    def measure(self, runs, *, wall=True):
        for call in runs:
            call()
        self.ms += 1.0
        return Timing(self.ms, 5 * self.ms, 0.01, "graph")

    def peak_mib(self, run):
        return 3.0


@pytest.fixture
def drifting(tmp_path):
    return session_of("smoke", tmp_path, Drifting())


@pytest.mark.thorough
def test_a_profile_on_a_cpu_has_operations_with_their_own_time():
    x = torch.randn(8, 8, requires_grad=True)

    def run():
        with torch.profiler.record_function("whole"):
            (x @ x).sum().backward()

    run()
    kernels = profiling.record(run, CPU)
    products = [kernel for kernel in kernels if kernel.name == "aten::mm"]
    assert len(products) == 3 and all(kernel.phases == ("whole",) and kernel.us > 0 for kernel in products)
    assert sum(kernel.stack[0].startswith("autograd::engine") for kernel in products) == 2
    assert {kernel.stack[-1] for kernel in products} == {"aten::mm"}


def test_arms_are_timed_in_turns(drifting):
    calls = []
    figures = arms.in_turns(drifting, [lambda: calls.append("bf16")], [lambda: calls.append("arm")])
    assert calls == ["bf16", "arm"] * 3
    assert figures == {
        "method": "graph", "rounds": 3, "kernel_ms": 4.0, "wall_ms": 20.0, "bf16_kernel_ms": 3.0, "bf16_wall_ms": 15.0,
        "speedup": 0.75, "wall_speedup": 0.75, "speedup_range": [0.5, 0.8333], "wall_speedup_range": [0.5, 0.8333],
        "spread": 1.0, "bf16_spread": 1.33333,
    }  # fmt: skip


@pytest.mark.thorough
def test_rows_of_smoke(drifting):
    row = smoke.measure(drifting, SHAPE, "rowwise")
    assert all(28 < row[f"sqnr_{name}"] < 31 for name in smoke.OUTPUTS), row
    assert (row["kernel_ms"], row["bf16_kernel_ms"], row["speedup"]) == (4.0, 3.0, 0.75)
    assert row["profile"][0]["us"] >= row["profile"][1]["us"] > 0 and row["profile"][0]["count"] > 0
    same = smoke.measure(drifting, SHAPE, "bf16")
    assert [same[f"sqnr_{name}"] for name in smoke.OUTPUTS] == [999.0] * 3


@pytest.mark.thorough
def test_smoke_is_rehearsed(tmp_path):
    smoke.main(["--rehearse", "--quick", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "smoke.json").read_text())
    assert [row["arm"] for row in content["rows"]] == ["octavo rowwise", "octavo tensorwise", "bf16"]
    assert not any("error" in row for row in content["rows"]) and not content["timed"]
    assert all(row["profile"] and row["kernel_ms"] is None and row["m"] == SHAPE[0] for row in content["rows"])


# Host time


@pytest.mark.thorough
def test_rows_of_host_time(drifting, monkeypatch):
    monkeypatch.setattr(host_gpu, "CALLS", 1)
    row = host_gpu.measure(drifting, "linear", 32, 64, arms.Arm("octavo rowwise"))
    assert (row["kernel_ms"], row["wall_ms"], row["waiting"], row["bf16_wall_ms"]) == (4.0, 20.0, 0.8, 15.0)
    assert row["host_ratio"] == pytest.approx(row["host_ms"] / row["bf16_host_ms"], abs=1e-3) and row["host_ratio"] > 1
    assert row["predicted_host_ratio"] == host_gpu.RATIOS["rowwise"]
    assert "predicted_host_ratio" not in host_gpu.measure(drifting, "linear", 32, 64, arms.Arm("bf16"))

"""The benchmark suite without a GPU: its arithmetic with clocks that lie, its recovery, rehearsals of its stages."""

import argparse
import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import __main__, gpu, linear, roofline, session, shapes
from benchmarks.timing import Timing

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
CEILINGS = {"copy_tbs": 4.0, "bf16_tflops": 800.0, "fp8_tflops": 1400.0, "fp8_exact_tflops": 1300.0}
NO_PEERS = ["--peers", "nowhere"]


class Lying:
    """Says that each next call takes one millisecond longer than the last, and runs it."""

    timed, l2_bytes = True, 0.0

    def __init__(self):
        self.ms = 0.0

    def measure(self, runs, *, wall=True):
        for run in runs:
            run()
        self.ms += 1.0
        return Timing(self.ms, 2 * self.ms if wall else None, 0.01, "graph")

    def peak_mib(self, run):
        return 3.0


@pytest.fixture
def lying(tmp_path):
    options = argparse.Namespace(arguments=[], quick=False)
    facts = {"ceilings": CEILINGS, "gpu": "NVIDIA H200"}
    return session.Session("linear", CPU, Lying(), options, facts=facts, paths=[tmp_path / "linear.json"])


# Shapes, roofline, clocks


def test_shapes_are_sets_or_sizes():
    assert shapes.parse(["targets", "16384,4096,14336", "1,2,3"]) == [*shapes.TARGETS, (1, 2, 3)]
    for wrong in ("cube", "1,2", "1,2,x"):
        with pytest.raises(ValueError, match="neither a named set"):
            shapes.parse([wrong])


def test_roofline_follows_its_formulas():
    device, (m, k, n) = roofline.DEVICES["H200"], (16384, 4096, 14336)
    shape = (m, k, n)
    assert roofline.product(device, 8192, 8192, 8192, fp8=False) == pytest.approx(2 * 8192**3 / (989e12 * 0.8))
    moved = 16384 * 64 + 64 * 4096 + 2 * 16384 * 4096
    assert roofline.product(device, 16384, 64, 4096, fp8=True) == pytest.approx(moved / (4.8e12 * 0.9))
    assert roofline.product(device, 16, 16, 16, fp8=True) == device.launch_us * 1e-6
    one, exact, by_row = (
        roofline.product(device, *shape, fp8=True),
        device.exact_efficiency,
        device.row_exact_efficiency,
    )
    assert roofline.free_quantization(device, shape) == pytest.approx(one * (1 + 2 / exact))
    passes = (4 * m * k + 6 * n * k + 6 * m * n) / (4.8e12 * 0.9)
    rowwise = one / device.row_efficiency * (1 + 2 / by_row) + passes
    assert roofline.linear(device, shape, "rowwise") == pytest.approx(rowwise)
    equal = replace(device, row_efficiency=1.0, row_exact_efficiency=exact)
    times = [roofline.linear(equal, shape, recipe) for recipe in ("amax given", "rowwise", "tensorwise")]
    assert times == sorted(times) and times[2] == roofline.linear(device, shape, "tensorwise")
    assert roofline.linear(device, (1, 64, 64), eager=True) == 3e-6 * device.host_us


# Rows


# Recovery


def test_a_failing_row_is_kept_and_the_next_runs(lying):
    lying.attempt({"arm": "broken"}, lambda: 1 / 0)
    lying.attempt({"arm": "good"}, lambda: {"kernel_ms": 1.0})
    kept = json.loads(lying.paths[0].read_text())["rows"]
    assert "ZeroDivisionError" in kept[0]["error"] and kept[1]["kernel_ms"] == 1.0
    assert lying.attempt({"arm": "good"}, lambda: pytest.fail("made twice"))["kernel_ms"] == 1.0


def test_resuming_leaves_out_what_took_the_process_down(lying):
    content = {"rows": [{"arm": "good", "kernel_ms": 1.0}], "running": {"arm": "deadly"}, "ceilings": {"copy_tbs": 9.0}}
    lying.take_up(content)
    for arm in ("good", "deadly"):
        lying.attempt({"arm": arm}, lambda: pytest.fail("run again"))
    assert "crashed or hung" in lying.rows[1]["error"] and lying.facts["ceilings"] == {"copy_tbs": 9.0}


def test_only_the_parts_asked_for_run(lying):
    lying.only = ["product", "4096"]
    identities = [
        {"stage": "product", "shape": "1"},
        {"shape": "4096"},
        {"stage": "fused", "shape": "4096"},
        {"part": "x"},
    ]
    ran = [lying.attempt(identity, dict) is not None for identity in identities]
    assert ran == [True, True, False, False]
    lying.only, lying.without = [], ["fused"]
    assert [lying.attempt(identity, dict) is not None for identity in identities] == [True, True, False, True]


def test_a_stage_that_needs_a_gpu_ends_without_one():
    with pytest.raises(SystemExit) as end:
        linear.main(["--require-gpu", *NO_PEERS])
    assert end.value.code == session.NO_GPU


# Commands


def test_every_benchmark_explains_itself(capsys):
    for name in __main__.NAMES:
        if name == "sass":
            continue
        with pytest.raises(SystemExit) as end:
            __main__.main([name, "--help"])
        assert end.value.code == 0 and f"python -m benchmarks {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no benchmark 'lnear'"):
        __main__.main(["lnear"])


@pytest.mark.slow
def test_the_gpu_runner_rehearses_every_stage(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse", "--quick", "--out", str(tmp_path)]
    command += ["--caches", str(tmp_path / "caches")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("timed nothing: no GPU") == 1
    stages = {stage["stage"]: stage for stage in json.loads((tmp_path / "gpu.json").read_text())["stages"]}
    assert set(stages) == set(gpu.STAGES) - set(gpu.ON_REQUEST)
    assert {stage["ended"] for stage in stages.values()} == {"done"}, stages
    assert all(stage["rows"] and not stage["failed"] for stage in stages.values()), stages


def test_files_and_functions_stay_short():
    for path in (ROOT / "benchmarks").rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 800, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno + 1 <= 80, (path, node.name)

"""The GPU runner and what it ends with, without a GPU: stages that crash and hang, targets, the document."""

import argparse
import json
import sys

import pytest
from benchmarks import gpu, performance, session, targets

CEILINGS = {"copy_tbs": 4.0, "bf16_tflops": 800.0, "fp8_tflops": 1400.0, "fp8_exact_tflops": 1300.0}


STAGES = {
    "good": "print('fine')",
    "crash": """
rows = json.loads(path.read_text())["rows"] if path.exists() else []
path.write_text(json.dumps({"rows": [*rows, {"n": len(rows)}], "running": {"n": 9}}))
if len(rows) < 2: print("about to die"); os.abort()
path.write_text(json.dumps({"rows": rows, "stopped": "done"}))
""",
    "hang": "path.write_text(json.dumps({'rows': [], 'running': {}})); print('asleep', flush=True); time.sleep(60)",
    "hang once": """
if path.exists(): path.write_text(json.dumps({"rows": [{"n": 1}], "stopped": "done"}))
else: path.write_text(json.dumps({"rows": [], "running": {"n": 1}})); time.sleep(60)
""",
    "broken": "import no_such_module",
}


class Scripted(gpu.Runner):
    def command(self, stage, seconds, *, resume):
        self.resumed = [*getattr(self, "resumed", []), resume]
        head = f"import json, os, time; from pathlib import Path; path = Path({str(self.out / stage)!r} + '.json')\n"
        return [sys.executable, "-c", head + STAGES[stage]]


@pytest.fixture
def runner(tmp_path):
    made = Scripted(tmp_path, argparse.Namespace(row_limit=3.0), {})
    made.poll_s = 0.05
    return made


def test_a_crashed_stage_goes_on_behind_the_row(runner):
    outcome = runner.run("crash", 100.0)
    assert (outcome.ended, outcome.restarts, outcome.rows, outcome.tail) == ("done", 2, 2, [])
    assert runner.resumed == [False, True, True]


@pytest.mark.thorough
def test_a_hung_stage_is_killed_and_says_where(runner):
    outcome = runner.run("hang", 8.0)
    assert outcome.ended == "hung" and outcome.seconds < 8 and outcome.tail[-1] == "asleep"


@pytest.mark.thorough
def test_a_stage_that_hung_once_is_started_again(runner):
    outcome = runner.run("hang once", 100.0)
    assert (outcome.ended, outcome.restarts, outcome.rows) == ("done", 1, 1)


def test_a_stage_that_cannot_start_is_not_tried_again(runner):
    (runner.out / "broken.json").write_text('{"rows": [1]}')
    outcome = runner.run("broken", 100.0)
    assert (outcome.ended, outcome.restarts, outcome.rows) == ("crashed", 0, 0)
    assert "no_such_module" in outcome.tail[-1]
    assert json.loads((runner.out / "broken.json").read_text()) == {"rows": [1]}  # the last run's result stays


def test_time_is_shared_by_weight():
    stages = ["probe", "kernels", "linear"]
    assert gpu.shares(stages, "probe", None, 480.0) == 480.0
    assert gpu.shares(stages, "probe", 400.0, 480.0) == pytest.approx(400 * 2 / 8)
    assert gpu.shares(stages, "linear", 600.0, 480.0) == 480.0


def test_each_test_becomes_a_row(runner):
    lines = ["tests/test_gpu.py::test_a PASSED [ 1%]", "[gw0] [ 20%] FAILED tests/test_gpu.py::test_b[x y]"]
    runner._keep_tests([*lines, "FAILED tests/test_gpu.py::test_b[x y] - AssertionError: no"])
    rows = json.loads((runner.out / "tests.json").read_text())["rows"]
    assert [row["result"] for row in rows] == ["PASSED", "FAILED"] and "AssertionError" in rows[1]["error"]


# Targets and the document


def results(rowwise_ms):
    same = {"shape": targets.SMALL, "m": 16384, "k": 4096, "n": 14336}
    cube = {"shape": "4096×4096×4096", "m": 4096, "k": 4096, "n": 4096}
    rows = [
        {**same, "arm": "bf16", "mode": "eager", "kernel_ms": 10.0, "wall_ms": 10.5},
        {**same, "arm": "octavo rowwise", "mode": "eager", "kernel_ms": rowwise_ms, "speedup": 10 / rowwise_ms},
        {**same, "arm": "torchao tensorwise", "mode": "compiled", "kernel_ms": 7.0},
        {**same, "arm": "torchao rowwise", "mode": "compiled", "error": "Traceback\nValueError: a | b"},
        {**cube, "arm": "octavo rowwise", "mode": "eager", "kernel_ms": 1.0, "speedup": 1.2},
    ]
    quantize = [{"stage": "quantize", "shape": "1×1", "case": "e4m3/row", "arm": "both", "kernel_ms": 1, "percent": 80}]
    head = {"timed": True, "ceilings": CEILINGS, "command": "python -m benchmarks linear"}
    head["environment"] = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-12-01", "driver": "580"}
    return {"linear": {**head, "rows": rows}, "kernels": {**head, "rows": quantize}}


def test_targets_are_met_or_missed():
    for ms, verdict in ((10 / 1.45, "met"), (6.95, "missed")):
        reached = {row[0]: row[2:] for row in targets.table(results(ms))}
        assert reached[f"linear {targets.SMALL}, eager, rowwise over bf16"] == (f"{10 / ms:.3f} ×", verdict)
    assert reached["linear, eager, rowwise over torchao tensorwise compiled"] == ("1.007 ×", "missed")
    assert reached["quantizers, slowest of all, share of copy bandwidth"] == ("80.0 %", "missed")
    assert reached["linear, eager, rowwise over torchao rowwise compiled"] == ("–", "not measured")
    untimed = {"linear": {**results(5.0)["linear"], "timed": False}}
    assert {row[3] for row in targets.table(untimed)} == {"not measured"}


def test_the_document_of_a_gpu(tmp_path):
    for name, content in results(12.5).items():
        session.write_json(tmp_path / "nvidia-h200" / f"{name}.json", content)
    text = performance.document(tmp_path)
    assert "not yet run" not in text and "## NVIDIA H200" in text and "copy 4.0 TB/s" in text
    assert f"| {targets.SMALL} | octavo rowwise, eager | 0.80 |" in text  # where it loses
    assert "ValueError: a \\| b" in text
    assert "begins to pay, eager, at M = K = N = 4096" in text
    pictures = performance.pictures(tmp_path)
    assert set(pictures) == {"predicted.svg", "linear-nvidia-h200.svg", "quantize-nvidia-h200.svg"}
    assert all(name in text for name in pictures)
    series = {trace["name"]: trace for trace in pictures["linear-nvidia-h200.svg"]["data"]}
    assert series["octavo rowwise, eager"]["x"] == [0.8]
    assert pictures["quantize-nvidia-h200.svg"]["data"][0]["x"] == [80]


def test_the_committed_document_is_what_the_results_give():
    pages = {
        performance.DOCUMENT: performance.document,
        performance.DOCUMENT.parent / "machine-code.md": performance.appendix,
    }
    for page, text in pages.items():
        assert page.read_text() == text(performance.RESULTS), "run `python -m benchmarks performance`"


def test_small_tiles_of_a_product_are_bound_by_what_they_load_from_l2():
    from benchmarks.sass_bound import DEVICES, product_seconds

    small, large = (product_seconds(8192, 8192, 8192, tile, 2, DEVICES[0]) for tile in ((64, 64), (128, 256)))
    assert small == pytest.approx((8192 / 64) ** 2 / 132 * 128 * 8192 / (1.755e9 * 32), rel=0.02)
    assert large < 0.6 * small

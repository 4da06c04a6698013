"""`python -m benchmarks run` without a GPU: every configuration parses; rows of runs that end, are cut, or fail."""

import sys
from pathlib import Path

import pytest
from benchmarks import run
from benchmarks.environment import read_json
from benchmarks.session import LEAST_LIMIT_S

from octavo.train import load_config
from support.sessions import session_of

TRAIN = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir()
if {fails}:
    sys.exit("error: torch.OutOfMemoryError")
expected = {{"memory": 8 * 2**30, "tokens_per_s": 5000.0}}
summary = {{"parameters": 7, "versions": {{"torch": "2"}}, "saved_bytes_per_token": 9.0}}
(folder / "setup.json").write_text(json.dumps({{"summary": summary, "expected": expected}}))
metrics = (folder / "metrics.jsonl").open("w")
for step in range(1, {steps} + 1):
    row = {{"step": step, "tokens": 100 * step, "loss": 8.0 - step + {worse}, "step_s": 0.02 * step if step > 5 else 1}}
    row |= {{"time": time.time(), "mfu": 0.1 * step, "peak_memory": 2**30 * step}}
    print(json.dumps(row), file=metrics, flush=True)
print("  first step after 3.1 s (9.9 of CPUs): imports 1.5, others 1.6")
if {stays}:
    sys.stdout.flush()
    time.sleep(60)
(folder / "run.json").write_text(json.dumps({{"startup": {{"imports": 1.5}}, "state_bytes_per_parameter": 4.2}}))
"""
SIZE = run.Size(None, {"optim.lr": 1.0}, steps=8, ends=True)


@pytest.fixture
def timed(tmp_path):
    return session_of("run", tmp_path, limit=30.0, sizes=list(run.SIZES))


@pytest.fixture
def train(tmp_path, monkeypatch, timed):
    """Runs what stands in for `octavo train`, which takes 8 steps."""

    def measure(arm, size=SIZE, *, fails=False, steps=8, stays=False, worse=0.0):
        script = tmp_path / "train.py"
        script.write_text(TRAIN.format(fails=fails, steps=steps, stays=stays, worse=worse))
        monkeypatch.setattr(run, "COMMAND", [sys.executable, str(script)])
        identity = {"stage": "octavo train", "shape": "small", "arm": arm, "mode": "eager"}
        return timed.attempt(identity, lambda: run.measure(timed, "small", size, "full"))

    return measure


@pytest.mark.parametrize("name", [*run.SIZES, "tiny"])
def test_every_configuration_is_one(tmp_path, name):
    size = {**run.SIZES, "tiny": run.TINY}[name]
    levels = {"full": "fp8+activations+optimizer", "bf16 again": "bf16"}
    for level in run.LEVELS:
        words = run.command(size, level, tmp_path)
        config = load_config(Path(words[4]), words[5:-2])
        assert config.run.steps == size.steps and words[-2:] == ["--out", str(tmp_path / "out")]
        assert config.precision.level == levels.get(level, level)
        assert config.parallel.fp8_comm == ("on" if level == "full" else "auto")


def test_rows_of_a_run(train):
    bf16, fp8 = train("bf16"), train("fp8", worse=0.25)
    assert bf16["ended"] == "done" and bf16["command_s"] >= bf16["first_step_s"] > 0
    assert (bf16["wall_ms"], bf16["tokens_per_s"]) == (140.0, 714.3)  # the median of steps 6 to 8
    assert (bf16["peak_gib"], bf16["predicted_gib"], bf16["gib_of_prediction"]) == (8.0, 8.0, 1.0)
    assert (bf16["tokens_per_s_of_prediction"], bf16["mfu"]) == (0.1429, 0.7)
    assert (bf16["startup"], bf16["state_bytes_per_parameter"]) == ({"imports": 1.5}, 4.2)
    assert bf16["parameters"] == 7 and bf16["losses"] == [7.0 - step for step in range(8)]
    assert (fp8["loss"], fp8["bf16_loss"], fp8["largest_difference"]) == (0.25, 0.0, 0.25)
    assert fp8["wall_speedup"] == 1.0 and "loss" not in bf16


def test_a_run_that_fails_leaves_the_end_of_its_output(train):
    error = train("fp8", fails=True)["error"]
    assert error.endswith("exit code 1 before its first step\nerror: torch.OutOfMemoryError")


def test_the_runner_does_not_cut_a_run_before_its_own_limit(timed):
    row = timed.attempt({"stage": "octavo train", "arm": "new"}, lambda: read_json(timed.paths[0]))
    assert row["limit_s"] == 30.0 + LEAST_LIMIT_S
    timed._earlier = [{"stage": "octavo train", "arm": "known", "took_s": 5.0}]
    row = timed.attempt({"stage": "octavo train", "arm": "known"}, lambda: read_json(timed.paths[0]))
    assert row["limit_s"] == 30.0 + LEAST_LIMIT_S

"""The convergence benchmark: its document is that of its results, and the results keep the promises, also when made
anew (slow: half an hour).
"""

import json
from pathlib import Path

import pytest
from benchmarks import convergence
from benchmarks.convergence import ARMS, BAND, BASELINE, LONG_BAND, SLOWEST, STEPS, gaps

KEPT = Path(convergence.RESULTS / "cpu" / "convergence.json")


def check(content):
    """What is promised of the loss, and of the time on a CPU."""
    short, long = (convergence._of_length(content["rows"], steps) for steps in content["steps"])
    assert {row["arm"] for row in short} == set(ARMS)
    assert len({row["seed"] for row in short}) == 3
    for arm in ARMS:
        assert max(map(abs, gaps(short, arm))) <= BAND, arm
    assert abs(gaps(long, "optimizer")[0]) <= LONG_BAND
    assert content["slowdowns"]["everything"] <= SLOWEST


def test_arms_are_what_they_say():
    asked = {arm: convergence.configuration(arm, 1, STEPS).asked for arm in ARMS}
    assert asked[BASELINE].label == "bf16"
    assert asked["everything"].label == "O1+act+opt rowwise"
    assert (asked["activations"].matmul, asked["activations"].activations) == ("bf16", "fp8")
    assert (asked["optimizer"].label, asked["optimizer"].master) == ("bf16+opt", "remainder")
    assert len(set(asked.values())) == len(ARMS)


def test_the_results_kept_hold_the_promises():
    check(json.loads(KEPT.read_text()))


def test_the_document_is_that_of_the_results():
    again = "run `python -m benchmarks convergence --document`"
    assert convergence.DOCUMENT.read_text() == convergence.document(json.loads(KEPT.read_text())), again


def test_runs_are_not_repeated_and_stopped_ones_go_on(tmp_path, capsys):
    words = ["--seeds", "1", "--steps", "4", "--long-steps", "5", "--runs", str(tmp_path / "runs"), "--out",
             str(tmp_path), "optim.warmup=1", "data.sequence_length=16", "optim.batch=2", "data.vocab_size=512",
             "model.config.num_hidden_layers=1"]  # fmt: skip
    convergence.main(words)
    content = json.loads((tmp_path / "convergence.json").read_text())
    assert [(row["arm"], row["steps"]) for row in content["rows"]] == [
        *((arm, 4) for arm in ARMS), (BASELINE, 5), ("optimizer", 5)
    ]  # fmt: skip
    assert "| everything | `O1+act+opt rowwise` |" in convergence.document(content)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}
    assert len(times) == 8
    convergence.main(words)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert json.loads((tmp_path / "convergence.json").read_text())["rows"] == content["rows"]


def test_gaps_are_taken_within_a_seed():
    losses = {(BASELINE, 1): 2.0, (BASELINE, 2): 4.0, ("everything", 1): 2.1, ("everything", 2): 3.9}
    rows = [{"arm": arm, "seed": seed, "tail_mean": loss} for (arm, seed), loss in losses.items()]
    assert gaps(rows, "everything") == pytest.approx([5.0, -2.5])
    assert convergence.spread(rows) == pytest.approx(100 * 2**0.5 / 3)


@pytest.mark.slow
def test_everything_in_fp8_converges_like_bf16_on_three_seeds(tmp_path):
    convergence.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)])
    check(json.loads((tmp_path / "convergence.json").read_text()))

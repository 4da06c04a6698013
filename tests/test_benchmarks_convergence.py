"""The convergence benchmark: its document is that of its results, and the results keep the promises, also when made
anew (slow: half an hour).
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from benchmarks import convergence
from benchmarks.convergence import ARMS, BAND, BASELINE, LONG_BAND, SLOWEST, STEPS, gaps

COMMITTED = Path(convergence.RESULTS / "cpu" / "convergence.json")


def check(content):
    """What is promised of the loss."""
    short, long = (convergence._of_length(content["rows"], steps) for steps in content["steps"])
    assert {row["arm"] for row in short} == set(ARMS)
    assert len({row["seed"] for row in short}) == 3
    for arm in ARMS:
        assert max(map(abs, gaps(short, arm))) <= BAND, arm
    assert abs(gaps(long, "optimizer")[0]) <= LONG_BAND


def test_arms_are_what_they_say():
    asked = {arm: convergence.configuration(arm, 1, STEPS).resolved for arm in ARMS}
    assert asked[BASELINE].label == "bf16"
    assert asked["everything"].label == "fp8+activations+optimizer rowwise"
    assert (asked["activations"].matmul, asked["activations"].activations) == ("bf16", "fp8")
    assert (asked["optimizer"].label, asked["optimizer"].master) == ("bf16+optimizer", "remainder")
    assert len(set(asked.values())) == len(ARMS)


def test_the_results_kept_hold_the_promises():
    check(json.loads(COMMITTED.read_text()))


def test_the_document_is_that_of_the_results():
    again = "run `python -m benchmarks convergence --document`"
    assert convergence.DOCUMENT.read_text() == convergence.document(json.loads(COMMITTED.read_text())), again


def test_long_runs_of_an_earlier_date_are_marked():
    content = json.loads(COMMITTED.read_text())
    older = content["environment"] | {"date": "2026-01-02", "device": "another CPU"}
    text = convergence.document(content | {"long_environment": older})
    assert "older than the others: 2026-01-02, another CPU" in text.split("## AdamW over")[1]
    assert "older than" not in convergence.document(content | {"long_environment": None})


def test_arms_replace_their_rows(tmp_path, monkeypatch):
    """Others stay as they are; results of another device are no base for gaps."""
    content = json.loads(COMMITTED.read_text())
    device = convergence.environment(torch.device("cpu"))["device"]
    content["environment"]["device"] = device
    file = tmp_path / "convergence.json"
    file.write_text(json.dumps(content))

    def measured(arm, seed, steps, *_):
        return {"arm": arm, "seed": seed, "steps": steps, "tail_mean": 5.0}

    monkeypatch.setattr(convergence, "measured", measured)
    words = ["--arms", "products, equalized", "--out", str(tmp_path)]
    convergence.main(words)
    after = json.loads(file.read_text())
    assert len(after["rows"]) == len(content["rows"])
    for new, old in zip(after["rows"], content["rows"], strict=True):
        assert new == (measured(new["arm"], new["seed"], 200) if old["arm"] == "products, equalized" else old)
    assert {key: after[key] for key in after if key != "rows"} == {
        key: content[key] for key in content if key != "rows"
    }
    file.write_text(json.dumps(content | {"environment": content["environment"] | {"device": "another CPU"}}))
    with pytest.raises(SystemExit, match="which are of another CPU"):
        convergence.main(words)


TINY = ("optim.warmup=1", "data.sequence_length=16", "optim.batch=2", "data.vocab_size=512",
        "model.config.num_hidden_layers=1")  # fmt: skip


@pytest.mark.slow
def test_runs_are_not_repeated_and_stopped_ones_go_on(tmp_path, capsys):
    words = ["--seeds", "1", "--steps", "4", "--long-steps", "5", "--runs", str(tmp_path / "runs"), "--out",
             str(tmp_path), *TINY]  # fmt: skip
    convergence.main(words)
    content = json.loads((tmp_path / "convergence.json").read_text())
    assert [(row["arm"], row["steps"]) for row in content["rows"]] == [
        *((arm, 4) for arm in ARMS), (BASELINE, 5), ("optimizer", 5)
    ]  # fmt: skip
    assert "| everything | `fp8+activations+optimizer rowwise` |" in convergence.document(content)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}
    assert len(times) == 8
    convergence.main(words)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert json.loads((tmp_path / "convergence.json").read_text())["rows"] == content["rows"]


@pytest.mark.slow
def test_runs_of_other_code_are_trained_anew_beside_them(tmp_path):
    config = convergence.configuration(BASELINE, 1, 2, TINY)
    out = tmp_path / "bf16"
    (tmp_path / "bf16").mkdir()  # of unknown code
    own = convergence.code()
    assert set(own) == {"commit", *convergence.VERSIONS}
    folders = []
    for now in (own, own, own | {"commit": "0" * 40}, own | {"torch": "2.0"}, own | {"commit": None}, own):
        result, folder = convergence.trained(config, out, now)
        assert result.steps == 2 and json.loads((folder / convergence.CODE_FILE).read_text()) == now
        folders.append(folder.name)
    assert folders == ["bf16-2", "bf16-2", "bf16-3", "bf16-4", "bf16-5", "bf16-2"]


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "ROOT", tmp_path)
    assert convergence.code()["commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True, timeout=20)
    said = subprocess.run([*git, "log", "--format=%H"], check=True, timeout=20, capture_output=True, text=True)
    assert convergence.code()["commit"] == said.stdout.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "7", "--long-steps", "7"], "--steps and --long-steps are both 7"),
        (["--seeds", "1"], "--seeds is 2 or more for the document, .* give --out; got 1"),
        (["--seeds", "0", "--out", "elsewhere"], "--seeds is 1 or more; got 0"),
        (["--document", "--out", "{kept}"], "convergence.json is of 1 seed"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained_or_written(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convergence, "run", None)
    monkeypatch.setattr(convergence, "DOCUMENT", tmp_path / "document.md")
    monkeypatch.setattr(convergence, "RESULTS", tmp_path)
    (tmp_path / "convergence.json").write_text(json.dumps({"rows": [{"seed": 1, "steps": 4}], "steps": [4, 5]}))
    with pytest.raises(SystemExit) as stopped:
        convergence.main([*(word.format(kept=tmp_path) for word in words), "--runs", str(tmp_path / "runs")])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["convergence.json"]


def test_gaps_are_taken_within_a_seed():
    losses = {(BASELINE, 1): 2.0, (BASELINE, 2): 4.0, ("everything", 1): 2.1, ("everything", 2): 3.9}
    rows = [{"arm": arm, "seed": seed, "tail_mean": loss} for (arm, seed), loss in losses.items()]
    assert gaps(rows, "everything") == pytest.approx([5.0, -2.5])
    assert convergence.spread(rows) == pytest.approx(100 * 2**0.5 / 3)


@pytest.mark.slow
def test_everything_in_fp8_converges_like_bf16_on_three_seeds(tmp_path):
    convergence.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)])
    content = json.loads((tmp_path / "convergence.json").read_text())
    check(content)
    assert content["slowdowns"]["everything"] <= SLOWEST

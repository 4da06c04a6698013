"""The benchmark suite without a GPU: its shapes, its recovery, rehearsals of its stages."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import __main__, environment, gpu, linear, session, shapes

from support.sessions import session_of

ROOT = Path(__file__).parent.parent
NO_PEERS = ["--peers", "nowhere"]


@pytest.fixture
def linears(tmp_path):
    return session_of("linear", tmp_path)


def test_shapes_are_sets_or_sizes():
    words = ("targets", "16384,4096,14336", "1,2,3")
    assert shapes.each_once(map(shapes.of, words)) == [*shapes.TARGETS, (1, 2, 3)]
    for wrong in ("cube", "1,2", "1,2,x"):
        with pytest.raises(argparse.ArgumentTypeError, match="neither a named set"):
            shapes.of(wrong)


def test_a_failing_row_is_kept_and_the_next_runs(linears):
    linears.attempt({"arm": "broken"}, lambda: 1 / 0)
    linears.attempt({"arm": "good"}, lambda: {"kernel_ms": 1.0})
    kept = json.loads(linears.paths[0].read_text())["rows"]
    assert "ZeroDivisionError" in kept[0]["error"] and kept[1]["kernel_ms"] == 1.0
    assert linears.attempt({"arm": "good"}, lambda: pytest.fail("made twice"))["kernel_ms"] == 1.0


def test_resuming_leaves_out_what_took_the_process_down(linears):
    content = {"rows": [{"arm": "good", "kernel_ms": 1.0}], "running": {"arm": "deadly"}, "ceilings": {"copy_tbs": 9.0}}
    linears.take_up(content)
    for arm in ("good", "deadly"):
        linears.attempt({"arm": arm}, lambda: pytest.fail("run again"))
    assert "crashed or hung" in linears.rows[1]["error"] and linears.facts["ceilings"] == {"copy_tbs": 9.0}


def test_only_the_parts_asked_for_run(linears):
    linears.only = ["product", "4096"]
    identities = [
        {"stage": "product", "shape": "1"},
        {"shape": "4096"},
        {"stage": "fused", "shape": "4096"},
        {"stage": "x"},
    ]
    ran = [linears.attempt(identity, dict) is not None for identity in identities]
    assert ran == [True, True, False, False]
    linears.only, linears.without = [], ["fused"]
    assert [linears.attempt(identity, dict) is not None for identity in identities] == [True, True, False, True]


def test_a_stage_that_needs_a_gpu_ends_without_one():
    with pytest.raises(SystemExit) as end:
        linear.main(["--require-gpu", *NO_PEERS])
    assert end.value.code == session.NO_GPU


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
    assert set(stages) == set(gpu.STAGES)
    assert {stage["ended"] for stage in stages.values()} == {"done"}, stages
    assert all(stage["rows"] and not stage["failed"] for stage in stages.values()), stages


# Result files


def test_what_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "planner.md"
    path.write_text("old")

    def write_half(scratch, text, encoding):
        scratch.write_bytes(text[:2].encode(encoding))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", write_half)
        environment.write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    environment.write_text(path, "new × ü")
    assert path.read_text(encoding="utf-8") == "new × ü" and list(tmp_path.iterdir()) == [path]


def test_a_session_replaces_the_kept_result_at_its_end_and_resumes_what_it_left(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "RESULTS", tmp_path)
    path = tmp_path / "cpu" / "linear.json"
    environment.write_json(path, {"rows": ["old"]})
    options = session.parser("linear", None)
    run = session.begin(options, NO_PEERS, times_cpus=True)
    run.attempt({"n": 1}, lambda: {"ms": 1.0})

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.attempt({"n": 2}, interrupted)
    assert json.loads(path.read_text()) == {"rows": ["old"]}
    again = session.begin(options, [*NO_PEERS, "--resume"], times_cpus=True)
    assert [row["n"] for row in again.rows] == [1, 2]
    again.finish()
    assert [row["n"] for row in json.loads(path.read_text())["rows"]] == [1, 2]
    assert [each.name for each in path.parent.iterdir()] == ["linear.json"]

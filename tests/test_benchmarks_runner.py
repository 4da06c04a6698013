"""The suite and its GPU runner, without a GPU: stages that crash and hang, targets, result files, the document."""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import __main__, environment, gpu, layer, linear, performance, session, shapes
from benchmarks.gpu import Part

from support.sessions import session_of

STAGES = {
    "good": "print('note: no torchao', flush=True); time.sleep(0.2)",
    "crash": """
rows = json.loads(path.read_text())["rows"] if path.exists() else []
path.write_text(json.dumps({"rows": [*rows, {"n": len(rows)}], "running": {"n": 9}}))
if len(rows) < 2: print("about to die"); os.abort()
path.write_text(json.dumps({"rows": rows, "stopped": "done"}))
""",
    "hang": "path.write_text(json.dumps({'rows': [], 'running': {}})); print('asleep', flush=True); time.sleep(60)",
    "hang once": """
if path.exists(): path.write_text(json.dumps({"rows": [{"n": 1}], "stopped": "done"}))
else: path.write_text(json.dumps({"rows": [], "running": {"n": 1}, "limit_s": 0.3})); time.sleep(60)
""",
    "broken": "import no_such_module",
    "lost": f"""
if path.exists(): print("lost: no GPU works: CUDA error: unspecified"); sys.exit({session.NO_GPU})
path.write_text(json.dumps({{"rows": [{{"n": 1, "error": "CUDA error"}}]}})); sys.exit("the GPU failed")
""",
}


class Scripted(gpu.Runner):
    def command(self, stage, seconds, parts=(), *, resume):
        self.ran = [*getattr(self, "ran", []), (stage, [part.name for part in parts], resume)]
        self.seconds = [*getattr(self, "seconds", []), seconds]
        path = f"path = Path({str(environment.unfinished(self.out / f'{stage}.json'))!r})\n"
        return [sys.executable, "-c", f"import json, os, sys, time; from pathlib import Path; {path}{STAGES[stage]}"]


@pytest.fixture
def runner(tmp_path):
    options = argparse.Namespace(row_limit=None, rehearse=False, resume=False)
    made = Scripted(tmp_path, options, {"PYTHONUNBUFFERED": "1"})
    made.poll_s = 0.05
    made.prices.starts = dict.fromkeys(STAGES, 0.0)
    return made


def test_a_crashed_stage_goes_on_behind_the_row(runner, capsys):
    outcome = runner.run("crash", 100.0)
    assert (outcome.ended, outcome.restarts, outcome.rows, outcome.tail) == ("done", 2, 2, [])
    assert [resume for _, _, resume in runner.ran] == [False, True, True]
    assert "crash: crashed in {'n': 9}; going on behind it" in capsys.readouterr().out
    assert (runner.out / "crash.log").read_text().count("about to die") == 2


def test_a_hung_stage_is_killed_and_says_where(runner):
    runner.options.row_limit = 1.0
    outcome = runner.run("hang", 8.0)
    assert outcome.ended == "hung" and outcome.seconds < 8 and outcome.tail[-1] == "asleep"


def test_a_row_over_its_limit_is_cut_and_the_next_ones_run(runner):
    outcome = runner.run("hang once", 100.0)
    assert (outcome.ended, outcome.restarts, outcome.rows) == ("done", 1, 1) and outcome.seconds < 20


def test_a_stage_that_cannot_start_is_not_tried_again(runner):
    (runner.out / "broken.json").write_text('{"rows": [1]}')
    outcome = runner.run("broken", 100.0)
    assert (outcome.ended, outcome.restarts, outcome.rows) == ("crashed", 0, 0)
    assert "no_such_module" in outcome.tail[-1]
    assert json.loads((runner.out / "broken.json").read_text()) == {"rows": [1]}  # the last run's result stays


def spend(runner, parts, seconds, after=lambda: None):
    gpu.spend(runner, parts, time.time() + seconds, 60.0, after)


def test_the_most_important_parts_run_and_leave_the_others_their_time(runner, capsys):
    runner.prices.starts["crash"] = 90.0
    first, second = [Part("good", "a", 9, 5), Part("hang once", "all", 8, 20)], [Part("good", "b", 7, 10)]
    parts = [*first, *second, Part("crash", "c", 6, 90)]
    spend(runner, parts, 36.0)
    assert runner.ran[0] == ("good", ["a", "b"], False)
    assert [stage for stage, *_ in runner.ran] == ["good", "hang once", "hang once"]
    assert 13 < runner.seconds[0] <= 16 and runner.outcomes["good"].parts == ["a", "b"]
    assert "left out: crash c" in capsys.readouterr().out


def test_without_a_gpu_nothing_more_is_tried(runner, capsys):
    saved = []
    spend(runner, [Part("lost", "all", 9, 1), Part("good", "all", 8, 1)], 50.0, lambda: saved.append(1))
    text = capsys.readouterr().out
    assert [stage for stage, *_ in runner.ran] == ["lost", "lost"] and text.count("the GPU is gone") == 1
    assert runner.outcomes["lost"].ended == "no gpu" and runner.outcomes["lost"].rows == 1 and saved == [1]
    assert "left out: good all" in text and "CUDA error: unspecified" in text


@pytest.mark.thorough
def test_every_part_has_rows(tmp_path, monkeypatch):
    """The names of parts are those of the rows that the benchmarks attempt, without a GPU at tiny shapes."""
    names = {(name, shapes.label(shape)) for name in ("linear",) for shape in shapes.TARGETS}
    names |= {("layer", name) for name in layer.LAYERS}
    note = lambda self, identity, *_, **__: names.add((self.name, session.part_of(identity)))  # noqa: E731
    monkeypatch.setattr(session.Session, "attempt", note)
    for name in {part.stage for part in gpu.PARTS if part.name != gpu.ALL} - {"linear", "layer"}:
        importlib.import_module(f"benchmarks.{name}").main(["--rehearse", "--peers", "nowhere", "--out", str(tmp_path)])
    missing = {(part.stage, part.name) for part in gpu.PARTS if part.name != gpu.ALL} - names
    assert not missing


def test_the_committed_document_is_what_the_results_give():
    page = performance.DOCUMENT.read_text()
    assert page == performance.document(performance.RESULTS), "run `python -m benchmarks performance`"


# --- the suite: its shapes, its recovery, result files ---


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


@pytest.mark.thorough
def test_a_failing_row_is_kept_and_the_next_runs(linears):
    linears.attempt({"arm": "broken"}, lambda: 1 / 0)
    linears.attempt({"arm": "good"}, lambda: {"kernel_ms": 1.0})
    kept = json.loads(environment.unfinished(linears.paths[0]).read_text())["rows"]
    assert "ZeroDivisionError" in kept[0]["error"] and kept[1]["kernel_ms"] == 1.0
    assert linears.attempt({"arm": "good"}, lambda: pytest.fail("made twice"))["kernel_ms"] == 1.0


def test_resuming_leaves_out_what_took_the_process_down(linears):
    content = {"rows": [{"arm": "good", "kernel_ms": 1.0}], "running": {"arm": "deadly"}, "ceilings": {"copy_tbs": 9.0}}
    linears.take_up(content)
    for arm in ("good", "deadly"):
        linears.attempt({"arm": arm}, lambda: pytest.fail("run again"))
    assert "crashed or hung" in linears.rows[1]["error"] and linears.facts["ceilings"] == {"copy_tbs": 9.0}


@pytest.mark.thorough
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

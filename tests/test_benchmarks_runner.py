"""The GPU runner and what it ends with, without a GPU: stages that crash and hang, targets, the document."""

import argparse
import importlib
import json
import sys
import time

import pytest
from benchmarks import gpu, layer, performance, session, shapes
from benchmarks.gpu import Part

STAGES = {
    "good": "print('note: no torchao', flush=True); time.sleep(0.2)",
    "crash": """
rows = json.loads(path.read_text())["rows"] if path.exists() else []
path.write_text(json.dumps({"rows": [*rows, {"n": len(rows)}], "running": {"n": 9}}))
if len(rows) < 2: print("about to die"); os.abort()
path.write_text(json.dumps({"rows": rows, "stopped": "done"}))
""",
    "hang": "path.write_text(json.dumps({'rows': [], 'running': {}})); print('asleep', flush=True); time.sleep(60)",
    "chatty": "for i in range(10): print(i, flush=True); time.sleep(0.2)",
    "hang once": """
if path.exists(): path.write_text(json.dumps({"rows": [{"n": 1}], "stopped": "done"}))
else: path.write_text(json.dumps({"rows": [], "running": {"n": 1}, "limit_s": 0.3})); time.sleep(60)
""",
    "broken": "import no_such_module",
    "broken too": "import no_such_module",
    "lost": f"""
if path.exists(): print("lost: no GPU works: CUDA error: unspecified"); sys.exit({session.NO_GPU})
path.write_text(json.dumps({{"rows": [{{"n": 1, "error": "CUDA error"}}]}})); sys.exit("the GPU failed")
""",
    "tests": """
print("tests/test_gpu.py::test_a PASSED [ 1%]", flush=True)
try: time.sleep(60)
except KeyboardInterrupt: print("tests/test_gpu.py::test_b FAILED"); sys.exit(2)
""",
}


class Scripted(gpu.Runner):
    def command(self, stage, seconds, parts=(), *, resume):
        self.ran = [*getattr(self, "ran", []), (stage, [part.name for part in parts], resume)]
        self.seconds = [*getattr(self, "seconds", []), seconds]
        path = f"path = Path({str(self.out / stage)!r} + '.json')\n"
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
    runner.close()
    assert json.loads((runner.out / "broken.json").read_text()) == {"rows": [1]}  # the last run's result stays
    assert [path.name for path in runner.out.iterdir()].count("broken.json.before") == 0


def spend(runner, parts, seconds, after=lambda: None, limit=60.0):
    gpu.spend(runner, parts, time.time() + seconds, limit, after)


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

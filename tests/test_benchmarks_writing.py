"""An interrupted benchmark leaves the result files, documents and images that were there."""

import argparse
import json

import pytest
from benchmarks import environment, session
from benchmarks.timing import CpuClock


def test_what_is_interrupted_leaves_the_old_file(tmp_path):
    path = tmp_path / "planner.md"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), environment.replacing(path) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    environment.write_text(path, "new × ü")
    assert path.read_text(encoding="utf-8") == "new × ü" and list(tmp_path.iterdir()) == [path]


def options(**fields):
    words = session.parser("linear", None, "").parse_args(["--peers", "none"])
    return argparse.Namespace(**vars(words), **fields)


def test_a_session_replaces_the_kept_result_at_its_end_and_resumes_what_it_left(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "RESULTS", tmp_path)
    monkeypatch.setattr(session, "CpuClock", CpuClock)
    path = tmp_path / "cpu" / "linear.json"
    environment.write_json(path, {"rows": ["old"]})
    run = session.begin("linear", options(), [], times_cpus=True)
    run.attempt({"n": 1}, lambda: {"ms": 1.0})

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.attempt({"n": 2}, interrupted)
    assert json.loads(path.read_text()) == {"rows": ["old"]}
    resuming = options()
    resuming.resume = True
    again = session.begin("linear", resuming, [], times_cpus=True)
    assert [row["n"] for row in again.rows] == [1, 2]
    again.finish()
    assert [row["n"] for row in json.loads(path.read_text())["rows"]] == [1, 2]
    assert [each.name for each in path.parent.iterdir()] == ["linear.json"]

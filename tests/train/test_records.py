"""Damage in the files of a run is found by whoever reads them, and named by file, line and field."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_runs import folder

from octavo.experiments.run_report import write_report
from octavo.inspect.stats import OperandStats
from octavo.train.record.events import EVENT, Event, drop_later_events, last_rollback, read_events
from octavo.train.record.json_lines import RecordFollower
from octavo.train.record.metrics import MetricsWriter, RunResult, read_metrics
from octavo.train.record.statistics import limits_of, read_statistics

ROWS: dict[str, dict[str, Any]] = {
    "metrics.jsonl": {
        "step": 1, "tokens": 64, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": None, "skipped": False,
        "step_s": 1.0, "tokens_per_s": 64.0,
    },
    "events.jsonl": {"step": 3, "event": "rollback", "text": "", "to": 2, "rollbacks": 1, "skipped_batches": 1},
    "statistics.jsonl": OperandStats(
        step=1, layer="a", operand="x", recipe="rowwise", elements=9, nonfinite=0, amax=1.0, smallest=1e-3,
        scale_spread=2.0, underflow=0.0, saturation=0.0, sqnr=30.0, what_if={"tensorwise": 20.0},
    ).to_json(),
}  # fmt: skip
READERS = {"metrics.jsonl": read_metrics, "events.jsonl": read_events, "statistics.jsonl": read_statistics}
CASES = [(name, field) for name, row in ROWS.items() for field in row]
WRONG: list[Any] = ["3", [3.0], {"a": 1}, float("nan"), -1j]


def wrong(name: str, field: str, value: Any) -> str:
    """A line with this value in this field; -1j for none."""
    row = ROWS[name] | {field: value}
    if value == -1j:
        del row[field]
    return json.dumps(row)


@pytest.mark.parametrize(("name", "field"), CASES)
def test_a_field_of_another_type_is_named(name: str, field: str, tmp_path: Path) -> None:
    strings = ("text", "event", "layer", "operand", "recipe")
    good = json.dumps(ROWS[name])
    for value in WRONG:
        if (isinstance(value, str) and field in strings) or (field == "what_if" and isinstance(value, dict)):
            continue  # that is its type
        if value == -1j and field in ("to", "rollbacks", "skipped_batches"):
            continue  # below
        (tmp_path / name).write_text(f"{good}\n{wrong(name, field, value)}\n")
        try:
            READERS[name](tmp_path)
        except ValueError as error:
            place = rf"{re.escape(str(tmp_path / name))}, line 2 is not .*: {field}\b.*"
            assert re.match(place, str(error)), value
        else:
            pytest.fail(f"{value!r} is read")


LINES = [b"[]", b"3", b"null", b"", b"{", b'{"step": 1}', b"\xff", b'{"a":' * 5000, b"[" * 100_000]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:12]))
def test_a_line_of_something_else(name: str, line: bytes, tmp_path: Path) -> None:
    good = json.dumps(ROWS[name]).encode()
    (tmp_path / name).write_bytes(good + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"{re.escape(name)}, line 2 is not .*: .+"):
        READERS[name](tmp_path)
    (tmp_path / name).write_bytes(good + b"\n" + json.dumps(ROWS[name] | {"extra": 1}).encode() + b"\n")
    with pytest.raises(ValueError, match="line 2 is not .*: extra: "):
        READERS[name](tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "statistics.jsonl"])
@pytest.mark.parametrize(("steps", "line"), [((1, 2, 3, 2), 4), ((4, 3, 2, 1), 2), ((1, 2, 0), 3), ((10**30,), 1)])
def test_steps_in_another_order(name: str, steps: tuple[int, ...], line: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text("".join(json.dumps(ROWS[name] | {"step": step}) + "\n" for step in steps))
    with pytest.raises(ValueError, match=rf"{re.escape(name)}, line {line} is not .*: .*step"):
        READERS[name](tmp_path)


def test_missing_and_repeated_steps_of_the_curve(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", steps=9)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:3], *lines[2:]]))
    with pytest.raises(ValueError, match=r"line 4 is not a step of a run: step 3 comes after step 3"):
        read_metrics(run)
    for rows in (lines[4:], [*lines[:4], *lines[8:]]):
        (run / "metrics.jsonl").write_text("".join(rows))
        with pytest.warns(RuntimeWarning, match=rf"lacks {9 - len(rows)} of 9 steps, the first of them step [15]:"):
            assert len(read_metrics(run)) == len(rows)
    for rows in ([], lines[:4]):  # a checkpoint of step 9 outlived them
        (run / "metrics.jsonl").write_text("".join(rows))
        with (
            pytest.warns(RuntimeWarning, match=rf"lacks {9 - len(rows)} of 9 steps, .* step {len(rows) + 1}:"),
            MetricsWriter(run, after_step=9, log_every=1),
        ):
            pass


@pytest.mark.parametrize("name", ROWS)
def test_a_torn_last_line_is_left_out_with_a_warning(name: str, tmp_path: Path) -> None:
    good = json.dumps(ROWS[name])
    for torn in (good[:20], good, "[", "\xff"):
        (tmp_path / name).write_text(f"{good}\n{torn}")
        with pytest.warns(RuntimeWarning, match=rf"{re.escape(name)}, line 2 is left out"):
            assert len(READERS[name](tmp_path)) == 1


def test_a_rollback_is_whole_and_resume_reads_it_so(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"step": 3, "event": "rollback", "text": "", "rollbacks": 1}\n')
    for read in (read_events, lambda out: last_rollback(out, 9), lambda out: drop_later_events(out, 9)):
        with pytest.raises(ValueError, match=r"line 1 .*rollbacks: come with to and skipped_batches"):
            read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(wrong("metrics.jsonl", "loss", "3") + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 .*loss: "):
        MetricsWriter(tmp_path, after_step=9, log_every=1)
    assert "loss" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("field", ["steps", "losses", "tokens_per_s", "versions", "precision", "converted"])
def test_a_summary_with_a_field_of_another_type(field: str, tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    fields = asdict(RunResult.read(run))
    for value in ([], "x" if field not in ("precision", "converted") else 3, {"first": 3}):
        (run / "run.json").write_text(json.dumps(fields | {field: value}))
        with pytest.raises(ValueError, match=rf"run\.json is not the summary of a run: {field}\b"):
            RunResult.read(run)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layers.json", "[3]"), ("layers.json", '[{"name": 3}]'), ("layers.json", "{"), ("layers.json", "[" * 100_000),
        ("config.toml", "inspect = 3"), ("config.toml", "[inspect]\nlimits = 3"), ("config.toml", "="),
        ("config.toml", '[inspect.limits]\nsqnr = "a"'), ("config.toml", "[inspect.limits]\nb = 1"),
    ],
)  # fmt: skip
def test_other_files_of_a_run(name: str, text: str, tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    (run / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{re.escape(str(run / name))} is not "):
        write_report([run], tmp_path)
    if name == "config.toml":
        with pytest.raises(ValueError, match=r"config\.toml is not the configuration of a run"):
            limits_of(run)


@pytest.mark.parametrize("name", ["report.html", "verdict.json"])
def test_no_report_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    runs = [folder(tmp_path / "a"), folder(tmp_path / "b", "fp8 rowwise")]
    (tmp_path / "mine").write_text("mine")
    for target in ("mine", "gone"):
        out = tmp_path / target[::-1]
        out.mkdir()
        (out / name).symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match=rf"{re.escape(name)} is a link to .*{target}, and a report writes a file"):
            write_report(runs, out)
        assert [path.name for path in out.iterdir()] == [name]
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "gone").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).mkdir()
    with pytest.raises(ValueError, match="is a folder, and a report"):
        write_report(runs, tmp_path / "other")


def test_a_completed_last_line_is_read_alone(tmp_path: Path) -> None:
    """A run adds what it measures after a step to the step's line."""
    path = tmp_path / "events.jsonl"
    lines = [json.dumps({"step": step, "event": "move", "text": "x"}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(lines))
    follower = RecordFollower(path, Event, EVENT)
    assert (follower.poll(), len(follower.records)) == (0, 3)
    for text in ("longer", "longest of all"):
        lines[2] = json.dumps({"step": 3, "event": "move", "text": text}) + "\n"
        path.write_text("".join(lines))
        assert follower.poll() == 2
        assert [record["text"] for record in follower.records] == ["x", "x", text]
    path.write_text("".join(lines[:1]))
    follower.poll()
    assert len(follower.records) == 1

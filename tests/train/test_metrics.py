import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from octavo.train.disk import names_file
from octavo.train.record.metrics import (
    Losses,
    MetricsWriter,
    RunResult,
    StepMetrics,
    StepTotals,
    read_metrics,
)


def row(step: int, loss: float | None = None, speed: float = 1.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        tokens=step * 10,
        loss=loss,
        lr=0.1,
        grad_norm=1.0,
        loss_scale=None,
        skipped=loss is None,
        step_s=1.0,
        tokens_per_s=speed,
    )


def test_rows_are_on_disk_as_soon_as_written(tmp_path: Path) -> None:
    rows = [row(1, 3.0), row(2, None), row(3, 1.0)]
    with MetricsWriter(tmp_path, after_step=0, log_every=1) as writer:
        for count, item in enumerate(rows, start=1):
            writer.write(item)
            assert read_metrics(tmp_path) == rows[:count]
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert list(first) == [
        "step",
        "tokens",
        "loss",
        "lr",
        "grad_norm",
        "loss_scale",
        "skipped",
        "step_s",
        "tokens_per_s",
    ]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    full = r"No space left on device: '.*{}'"
    writer = MetricsWriter(tmp_path, after_step=0, log_every=1)
    with writer:
        writer._file.close()
        writer._file = open("/dev/full", "w")
        with pytest.raises(OSError, match=full.format("metrics.jsonl")):
            writer.write(row(1, 3.0))
        with pytest.raises(OSError, match=full.format("metrics.jsonl")):
            writer.__exit__()
    with pytest.raises(OSError, match=full.format("run.json")), names_file(tmp_path / "run.json"):
        Path("/dev/full").write_text("a line")


def test_resume_drops_later_rows_in_both_files(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, after_step=0, log_every=1) as writer:
        for step in range(1, 6):
            writer.write(row(step, float(step)))
    with MetricsWriter(tmp_path, after_step=3, log_every=1) as writer:
        assert writer.totals.fields()["steps"] == 3
        assert [item.step for item in read_metrics(tmp_path)] == [1, 2, 3]
        for step in (4, 5, 6):
            writer.write(row(step, 10.0 * step))
    assert [item.loss for item in read_metrics(tmp_path)] == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("train/loss")] == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]


def test_log_every_thins_tensorboard_only(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, after_step=0, log_every=2) as writer:
        for step in range(1, 6):
            writer.write(row(step, 1.0))
    assert len(read_metrics(tmp_path)) == 5
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [2, 4]


def test_a_torn_last_line_is_left_out_and_a_wrong_one_is_an_error(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    with MetricsWriter(tmp_path, after_step=0, log_every=1) as writer:
        writer.write(row(1, 2.0))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl, line 2 is left out"):
        assert [item.step for item in read_metrics(tmp_path)] == [1]
    path.write_text(whole[:20] + "\n" + whole)
    with pytest.raises(ValueError, match="line 1 is not a step"):
        read_metrics(tmp_path)


def test_summaries() -> None:
    rows = [row(step, 100.0 - step) for step in range(1, 21)]
    assert StepTotals(rows).losses == Losses(first=99.0, final=80.0, tail_mean=80.5)
    assert StepTotals([*rows, row(21, None)]).losses == Losses(first=99.0, final=80.0, tail_mean=80.5)
    assert StepTotals(rows[:3]).losses == Losses(first=99.0, final=97.0, tail_mean=97.0)
    assert StepTotals([row(1, None)]).losses is None
    speeds = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 7.0, 9.0]
    shares = [0.1, None, 0.1, 0.1, 0.1, 0.5, None, 0.7]
    rows = [replace(row(1, 1.0, speed), mfu=share) for speed, share in zip(speeds, shares, strict=True)]
    fields = StepTotals(rows).fields()
    assert (fields["tokens_per_s"], fields["mfu"]) == (7.0, 0.6)
    fields = StepTotals(rows[:5]).fields()
    assert (fields["tokens_per_s"], fields["mfu"]) == (1.0, 0.1)
    fields = StepTotals(
        [row(1, 1.0, 3.0), replace(row(2, None), held_out={"loss": 2.0}, peak_memory=7), row(3, 1.0)]
    ).fields()
    assert (fields["held_out"], fields["peak_memory"], fields["skipped_steps"]) == ({"loss": 2.0}, 7, 1)
    fields = StepTotals().fields()
    assert fields["steps"] == 0 and fields["tokens_per_s"] is fields["mfu"] is fields["losses"] is None


def test_result_round_trip(tmp_path: Path) -> None:
    result = RunResult(
        name="a",
        precision="fp8 rowwise",
        device="cpu",
        steps=2,
        tokens=20,
        parameters=3,
        losses=Losses(first=3.0, final=2.0, tail_mean=2.0),
        tokens_per_s=10.0,
        saved_bytes_per_token=5.5,
        skipped_steps=0,
        wall_s=2.0,
        versions={"octavo": "0"},
        converted="",
        stopped="done",
    )
    result.write(tmp_path)
    assert RunResult.read(tmp_path) == result
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    earlier = {key: value for key, value in asdict(result).items() if key != "state_bytes_per_parameter"}
    (tmp_path / "run.json").write_text(json.dumps(earlier))
    assert RunResult.read(tmp_path) == result
    with pytest.raises(ValueError, match=r"holds no run\.json"):
        RunResult.read(tmp_path / "other")
    for text in ("[]", "{", "{}", '{"losses": null, "x": 1}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match="is not the summary of a run"):
            RunResult.read(tmp_path)

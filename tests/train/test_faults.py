"""Faults put into a run: each is named by layer and operand in the step that it comes in, by the run itself."""

import json
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import faults
import pytest
from tiny_runs import Recorder, curve

from octavo.experiments.run_report import write_report
from octavo.train import NonFiniteError, parse_config, run
from octavo.train.config.run_config import ConfigError
from octavo.train.record.events import read_events
from octavo.train.record.statistics import read_statistics
from octavo.train.trainer import Trainer
from processes import gloo  # noqa: F401  a fixture

DOWN = "model.layers.1.mlp.down_proj"
WATCHED = {"precision": {"level": "fp8"}, "inspect": {"every": 1}}


@contextmanager
def in_step(number, fault, until=None, **options):
    """Runs inside train a model with a fault in `DOWN`, from one step until another, or in that one."""
    take = Trainer.train_step

    def broken(trainer):
        if number <= trainer.step + 1 <= (until or number):
            with fault(trainer.model, DOWN, **options):
                return take(trainer)
        return take(trainer)

    with mock.patch.object(Trainer, "train_step", broken):
        yield


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "options", "operand", "text"),
    [
        (faults.outliers, {"factor": 1e3}, "x", "amax rose"),
        (faults.tiny_gradients, {}, "dgrad_g", "amax fell"),
    ],
)
def test_jumps_are_said_in_their_step_and_once(make_config, tmp_path, fault, options, operand, text):
    recorder = Recorder()
    with in_step(4, fault, until=6, **options):
        run(make_config(**WATCHED), out=tmp_path, progress=recorder)
    events = [event for event in read_events(tmp_path) if f"{DOWN} {operand}: {text}" in event["text"]]
    assert [event["step"] for event in events] == [4]  # it lasts, and was said
    assert all(event["step"] >= 4 for event in read_events(tmp_path))
    assert events[0]["text"] in recorder.notes


@pytest.mark.parametrize(("level", "every"), [("bf16", 0), ("fp8", 2)])
def test_an_infinity_stops_the_run_with_its_layer_and_operand(make_config, tmp_path, level, every):
    config = make_config(precision={"level": level}, inspect={"every": every})
    with (
        in_step(3, faults.infinity, step=None),
        pytest.raises(NonFiniteError, match=rf"step 3: .* of {DOWN} \(first operand: x of {DOWN}\)"),
    ):
        run(config, out=tmp_path)
    (event,) = read_events(tmp_path)
    assert event["step"] == 3 and f"{DOWN} x: " in event["text"] and "NaN or infinite" in event["text"]


def test_a_fault_that_is_gone_when_it_is_looked_for_was_sampled(make_config, tmp_path):
    with (
        in_step(3, faults.infinity, step=1),  # in the first forward of that step, and not in the diagnosis
        pytest.raises(NonFiniteError, match=rf"none in particular.*\(first operand: x of {DOWN}\)"),
    ):
        run(make_config(**WATCHED), out=tmp_path)


def nan_job(tables, out):
    with in_step(4, faults.nan_on_rank, rank=1, step=None):
        try:
            run(parse_config(tables), out=Path(out))
        except NonFiniteError as error:
            return str(error)
    return "done"


@pytest.mark.thorough
@pytest.mark.dist
@pytest.mark.parametrize("autopilot", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_nan_on_one_rank_is_named_on_all(gloo, make_config, tmp_path, autopilot):  # noqa: F811
    config = make_config(precision={"level": "fp8", "autopilot": autopilot})
    errors = gloo.run(nan_job, 2, config.model_dump(exclude_none=True), str(tmp_path))
    assert errors[0] == errors[1]
    assert f"step 4: the loss is nan; first value that is not finite: output of {DOWN}" in errors[0]
    assert f"(first operand: x of {DOWN})" in errors[0]
    events = [event for event in read_events(tmp_path) if event["step"] == 4]
    assert [event["event"] for event in events] == ["finding"] and f"{DOWN} x: " in events[0]["text"]
    state = json.loads((tmp_path / "checkpoints" / "step-000003" / "trainer.json").read_text())
    assert not state["autopilot"]["moves"]  # FP8 is not blamed for it


@pytest.mark.thorough
def test_limits_are_the_runs_own(make_config, tmp_path):
    strict = {"limits": {"sqnr": 33.0}}
    run(make_config(**WATCHED), out=tmp_path / "calm")
    run(make_config(**WATCHED | {"inspect": WATCHED["inspect"] | strict}), out=tmp_path / "strict")
    assert not read_events(tmp_path / "calm")
    texts = [event["text"] for event in read_events(tmp_path / "strict") if event["step"] == 1]
    assert len(texts) == 5 and "(limit 33)" in texts[0]
    assert texts[-1].endswith("more figures crossed a limit: octavo inspect shows them")
    assert curve(tmp_path / "calm") == curve(tmp_path / "strict")
    page = write_report([tmp_path / "strict"], tmp_path / "report").html.read_text()
    assert "What happened in" in page and "SQNR" in page and "(limit 33)" in page
    assert "What happened in" not in write_report([tmp_path / "calm"], tmp_path / "quiet").html.read_text()


@pytest.mark.parametrize(("limits", "moves"), [({"sqnr": 60.0, "product_error": 0.0}, True), ({"sqnr": 60.0}, False)])
def test_limits_move_layers_under_the_autopilot(make_config, tmp_path, limits, moves):
    piloted = {"level": "fp8", "autopilot": True}
    run(make_config(precision=piloted, inspect={"limits": limits}, run={"steps": 3}), out=tmp_path)
    layers = {row.layer for row in read_statistics(tmp_path)}
    assert bool(layers) != moves  # or none is left in FP8 that could be sampled
    assert {event["event"] for event in read_events(tmp_path)} == ({"move"} if moves else {"finding"})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"underflow": 1.5}, "inspect.limits.underflow: .* less than or equal to 1, got 1.5"),
        ({"saturation": -0.1}, "inspect.limits.saturation: .* greater than or equal to 0"),
        ({"amax_jump": 1.0}, "inspect.limits.amax_jump: .* greater than 1, got 1.0"),
        ({"sqnr": float("inf")}, "inspect.limits.sqnr: .* finite number"),
        ({"snqr": 20.0}, r"unknown key inspect.limits.snqr \(did you mean 'sqnr'"),
    ],
)
def test_limits_out_of_range(make_config, limits, message):
    with pytest.raises(ConfigError, match=message):
        make_config(inspect={"limits": limits})


def test_limits_may_change_on_resume_and_are_said(make_config, tmp_path):
    run(make_config(**WATCHED, run={"steps": 3}), out=tmp_path)
    recorder = Recorder()
    changed = WATCHED | {"inspect": {"every": 1, "limits": {"sqnr": 33.0}}}
    run(make_config(**changed, run={"steps": 4}), out=tmp_path, resume=True, progress=recorder)
    assert "resumed with inspect.limits.sqnr = 33.0 (was 18.0)" in recorder.notes
    saved = json.loads((tmp_path / "checkpoints" / "step-000004" / "trainer.json").read_text())
    assert saved["config"]["inspect"]["limits"]["sqnr"] == 33.0

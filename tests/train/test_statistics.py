"""`[inspect]`: what a run writes of its operands, and that training does not notice."""

import json
import math
import time
from unittest.mock import Mock

import pytest
from fake_runs import operand, sample
from tiny_runs import curve, killed, make_trainer

from octavo.experiments.demo import demo_configs
from octavo.inspect.findings import OPERANDS
from octavo.train import run
from octavo.train.record.metrics import STATISTICS_FILE, StatisticsWriter, read_statistics, statistics_of

fp8 = {"level": "fp8"}


def looked(make_config, every=2, **sections):
    return make_config(**{"precision": fp8, "inspect": {"every": every, "what_if": ["blockwise"]}} | sections)


def steps_of(out):
    return sorted({row.step for row in read_statistics(out)})


@pytest.mark.thorough
def test_rows_of_sampled_steps_and_nothing_else_changes(make_config, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(looked(make_config, every=0), out=tmp_path / "plain")
    run(looked(make_config), out=tmp_path / "looked")
    assert not (tmp_path / "plain" / STATISTICS_FILE).exists()
    rows = read_statistics(tmp_path / "looked")
    assert steps_of(tmp_path / "looked") == [2, 4, 6]
    assert len(rows) == 3 * 21 * len(OPERANDS)  # three blocks of seven linears
    assert all(set(row.what_if) == {"blockwise"} and row.recipe == "rowwise" for row in rows)
    assert curve(tmp_path / "looked") == curve(tmp_path / "plain")
    events = EventAccumulator(str(tmp_path / "looked" / "tensorboard"))
    events.Reload()
    row = next(row for row in rows if row.step == 4 and row.operand == "dgrad_g")
    for figure in ("sqnr", "underflow", "amax"):
        scalars = {event.step: event.value for event in events.Scalars(f"dgrad_g_{figure}/{row.layer}")}
        assert scalars.keys() == {2, 4, 6}
        assert scalars[4] == pytest.approx(getattr(row, figure), rel=1e-6)
    assert len(events.Scalars("inspect/lowest_sqnr_x")) == 3


def test_looking_may_begin_and_end_on_resume(make_config, tmp_path):
    saved = {"save_every": 2}
    killed(looked(make_config, run=saved), tmp_path, 5)
    run(looked(make_config, every=0, run=saved), out=tmp_path, resume=True)
    assert steps_of(tmp_path) == [2, 4]


def test_a_run_in_bf16_shows_what_fp8_would_do(make_config, tmp_path):
    run(looked(make_config, precision={}), out=tmp_path)
    rows = read_statistics(tmp_path)
    assert {row.recipe for row in rows} == {"bf16"} and all(row.sqnr > 25 for row in rows)


def test_what_is_not_finite_is_in_the_file_and_not_on_the_board(tmp_path):
    board = Mock()
    writer = StatisticsWriter(tmp_path, after_step=0, board=board)
    row = operand(sqnr=math.inf)
    writer.write([row, operand(operand="w", sqnr=math.nan)])
    lines = (tmp_path / STATISTICS_FILE).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["sqnr"] for line in lines] == ["inf", None]
    assert read_statistics(tmp_path)[0] == row
    scalars = [call.args[1] for call in board.add_scalar.call_args_list]
    assert scalars and all(map(math.isfinite, scalars))


def test_statistics_of_a_checkpoint_are_those_before_it(tmp_path):
    for step in (2, 4):
        sample(tmp_path, operand(step))
    assert [row.step for row in statistics_of(tmp_path)] == [2, 4]
    assert [row.step for row in statistics_of(tmp_path / "checkpoints" / "step-000003")] == [2]
    with pytest.raises(ValueError, match="there is no folder .*elsewhere"):
        statistics_of(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"no statistics up to step 1: train with inspect\.every=50"):
        statistics_of(tmp_path / "checkpoints" / "step-000001")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fp8", "fp8+activations"])
def test_a_sampled_step_takes_less_than_five_others(level, tmp_path):
    """The demo's model: with one step in 50 sampled, under 10 %. The fastest of each, as a machine has its moods."""
    overrides = ["optim.batch=2", "run.device=cpu", f"data.cache={tmp_path}", "inspect.every=3"]
    config = demo_configs(overrides, level)[1]
    trainer = make_trainer(config)
    trainer.train_step()
    seconds = {False: [], True: []}
    for _ in range(15):
        start = time.perf_counter()
        trainer.train_step()
        seconds[bool(trainer.watch.rows)].append(time.perf_counter() - start)
    plain, sampled = min(seconds[False]), min(seconds[True])
    print(f"{level}: a step {1e3 * plain:.0f} ms, a sampled one {sampled / plain:.2f} ×, of 50 steps +"
          f"{2 * (sampled / plain - 1):.1f} %")  # fmt: skip
    assert sampled < 5 * plain

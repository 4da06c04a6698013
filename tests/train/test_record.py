"""What a run writes: steps, events, results, statistics of operands, and metrics on servers."""

import json
import math
import re
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import fake_runs
import pytest
import torch
from fake_runs import folder, operand, sample, step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import LLAMA, curve, killed, make_trainer, refused_run, rejected

from octavo.experiments.demo import demo_configs
from octavo.experiments.run_report import write_report
from octavo.inspect.findings import OPERANDS
from octavo.train import RunResult, loop, read_metrics, run
from octavo.train.loop import expected_step, with_gauges
from octavo.train.record import loggers, metrics
from octavo.train.record.loggers import LOGGERS_FILE, ScalarLog
from octavo.train.record.metrics import MetricsWriter, StatisticsWriter, StepTotals, read_events, read_statistics
from octavo.train.run_plan import plan_configured


def row(number, loss=None, speed=1.0):
    return step(number, loss, tokens=10 * number, lr=0.1, tokens_per_s=speed)


def test_rows_are_on_disk_as_soon_as_written(tmp_path):
    rows = [row(1, 3.0), row(2, None), row(3, 1.0)]
    with MetricsWriter(tmp_path, after_step=0, log_every=1) as writer:
        for count, item in enumerate(rows, start=1):
            writer.write(item)
            assert read_metrics(tmp_path) == rows[:count]
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert list(first) == list(ROWS["metrics.jsonl"])


def test_a_full_disk_names_the_file(tmp_path):
    with MetricsWriter(tmp_path, after_step=0, log_every=1) as writer:
        writer._file.close()
        writer._file = open("/dev/full", "w")
        for action in (lambda: writer.write(row(1, 3.0)), writer.__exit__):
            with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
                action()


def test_resume_drops_later_rows_in_both_files(tmp_path):
    with MetricsWriter(tmp_path, after_step=0, log_every=1) as writer:
        for step in range(1, 6):
            writer.write(row(step, float(step)))
    with MetricsWriter(tmp_path, after_step=3, log_every=1) as writer:
        assert writer.fields()["steps"] == 3
        assert [item.step for item in read_metrics(tmp_path)] == [1, 2, 3]
        for step in (4, 5, 6):
            writer.write(row(step, 10.0 * step))
    assert [item.loss for item in read_metrics(tmp_path)] == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("train/loss")] == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]


def test_summaries():
    rows = [row(step, 100.0 - step) for step in range(1, 21)]
    assert StepTotals(rows).losses == metrics.Losses(first=99.0, final=80.0, tail_mean=80.5)
    assert StepTotals([*rows, row(21, None)]).losses == metrics.Losses(first=99.0, final=80.0, tail_mean=80.5)
    assert StepTotals(rows[:3]).losses == metrics.Losses(first=99.0, final=97.0, tail_mean=97.0)
    assert StepTotals([row(1, None)]).losses is None
    speeds = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 7.0, 9.0]
    shares = [0.1, None, 0.1, 0.1, 0.1, 0.5, None, 0.7]
    rows = [replace(row(1, 1.0, speed), mfu=share) for speed, share in zip(speeds, shares, strict=True)]
    fields = StepTotals(rows).fields()
    assert (fields["tokens_per_s"], fields["mfu"]) == (7.0, 0.6)
    fields = StepTotals(rows[:5]).fields()
    assert (fields["tokens_per_s"], fields["mfu"]) == (1.0, 0.1)
    skipped = replace(row(2, None), held_out={"loss": 2.0}, peak_memory=7)
    fields = StepTotals([row(1, 1.0, 3.0), skipped, row(3, 1.0)]).fields()
    assert (fields["held_out"], fields["peak_memory"], fields["skipped_steps"]) == ({"loss": 2.0}, 7, 1)
    fields = StepTotals().fields()
    assert fields["steps"] == 0 and fields["tokens_per_s"] is fields["mfu"] is fields["losses"] is None


def test_result_round_trip(tmp_path):
    result = fake_runs.result("fp8 rowwise", state_bytes_per_parameter=None)
    result.write(tmp_path)
    assert RunResult.read(tmp_path) == result
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    earlier = {key: value for key, value in asdict(result).items() if key != "state_bytes_per_parameter"}
    (tmp_path / "run.json").write_text(json.dumps(earlier))
    assert RunResult.read(tmp_path) == result
    with pytest.raises(ValueError, match=r"holds no run\.json"):
        RunResult.read(tmp_path / "other")
    fields = asdict(result)
    for name in ("steps", "losses", "tokens_per_s", "versions", "precision", "converted"):
        for value in ([], "x" if name not in ("precision", "converted") else 3, {"first": 3}):
            (tmp_path / "run.json").write_text(json.dumps(fields | {name: value}))
            with pytest.raises(ValueError, match=rf"run\.json is not the summary of a run: {name}\b"):
                RunResult.read(tmp_path)


ROWS = {
    "metrics.jsonl": {
        "step": 1, "tokens": 64, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": None, "skipped": False,
        "step_s": 1.0, "tokens_per_s": 64.0,
    },
    "events.jsonl": {"step": 3, "event": "rollback", "text": "", "to": 2, "rollbacks": 1, "skipped_batches": 1},
    "statistics.jsonl": fake_runs.operand().to_json(),
}  # fmt: skip
READERS = {"metrics.jsonl": read_metrics, "events.jsonl": read_events, "statistics.jsonl": read_statistics}
CASES = [(name, field) for name, row in ROWS.items() for field in row]
WRONG = ["3", [3.0], {"a": 1}, float("nan"), -1j]


def wrong(name, field, value):
    """A line with this value in this field; -1j for none."""
    row = ROWS[name] | {field: value}
    if value == -1j:
        del row[field]
    return json.dumps(row)


@pytest.mark.parametrize(("name", "field"), CASES)
def test_a_field_of_another_type_is_named(name, field, tmp_path):
    strings = ("text", "event", "layer", "operand", "recipe")
    good = json.dumps(ROWS[name])
    for value in WRONG:
        if (isinstance(value, str) and field in strings) or (field == "what_if" and isinstance(value, dict)):
            continue  # that is its type
        if value == -1j and field in ("to", "rollbacks", "skipped_batches"):
            continue  # below
        (tmp_path / name).write_text(f"{good}\n{wrong(name, field, value)}\n")
        with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path / name))}, line 2 is not .*: {field}\b"):
            READERS[name](tmp_path)


@pytest.mark.parametrize("field", ["to", "skipped_batches"])
def test_a_rollback_is_recorded_whole(field, tmp_path):
    (tmp_path / "events.jsonl").write_text(wrong("events.jsonl", field, -1j) + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl, line 1 is not an event .*: come with to and skipped_batches"):
        READERS["events.jsonl"](tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_a_line_of_something_else(name, tmp_path):
    good, extra = json.dumps(ROWS[name]).encode(), json.dumps(ROWS[name] | {"extra": 1}).encode()
    for line in (b"[]", b"3", b"null", b"", b"{", b'{"step": 1}', b"\xff", b"[" * 100_000, extra):
        (tmp_path / name).write_bytes(good + b"\n" + line + b"\n")
        with pytest.raises(ValueError, match=rf"{re.escape(name)}, line 2 is not .*: {'extra: ' * (line == extra)}.+"):
            READERS[name](tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "statistics.jsonl"])
@pytest.mark.parametrize(("steps", "line"), [((1, 2, 3, 2), 4), ((4, 3, 2, 1), 2), ((1, 2, 0), 3), ((10**30,), 1)])
def test_steps_in_another_order(name, steps, line, tmp_path):
    (tmp_path / name).write_text("".join(json.dumps(ROWS[name] | {"step": step}) + "\n" for step in steps))
    with pytest.raises(ValueError, match=rf"{re.escape(name)}, line {line} is not .*: .*step"):
        READERS[name](tmp_path)


def test_missing_and_repeated_steps_of_the_curve(tmp_path):
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
        with pytest.warns(RuntimeWarning, match=rf"lacks {9 - len(rows)} of 9 steps, .* step {len(rows) + 1}:"):
            MetricsWriter(run, after_step=9, log_every=1).__exit__()


@pytest.mark.parametrize("name", ROWS)
def test_a_torn_last_line_is_left_out_with_a_warning(name, tmp_path):
    good = json.dumps(ROWS[name])
    for torn in (good[:20], good, "[", "\xff"):
        (tmp_path / name).write_text(f"{good}\n{torn}")
        with pytest.warns(RuntimeWarning, match=rf"{re.escape(name)}, line 2 is left out"):
            assert len(READERS[name](tmp_path)) == 1


def test_a_resume_checks_the_steps_that_it_keeps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(wrong("metrics.jsonl", "loss", "3") + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 .*loss: "):
        MetricsWriter(tmp_path, after_step=9, log_every=1)
    assert "loss" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layers.json", "[3]"), ("layers.json", '[{"name": 3}]'), ("layers.json", "{"), ("layers.json", "[" * 100_000),
        ("config.toml", "inspect = 3"), ("config.toml", "[inspect]\nlimits = 3"), ("config.toml", "="),
        ("config.toml", "x = " + "[" * 3000),
        ("config.toml", '[inspect.limits]\nsqnr = "a"'), ("config.toml", "[inspect.limits]\nb = 1"),
    ],
)  # fmt: skip
def test_other_files_of_a_run(name, text, tmp_path):
    run = folder(tmp_path / "run")
    (run / name).write_text(text)
    read = metrics.limits_of if name == "config.toml" else lambda run: write_report([run], tmp_path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(run / name))} is not "):
        read(run)


@pytest.mark.parametrize("name", ["report.html", "verdict.json"])
def test_no_report_is_written_through_a_link(name, tmp_path):
    runs = [folder(tmp_path / "a"), folder(tmp_path / "b", "fp8 rowwise")]
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "mine")
    write_report(runs, tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "out" / name).is_symlink()


H100 = "NVIDIA H100 80GB HBM3"
ROW = step(5, tokens=320, step_s=0.5, tokens_per_s=128.0)


def gauged(expected, skipped_batches=0):
    config = SimpleNamespace(optim=SimpleNamespace(batch=4))
    ranks = SimpleNamespace(device=torch.device("cpu"))
    trainer = SimpleNamespace(config=config, ranks=ranks, skipped_batches=skipped_batches)
    return with_gauges(ROW, trainer, SimpleNamespace(data=metrics.DataSize(rows=40), expected=expected))


def test_a_run_on_a_cpu(make_config, tmp_path):
    before = time.time()
    run(make_config(), out=tmp_path)
    rows, setup = read_metrics(tmp_path), metrics.RunSetup.read(tmp_path)
    assert setup is not None and setup.data is not None and setup.expected is None
    assert (setup.steps, setup.data.documents) == (6, 4) and before <= setup.started <= rows[0].time
    assert [row.epoch for row in rows] == [row.step * 4 / setup.data.rows for row in rows]
    assert [row.time for row in rows] == sorted(row.time for row in rows)
    assert all(row.mfu is None and row.peak_memory is None for row in rows)
    done = RunResult.read(tmp_path)
    assert setup.summary.parameters == done.parameters and setup.summary.steps == 0
    (tmp_path / "setup.json").write_text('{"started": "now"}')
    with pytest.raises(ValueError, match=r"setup\.json is not the setup of a run: started"):
        metrics.RunSetup.read(tmp_path)


def test_mfu_and_position():
    expected = metrics.ExpectedStep(gpu="H100 SXM", flops=1e14, bf16_flops=989e12, fp8_flops=1979e12)
    row = gauged(expected)
    assert row.mfu == pytest.approx(1e14 / 0.5 / 989e12) and row.epoch == 5 * 4 / 40
    assert row == replace(ROW, mfu=row.mfu, epoch=row.epoch, time=row.time)
    assert gauged(expected, skipped_batches=5).epoch == 1.0  # as after a rollback
    assert gauged(None).mfu is None


def test_the_prediction_waits_for_the_first_step(monkeypatch, make_config, tmp_path):
    steps = []

    def expected(trainer, progress):
        steps.append(trainer.step)
        assert "expected" in (tmp_path / "setup.json").read_text() and metrics.RunSetup.read(tmp_path).expected is None
        time.sleep(0.05)
        return metrics.ExpectedStep(gpu="H100 SXM", flops=1e6, bf16_flops=989e12, fp8_flops=1979e12)

    monkeypatch.setattr(loop, "_expected", expected)
    result = run(make_config(), out=tmp_path)
    rows, setup = read_metrics(tmp_path), metrics.RunSetup.read(tmp_path)
    assert steps == [1] and setup is not None and setup.expected is not None and setup.expected.gpu == "H100 SXM"
    assert [row.mfu for row in rows] == [1e6 / row.step_s / 989e12 for row in rows]
    assert rows[1].time - rows[0].time > rows[1].step_s + 0.05  # a step ended before its prediction
    stages = result.startup
    assert stages is not None and list(stages)[-1] == "first step" and stages["first step"]["wall"] >= rows[0].step_s


@pytest.mark.slow
def test_the_expected_step_is_the_plans(make_config):
    config = make_config(optim={"batch": 8, "micro_batches": 2}, precision={"level": "fp8"})
    planned = plan_configured(config, gpu="h100", gpus=2)
    expected = expected_step(config, H100, 2)
    assert expected == metrics.ExpectedStep(
        gpu="H100 SXM", flops=planned.time.flops, bf16_flops=2 * 989e12, fp8_flops=2 * 1979e12,
        memory=planned.memory.peak, tokens_per_s=planned.time.tokens_per_second,
    )  # fmt: skip
    layers = 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 300
    assert expected.flops == pytest.approx(6 * layers * 8 * 16, rel=0.1)  # and attention
    heads = {"type": "llama", "config": LLAMA | {"num_key_value_heads": 2}}
    single = expected_step(make_config(model=heads, optim={"batch": 8}), H100, 1)
    divided = expected_step(make_config(model=heads, optim={"batch": 8}, parallel={"tp": 2}), H100, 2)
    assert divided is not None and single is not None and divided.flops == pytest.approx(single.flops)
    assert divided.bf16_flops == 2 * single.bf16_flops and divided.memory is None is divided.tokens_per_s


def test_no_prediction(make_config):
    assert expected_step(make_config(), "NVIDIA Unknown 9000", 1) is None
    long = make_config(data={"sequence_length": 1 << 20})
    rejected("max_position_embeddings", expected_step, long, H100, 1)


# --- `[inspect]`: statistics of operands, and that training does not notice ---


fp8 = {"level": "fp8"}


def looked(make_config, every=2, **sections):
    return make_config(**{"precision": fp8, "inspect": {"every": every, "what_if": ["blockwise"]}} | sections)


def steps_of(out):
    return sorted({row.step for row in read_statistics(out)})


@pytest.mark.thorough
def test_rows_of_sampled_steps_and_nothing_else_changes(make_config, tmp_path):
    run(looked(make_config, every=0), out=tmp_path / "plain")
    run(looked(make_config), out=tmp_path / "looked")
    assert not (tmp_path / "plain" / metrics.STATISTICS_FILE).exists()
    rows = read_statistics(tmp_path / "looked")
    assert steps_of(tmp_path / "looked") == [2, 4, 6]
    assert len(rows) == 3 * 21 * len(OPERANDS)  # three blocks of seven linears
    assert all(set(row.what_if) == {"blockwise"} and row.recipe == "rowwise" for row in rows)
    assert curve(tmp_path / "looked") == curve(tmp_path / "plain")
    events = EventAccumulator(str(tmp_path / "looked" / "tensorboard")).Reload()
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
    lines = (tmp_path / metrics.STATISTICS_FILE).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["sqnr"] for line in lines] == ["inf", None]
    assert read_statistics(tmp_path)[0] == row
    scalars = [call.args[1] for call in board.add_scalar.call_args_list]
    assert scalars and all(map(math.isfinite, scalars))


def test_statistics_of_a_checkpoint_are_those_before_it(tmp_path):
    for number in (2, 4):
        sample(tmp_path, operand(number))
    assert [row.step for row in metrics.statistics_of(tmp_path)] == [2, 4]
    assert [row.step for row in metrics.statistics_of(tmp_path / "checkpoints" / "step-000003")] == [2]
    with pytest.raises(ValueError, match="there is no folder .*elsewhere"):
        metrics.statistics_of(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"no statistics up to step 1: train with inspect\.every=50"):
        metrics.statistics_of(tmp_path / "checkpoints" / "step-000001")


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


# --- servers that may be slow, away or broken; they are stand-ins ---


class Server:
    def __init__(self):
        self.runs, self.closed, self.names = {}, [], []

    def remote(self, out, name, config, id):
        self.names.append((name, config))
        id = id or f"run{len(self.runs)}"
        log = lambda step, scalars: self.runs[id].append((step, dict(scalars)))  # noqa: E731
        close = partial(self.closed.append, id)
        return SimpleNamespace(id=id, open=lambda: self.runs.setdefault(id, []), log=log, close=close)


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setitem(loggers.REMOTES, "wandb", server.remote)
    return server


def log_of(tmp_path, notes, names=("wandb",)):
    return ScalarLog(Mock(), names, tmp_path, "a run", {"run.steps": 3}, notes.append)


def write(log, steps):
    for number in steps:
        log.add_scalar("train/loss", 1.0 / number, number)
        log.add_scalar("train/lr", 0.1, number)


def test_scalars_arrive_by_step_and_a_later_process_goes_on(tmp_path, server):
    notes = []
    log = log_of(tmp_path, notes)
    write(log, (1, 2))
    log.close()
    again = log_of(tmp_path, notes)
    write(again, (2, 3))  # as after a rollback
    again.close()
    expected = [(step, {"train/loss": 1.0 / step, "train/lr": 0.1}) for step in (1, 2, 2, 3)]
    assert server.runs == {"run0": expected} and server.closed == ["run0", "run0"] and not notes
    assert json.loads((tmp_path / LOGGERS_FILE).read_text()) == {"wandb": "run0"}
    assert log._board.close.called and log._board.add_scalar.call_count == 4


@pytest.mark.parametrize("when", ["make", "open", "log", "close"])
def test_a_server_that_fails_is_noted_once_and_training_goes_on(tmp_path, monkeypatch, when):
    make = Mock(return_value=Mock(id="1"))
    failing = make if when == "make" else getattr(make.return_value, when)
    failing.side_effect = ConnectionError("no route to host\nmore")
    monkeypatch.setitem(loggers.REMOTES, "mlflow", make)
    notes = []
    log = log_of(tmp_path, notes, ("mlflow",))
    write(log, range(1, 50))
    log.close()
    assert notes == ["mlflow gets no more metrics (no route to host); training goes on, metrics.jsonl has all"]
    assert log._board.add_scalar.call_count == 98


def test_a_server_that_hangs_takes_a_limited_memory_and_is_noted_once(tmp_path, monkeypatch):
    release, failed = threading.Event(), threading.Event()

    def opened(*_):
        release.wait(20)
        failed.set()
        raise ConnectionError("too late")

    monkeypatch.setattr(loggers, "CLOSING_S", 0.05)
    monkeypatch.setattr(loggers, "PENDING", 10)
    monkeypatch.setitem(loggers.REMOTES, "wandb", opened)
    notes = []
    log = log_of(tmp_path, notes)
    write(log, range(1, 100))
    assert log._senders[0]._queue.qsize() == 10
    log.close()
    release.set()
    assert failed.wait(10)
    log._senders[0]._thread.join(10)
    assert notes == ["wandb gets no more metrics (10 values wait for it); training goes on, metrics.jsonl has all"]


def test_a_client_that_exits_is_noted(tmp_path, monkeypatch):
    """A thread ends in silence with SystemExit."""
    monkeypatch.setitem(loggers.REMOTES, "wandb", lambda *_: sys.exit("no key"))
    notes = []
    log = log_of(tmp_path, notes)
    log.close()
    assert notes == ["wandb gets no more metrics (no key); training goes on, metrics.jsonl has all"]


def test_a_run_and_its_resumption_on_one_server(tmp_path, make_config, server, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: name)
    config = make_config(run={"name": "r", "steps": 2, "loggers": "wandb"}, optim={"warmup": 0})
    run(config, out=tmp_path / "out")
    longer = make_config(run={"name": "r", "steps": 3, "loggers": ["wandb"]}, optim={"warmup": 0})
    result = run(longer, out=tmp_path / "out", resume=True)
    (rows,) = server.runs.values()
    assert [step for step, _ in rows] == [1, 2, 3] and len(server.closed) == 2
    assert rows[-1][1]["train/loss"] == result.losses.final
    name, settings = server.names[0]
    assert name == "r" and settings["run.steps"] == 2 and settings["optim.batch"] == config.optim.batch


def test_a_run_without_the_package_writes_nothing(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    config = make_config(run={"steps": 1, "loggers": ["wandb"]}, optim={"warmup": 0})
    refused_run("pip install wandb", config, tmp_path / "out")

"""What steps say besides their losses: position in the data, MFU by the planner's operations, the predicted memory."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_runs
import pytest
import torch
from tiny_runs import LLAMA, MakeConfig

from octavo.train import ConfigError, Progress, loop, read_metrics, run
from octavo.train.gauges import Gauges, expected_step
from octavo.train.record.metrics import DataSize, ExpectedStep, RunResult, RunSetup, StepMetrics
from octavo.train.run_plan import plan_configured
from octavo.train.trainer import Trainer

H100 = "NVIDIA H100 80GB HBM3"
ROW = StepMetrics(
    step=5, tokens=320, loss=3.0, lr=1e-3, grad_norm=1.0, loss_scale=None, skipped=False, step_s=0.5, tokens_per_s=128.0
)


def gauges(expected: ExpectedStep | None, skipped_batches: int = 0) -> Gauges:
    config = SimpleNamespace(optim=SimpleNamespace(batch=4), run=SimpleNamespace(steps=9))
    task = SimpleNamespace(data_size=lambda: DataSize(rows=40))
    ranks = SimpleNamespace(device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(config=config, task=task, ranks=ranks, skipped_batches=skipped_batches)
    gauges = Gauges(trainer, fake_runs.result())
    gauges.setup.expected = expected
    return gauges


def test_a_run_on_a_cpu(make_config: MakeConfig, tmp_path: Path) -> None:
    before = time.time()
    run(make_config(), out=tmp_path)
    rows, setup = read_metrics(tmp_path), RunSetup.read(tmp_path)
    assert setup is not None and setup.data is not None and setup.expected is None
    assert (setup.steps, setup.data.documents) == (6, 4) and before <= setup.started <= rows[0].time
    assert [row.epoch for row in rows] == [row.step * 4 / setup.data.rows for row in rows]
    assert [row.time for row in rows] == sorted(row.time for row in rows)
    assert all(row.mfu is None and row.peak_memory is None for row in rows)
    done = RunResult.read(tmp_path)
    assert setup.summary.parameters == done.parameters and setup.summary.steps == 0
    (tmp_path / "setup.json").write_text('{"started": "now"}')
    with pytest.raises(ValueError, match=r"setup\.json is not the setup of a run: started"):
        RunSetup.read(tmp_path)


def test_mfu_and_position() -> None:
    expected = ExpectedStep(gpu="H100 SXM", flops=1e14, bf16_flops=989e12, fp8_flops=1979e12)
    row = gauges(expected).read(ROW)
    assert row.mfu == pytest.approx(1e14 / 0.5 / 989e12) and row.epoch == 5 * 4 / 40
    assert row == replace(ROW, mfu=row.mfu, epoch=row.epoch, time=row.time)
    assert gauges(expected, skipped_batches=5).read(ROW).epoch == 1.0  # as after a rollback
    assert gauges(None).read(ROW).mfu is None


def test_the_prediction_waits_for_the_first_step(
    monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig, tmp_path: Path
) -> None:
    steps: list[int] = []

    def expected(trainer: Trainer, progress: Progress) -> ExpectedStep:
        steps.append(trainer.step)
        assert "expected" in (tmp_path / "setup.json").read_text() and RunSetup.read(tmp_path).expected is None
        time.sleep(0.05)
        return ExpectedStep(gpu="H100 SXM", flops=1e6, bf16_flops=989e12, fp8_flops=1979e12)

    monkeypatch.setattr(loop, "_expected", expected)
    result = run(make_config(), out=tmp_path)
    rows, setup = read_metrics(tmp_path), RunSetup.read(tmp_path)
    assert steps == [1] and setup is not None and setup.expected is not None and setup.expected.gpu == "H100 SXM"
    assert [row.mfu for row in rows] == [1e6 / row.step_s / 989e12 for row in rows]
    assert rows[1].time - rows[0].time > rows[1].step_s + 0.05  # a step ended before its prediction
    stages = result.startup
    assert stages is not None and list(stages)[-1] == "first step" and stages["first step"]["wall"] >= rows[0].step_s


@pytest.mark.slow
def test_the_expected_step_is_the_plans(make_config: MakeConfig) -> None:
    config = make_config(optim={"batch": 8, "micro_batches": 2}, precision={"level": "fp8"})
    planned = plan_configured(config, gpu="h100", gpus=2)
    expected = expected_step(config, H100, 2)
    assert expected == ExpectedStep(
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


def test_no_prediction(make_config: MakeConfig) -> None:
    assert expected_step(make_config(), "NVIDIA Unknown 9000", 1) is None
    long = make_config(data={"sequence_length": 1 << 20})
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        expected_step(long, H100, 1)

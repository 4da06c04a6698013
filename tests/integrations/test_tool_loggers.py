"""Findings and moves of the autopilot reach the loggers of each tool: fakes and TensorBoard's files."""

from typing import ClassVar

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainingArguments

import octavo
from octavo.integrations.accelerate import Fp8Accelerator
from octavo.integrations.monitor import Monitor, monitor_of
from octavo.integrations.transformers import Fp8Trainer

pytestmark = pytest.mark.thorough
NAMES = {"octavo/findings", "octavo/lowest_sqnr_db", "octavo/moved_layers"}


@pytest.fixture(autouse=True)
def fresh_settings():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def harmed(llama):
    """A model with one huge channel, which a scale per tensor cannot hold."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, 3] *= 3e5
        model.model.layers[0].mlp.up_proj.weight[3] *= 3e4
    return model


def batches(samples):
    return torch.stack([row["input_ids"] for row in samples[:16]]).split(4)


def scalars(folder):
    """The values of each scalar in TensorBoard's files, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in sorted(folder.rglob("events.out*")):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return found


def test_accelerates_trackers(harmed, samples, tmp_path):
    from accelerate.tracking import GeneralTracker

    class Fake(GeneralTracker):
        name, requires_logging_directory, tracker, main_process_only = "fake", False, None, True
        logged: ClassVar = []

        def store_init_configuration(self, values):
            pass

        def log(self, values, step, **kwargs):
            self.logged.append((step, values))

    accelerator = Fp8Accelerator(
        cpu=True, precision={"recipe": "tensorwise"}, inspect_every=2, autopilot=True,
        log_with=[Fake(), "tensorboard"], project_dir=str(tmp_path), gradient_accumulation_steps=1,
    )  # fmt: skip
    accelerator.init_trackers("run")
    model, optimizer = accelerator.prepare(harmed, torch.optim.AdamW(harmed.parameters(), lr=1e-3))
    for batch in batches(samples):
        model.train()
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()  # evaluation between steps is no part of them
        with torch.no_grad():
            model(input_ids=batch)
    accelerator.end_training()
    steps = [step for step, _ in Fake.logged]
    assert steps[0] == 1 and 4 in steps and all(values.keys() == NAMES for _, values in Fake.logged)
    moved = {change.layer for change in accelerator._monitor.autopilot.changes}
    assert Fake.logged[-1][1]["octavo/moved_layers"] == len(moved) > 0
    assert list(scalars(tmp_path)["octavo/moved_layers"]) == steps


def test_transformers_to_tensorboard(harmed, samples, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = Fp8Trainer(model=harmed, args=arguments(tmp_path, "tensorboard"), **inspected(samples))
    trainer.train()
    found = scalars(tmp_path)
    assert {f"train/{name}" for name in NAMES} <= found.keys()
    assert found["train/octavo/moved_layers"][4] > 0
    assert "octavo: step" in capsys.readouterr().err  # each move is printed


def arguments(folder, tracker):
    return TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to=[tracker],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip


def inspected(samples):
    return {"train_dataset": samples, "precision": {"recipe": "tensorwise"}, "inspect_every": 1, "autopilot": True}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*does not have many")
def test_lightnings_loggers(harmed, samples, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.loggers import TensorBoardLogger

    from octavo.integrations.lightning import Fp8Precision

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = harmed

        def training_step(self, batch):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    plugin = Fp8Precision({"recipe": "tensorwise"}, autocast=False, inspect_every=1, autopilot=True)
    trainer = lightning.Trainer(
        plugins=[plugin], max_steps=4, accelerator="cpu", logger=TensorBoardLogger(tmp_path),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.cat(batches(samples)), batch_size=4))
    found = scalars(tmp_path)
    assert NAMES <= found.keys() and found["octavo/moved_layers"][3] > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_fabrics_loop_logs_what_the_plugin_found(harmed, samples):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from octavo.integrations.lightning import FabricFp8Precision

    plugin = FabricFp8Precision({"recipe": "tensorwise"}, autocast=False, inspect_every=2)
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    model, optimizer = fabric.setup(harmed, torch.optim.AdamW(harmed.parameters(), lr=1e-3))
    logged = []
    for batch in batches(samples):
        fabric.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(plugin.metrics())
    assert [sorted(metrics) for metrics in logged] == [[], ["octavo/findings", "octavo/lowest_sqnr_db"]] * 2
    assert logged[1]["octavo/findings"] > 0


def test_a_monitor_needs_a_number_of_steps(llama):
    model = octavo.convert(llama(), verbose=False)
    assert monitor_of(model, 0, False, verbose=False) is None
    assert isinstance(monitor_of(model, 0, True, verbose=False), Monitor)
    with pytest.raises(ValueError, match="inspect_every is a number of steps, or 0 for none; got -1"):
        monitor_of(model, -1, False, verbose=False)

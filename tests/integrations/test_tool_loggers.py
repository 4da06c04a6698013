"""Losses, findings and moves of the autopilot reach the loggers of each tool: TensorBoard's files, those of Weights &
Biases, and MLflow's database.
"""

import math
import struct
from typing import ClassVar

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")

import octavo
from octavo.integrations.accelerate import Fp8Accelerator
from octavo.integrations.common import Monitor, monitor_of
from octavo.integrations.transformers import Fp8Trainer
from support.tool_loops import lightning_task, lightning_trainer, training_arguments

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("fresh_settings"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*does not have many"),
]
NAMES = {"octavo/findings", "octavo/lowest_sqnr_db", "octavo/moved_layers"}
PRECISION = {"precision": {"recipe": "tensorwise"}, "autopilot": True}


class TensorBoard:
    name = "tensorboard"

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "logs"))

    def lightning(self):
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(self.folder)

    def metrics(self):
        """The values of each metric, in order."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        values = {}
        for path in sorted(self.folder.rglob("events.out*")):
            events = EventAccumulator(str(path)).Reload()
            for tag in events.Tags()["scalars"]:
                values.setdefault(tag, []).extend(event.value for event in events.Scalars(tag))
        return values


def log_records(log, position=7, block=32768):
    """The records of a log in LevelDB's format, after a header of 7 bytes."""
    whole = b""
    while position < len(log):
        if (left := block - position % block) < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", log[position : position + 7])
        whole = (b"" if kind in (1, 2) else whole) + log[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield whole


class Wandb:
    """Weights & Biases without a server: a log of records."""

    name = "wandb"

    def __init__(self, folder, monkeypatch):
        self.wandb = pytest.importorskip("wandb", reason="wandb is not installed: make test-tools")
        self.folder = folder
        for name, value in {"MODE": "offline", "DIR": str(folder), "SILENT": "true", "PROJECT": "octavo"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)

    def lightning(self):
        from lightning.pytorch.loggers import WandbLogger

        return WandbLogger(save_dir=str(self.folder), offline=True, project="octavo")

    def metrics(self):
        from wandb.proto.wandb_internal_pb2 import Record

        if self.wandb.run is not None:
            self.wandb.finish()
        self.wandb.teardown()  # its service has written all then
        values = {}
        for path in self.folder.rglob("*.wandb"):
            for data in log_records(path.read_bytes()):
                record = Record()
                record.ParseFromString(data)
                for item in record.history.item:
                    value = float(item.value_json) if item.value_json not in ("", "null") else math.nan
                    values.setdefault(item.key or "/".join(item.nested_key), []).append(value)
        return values


class Mlflow:
    """MLflow with a database in a file."""

    name = "mlflow"

    def __init__(self, folder, monkeypatch):
        self.mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: make test-tools")
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", self.uri)
        self.mlflow.set_tracking_uri(self.uri)

    def lightning(self):
        from lightning.pytorch.loggers import MLFlowLogger

        return MLFlowLogger(tracking_uri=self.uri)

    def metrics(self):
        self.mlflow.end_run()
        client = self.mlflow.MlflowClient(self.uri)
        values = {}
        for experiment in client.search_experiments():
            for run in client.search_runs([experiment.experiment_id]):
                for key in run.data.metrics:
                    values[key] = [metric.value for metric in client.get_metric_history(run.info.run_id, key)]
        return values


@pytest.fixture(params=[TensorBoard, Wandb, Mlflow], ids=lambda kind: kind.name)
def logger(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return request.param(tmp_path, monkeypatch)


def check(values, prefix=""):
    for name in NAMES:
        assert values[prefix + name], name
    assert values[f"{prefix}octavo/moved_layers"][-1] > 0
    assert len(values[f"{prefix}loss"]) == 4


def test_transformers_report_to(logger, harmed, samples, tmp_path, capsys):
    arguments = training_arguments(tmp_path / "out", max_steps=4, report_to=[logger.name])
    Fp8Trainer(model=harmed, args=arguments, train_dataset=samples, inspect_every=1, **PRECISION).train()
    check(logger.metrics(), "" if logger.name == "mlflow" else "train/")
    assert "octavo: step" in capsys.readouterr().err  # each move is printed


def test_accelerates_log_with(logger, harmed, batches, tmp_path):
    from accelerate.tracking import GeneralTracker

    class Fake(GeneralTracker):
        name, requires_logging_directory, tracker, main_process_only = "fake", False, None, True
        logged: ClassVar = []

        def store_init_configuration(self, values):
            pass

        def log(self, values, step, **kwargs):
            self.logged.append((step, values))

    accelerator = Fp8Accelerator(
        cpu=True, inspect_every=2, log_with=[Fake(), logger.name], project_dir=str(tmp_path), **PRECISION
    )  # fmt: skip
    accelerator.init_trackers("octavo")
    model, optimizer = accelerator.prepare(harmed, torch.optim.AdamW(harmed.parameters(), lr=1e-3))
    for number, batch in enumerate(batches):
        model.train()
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=number + 1)
        model.eval()  # evaluation between steps is no part of them
        with torch.no_grad():
            model(input_ids=batch)
    accelerator.end_training()
    check(logger.metrics())
    ours = [(step, values) for step, values in Fake.logged if "loss" not in values]
    steps = [step for step, _ in ours]
    assert steps[0] == 1 and 4 in steps and all(values.keys() == NAMES for _, values in ours)
    moved = {change.layer for change in accelerator._monitor.autopilot.changes}
    assert ours[-1][1]["octavo/moved_layers"] == len(moved) > 0


def test_lightnings_loggers(logger, harmed, batches, tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    from octavo.integrations.lightning import Fp8Precision

    plugin = Fp8Precision(PRECISION["precision"], autocast=False, inspect_every=1, autopilot=True)
    trainer = lightning_trainer(plugin, tmp_path, 4, logger=logger.lightning(), log_every_n_steps=1)
    task = lightning_task(harmed, torch.optim.AdamW(harmed.parameters(), lr=1e-3), log=True)
    trainer.fit(task, torch.utils.data.DataLoader(torch.cat(batches), batch_size=4))
    check(logger.metrics())


def test_fabrics_loop_logs_what_the_plugin_found(harmed, batches):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from octavo.integrations.lightning import FabricFp8Precision

    plugin = FabricFp8Precision({"recipe": "tensorwise"}, autocast=False, inspect_every=2)
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    model, optimizer = fabric.setup(harmed, torch.optim.AdamW(harmed.parameters(), lr=1e-3))
    logged = []
    for batch in batches:
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

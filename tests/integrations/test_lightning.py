"""Lightning's Trainer and Fabric in FP8: the losses of a plain loop, checkpoints, optimizers that do not fit."""

import warnings

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning

import octavo
from octavo.integrations.lightning import FabricFp8Precision, Fp8Precision

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many", "ignore:.*resuming from"),
]


class Task(lightning.LightningModule):
    def __init__(self, model, make=torch.optim.AdamW):
        super().__init__()
        self.model, self.make, self.losses = model, make, []

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.make(self.model.parameters(), lr=1e-3)


def loader(samples, start=0):
    rows = torch.stack([row["input_ids"] for row in samples])[4 * start :]
    return torch.utils.data.DataLoader(rows, batch_size=4)


def trainer(plugin, folder, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(
            plugins=[plugin], max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            use_distributed_sampler=False,
        )  # fmt: skip


def by_hand(model, samples, precision, make, steps, autocast):
    octavo.convert(model, precision=precision, verbose=False)
    optimizer, losses = make(model.parameters(), lr=1e-3), []
    for _, batch in zip(range(steps), loader(samples), strict=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("level", "dtype", "autocast"), [("fp8", torch.float32, True), ("fp8+activations+optimizer", torch.bfloat16, False)]
)
def test_training_is_that_of_a_plain_loop(level, dtype, autocast, llama, samples, tmp_path):
    precision = octavo.Precision.level(level)
    make = octavo.AdamW if precision.states == "fp8" else torch.optim.AdamW
    task = Task(llama(dtype), make)
    trainer(Fp8Precision(level, autocast=autocast), tmp_path, 6).fit(task, loader(samples))
    assert task.losses == by_hand(llama(dtype), samples, precision, make, 6, autocast)


def test_a_resumed_run_ends_like_one_that_was_not_stopped(llama, samples, tmp_path):
    whole, first = Task(llama()), Task(llama())
    trainer(Fp8Precision({"recipe": "rowwise_equalized"}), tmp_path, 6).fit(whole, loader(samples))
    stopped = trainer(Fp8Precision({"recipe": "rowwise_equalized"}), tmp_path, 3)
    stopped.fit(first, loader(samples))
    stopped.save_checkpoint(tmp_path / "state.ckpt")
    resumed = Task(llama(seed=4))
    trainer(Fp8Precision({"recipe": "rowwise_equalized"}), tmp_path, 6).fit(
        resumed, loader(samples, start=3), ckpt_path=tmp_path / "state.ckpt", weights_only=True
    )
    assert resumed.losses == whole.losses[3:]


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-mixed"])
def test_another_precision_beside_the_plugin_is_refused(precision):
    """Lightning itself names both."""
    for kind, plugin in ((lightning.Trainer, Fp8Precision), (lightning.Fabric, FabricFp8Precision)):
        with pytest.raises(ValueError, match=rf"`precision={precision}` and `plugins=.*Fp8Precision.*Choose one"):
            kind(accelerator="cpu", precision=precision, plugins=[plugin("fp8")])


def test_an_optimizer_without_fp8_states_is_refused(llama, samples, tmp_path):
    plugin = Fp8Precision("fp8+activations+optimizer")
    with pytest.raises(ValueError, match=r"a torch\.optim\.adamw\.AdamW: create it with octavo\.AdamW"):
        trainer(plugin, tmp_path, 1).fit(Task(llama()), loader(samples))


def test_saved_fp8_states_are_not_loaded_by_another_optimizer(llama, samples, tmp_path):
    saving = trainer(Fp8Precision("fp8+activations+optimizer"), tmp_path, 1)
    saving.fit(Task(llama(), octavo.AdamW), loader(samples))
    saving.save_checkpoint(path := tmp_path / "state.ckpt")
    resumed = trainer(Fp8Precision("fp8+activations"), tmp_path, 2)
    with pytest.warns(UserWarning, match="precision.states = 'fp8', now"):
        with pytest.raises(ValueError, match=r"states, which torch\.optim\.adamw\.AdamW does not read: go on"):
            resumed.fit(Task(llama()), loader(samples), ckpt_path=path, weights_only=False)


def test_fabric_trains_like_a_plain_loop(llama, samples):
    plugin = FabricFp8Precision({"recipe": "rowwise_equalized"})
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    model = llama()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for _, batch in zip(range(4), loader(samples), strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    precision = octavo.Precision.level("fp8", recipe="rowwise_equalized")
    assert losses == by_hand(llama(), samples, precision, torch.optim.AdamW, 4, True)
    assert plugin.state_dict()["equalized"]

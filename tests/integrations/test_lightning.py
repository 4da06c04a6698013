"""Lightning's Trainer and Fabric in FP8: the losses of a plain loop, checkpoints, optimizers that do not fit."""

from itertools import islice

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning

import octavo
from octavo.integrations.lightning import FabricFp8Precision, Fp8Precision
from support.tool_loops import lightning_task, lightning_trainer, plain_loop

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many", "ignore:.*resuming from"),
]


def task_of(model, make=torch.optim.AdamW):
    return lightning_task(model, make(model.parameters(), lr=1e-3))


def loader(samples, start=0):
    rows = torch.stack([row["input_ids"] for row in samples])[4 * start :]
    return torch.utils.data.DataLoader(rows, batch_size=4)


def by_hand(model, samples, precision, make, steps, autocast):
    octavo.convert(model, precision=precision, verbose=False)

    def forward(**batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(**batch)

    return plain_loop(forward, make(model.parameters(), lr=1e-3), islice(loader(samples), steps))


@pytest.mark.parametrize(
    ("level", "dtype", "autocast"), [("fp8", torch.float32, True), ("fp8+activations+optimizer", torch.bfloat16, False)]
)
def test_training_is_that_of_a_plain_loop(level, dtype, autocast, llama, samples, tmp_path):
    precision = octavo.Precision.level(level)
    make = octavo.AdamW if precision.states == "fp8" else torch.optim.AdamW
    task = task_of(llama(dtype), make)
    lightning_trainer(Fp8Precision(level, autocast=autocast), tmp_path, 6).fit(task, loader(samples))
    assert task.values() == by_hand(llama(dtype), samples, precision, make, 6, autocast)


def test_a_resumed_run_ends_like_one_that_was_not_stopped(llama, samples, tmp_path):
    whole, first = task_of(llama()), task_of(llama())
    lightning_trainer(Fp8Precision({"recipe": "rowwise_equalized"}), tmp_path, 6).fit(whole, loader(samples))
    stopped = lightning_trainer(Fp8Precision({"recipe": "rowwise_equalized"}), tmp_path, 3)
    stopped.fit(first, loader(samples))
    stopped.save_checkpoint(tmp_path / "state.ckpt")
    resumed = task_of(llama(seed=4))
    lightning_trainer(Fp8Precision({"recipe": "rowwise_equalized"}), tmp_path, 6).fit(
        resumed, loader(samples, start=3), ckpt_path=tmp_path / "state.ckpt", weights_only=True
    )
    assert resumed.values() == whole.values()[3:]


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-mixed"])
def test_another_precision_beside_the_plugin_is_refused(precision):
    """Lightning itself names both."""
    for kind, plugin in ((lightning.Trainer, Fp8Precision), (lightning.Fabric, FabricFp8Precision)):
        with pytest.raises(ValueError, match=rf"`precision={precision}` and `plugins=.*Fp8Precision.*Choose one"):
            kind(accelerator="cpu", precision=precision, plugins=[plugin("fp8")])


def test_an_optimizer_without_fp8_states_is_refused(llama, samples, tmp_path):
    plugin = Fp8Precision("fp8+activations+optimizer")
    with pytest.raises(ValueError, match=r"a torch\.optim\.adamw\.AdamW: create it with octavo\.AdamW"):
        lightning_trainer(plugin, tmp_path, 1).fit(task_of(llama()), loader(samples))


def test_saved_fp8_states_are_not_loaded_by_another_optimizer(llama, samples, tmp_path):
    saving = lightning_trainer(Fp8Precision("fp8+activations+optimizer"), tmp_path, 1)
    saving.fit(task_of(llama(), octavo.AdamW), loader(samples))
    saving.save_checkpoint(path := tmp_path / "state.ckpt")
    resumed = lightning_trainer(Fp8Precision("fp8+activations"), tmp_path, 2)
    with pytest.warns(UserWarning, match="precision.states = 'fp8', now"):
        with pytest.raises(ValueError, match=r"states, which torch\.optim\.adamw\.AdamW does not read: go on"):
            resumed.fit(task_of(llama()), loader(samples), ckpt_path=path, weights_only=False)


def test_fabric_trains_like_a_plain_loop(llama, samples):
    plugin = FabricFp8Precision({"recipe": "rowwise_equalized"})
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    model = llama()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = plain_loop(model, optimizer, islice(loader(samples), 4), fabric.backward)
    precision = octavo.Precision.level("fp8", recipe="rowwise_equalized")
    assert losses == by_hand(llama(), samples, precision, torch.optim.AdamW, 4, True)
    assert plugin.state_dict()["equalized"]

"""The plain loop that tools are compared with, and how Transformers' Trainer and Lightning are set up for it."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import octavo

LR = 1e-3


def plain_loop(model, optimizer, batches, backward=torch.Tensor.backward):
    """Train on each batch in turn; the losses."""
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(model, level):
    make = octavo.AdamW if octavo.Precision.level(level).states == "fp8" else torch.optim.AdamW
    return make(model.parameters(), lr=LR)


def training_arguments(folder, cls=None, **options):
    from transformers import TrainingArguments

    defaults = {
        "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": LR, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, "optim": "adamw_torch", "weight_decay": 0.1, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return (cls or TrainingArguments)(output_dir=str(folder), **(defaults | options))


def lightning_task(model, optimizer, log=False):
    """A module that knows the losses of its steps."""
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch):
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.detach())
            if log:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return optimizer

        def values(self):
            return [loss.item() for loss in self.losses]

    return Task()


def lightning_trainer(plugin, folder, steps, **options):
    import lightning

    defaults = {"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(
            plugins=[plugin], max_steps=steps, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=str(folder), **(defaults | options),
        )  # fmt: skip


def run_script(script, folder, *words):
    """Train by a script of this folder's tests: the exit code, the loss of each step, and the digest of the weights."""
    path = os.pathsep.join([str(Path(octavo.__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    losses, weights = folder / "losses.jsonl", folder / "weights"
    by_step = dict(json.loads(line) for line in losses.read_text().splitlines())
    losses.unlink()
    return done.returncode, by_step, weights.read_text() if weights.exists() else None

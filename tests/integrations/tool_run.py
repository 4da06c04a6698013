"""Train a small Llama in FP8 for 50 steps by one tool, and go on from its last checkpoint: `tool_run.py TOOL FOLDER
[KILL_AT]`.

Each loss goes to FOLDER/losses.jsonl at once; with KILL_AT, the process ends itself by SIGKILL after that step. At the
end FOLDER/weights has a digest of the parameters. "plain" is the loop that all tools are compared with.
"""

import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

import octavo
from support.llamas import counting_rows, small_llama
from support.tool_loops import LR, lightning_task, lightning_trainer, training_arguments

STEPS, BATCH, PER_EPOCH, SAVE_EVERY = 50, 4, 10, 10


def rows():
    """The records of an epoch, int64 [40, 16]."""
    return counting_rows(PER_EPOCH * BATCH)


def model_of():
    return small_llama(torch.bfloat16)


class Record:
    """Writes losses, and ends the process when told."""

    def __init__(self, folder, kill_at):
        self.path, self.kill_at = folder / "losses.jsonl", kill_at

    def __call__(self, step, loss):
        with self.path.open("a") as file:
            file.write(json.dumps([step, loss]) + "\n")
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(state):
    """A digest of the bytes of tensors, in the order of their names."""
    found = hashlib.sha256()
    for _, tensor in sorted(state.items()):
        found.update(tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def adamw(model):
    return octavo.AdamW(model.parameters(), lr=LR)


def loop(start, model, optimizer, backward, record, save):
    """The training loop, for tools without one of their own."""
    batches = rows().split(BATCH)
    for step in range(start + 1, STEPS + 1):
        batch = batches[(step - 1) % PER_EPOCH]
        loss = model(input_ids=batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            save(step)
        record(step, loss.item())


def latest(folder, name):
    """The newest of the checkpoints NAME-STEP in a folder, and its step."""
    found = {int(path.stem.rpartition("-")[2]): path for path in folder.glob(f"{name}-*")}
    return (None, 0) if not found else (found[max(found)], max(found))


def plain(folder, precision, record):
    model = octavo.convert(model_of(), precision=precision, verbose=False)
    loop(0, model, adamw(model), torch.Tensor.backward, record, lambda step: None)
    return model


def _arguments(cls, folder, **options):
    return training_arguments(
        folder, cls, max_steps=STEPS, weight_decay=0.01, save_strategy="steps", save_steps=SAVE_EVERY, bf16=False,
        gradient_checkpointing=False, **options,
    )  # fmt: skip


def _train(base, record, folder, **options):
    class Recording(base):
        def training_step(self, *args, **kwargs):
            self.last_loss = super().training_step(*args, **kwargs)
            return self.last_loss

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            super()._maybe_log_save_evaluate(*args, **kwargs)
            record(self.state.global_step, self.last_loss.item())

    # One group, as `octavo.AdamW(model.parameters())` has.
    trainer = Recording(optimizer_cls_and_kwargs=(octavo.AdamW, {"nonfinite": "raise"}), **options)
    trainer.get_decay_parameter_names = lambda model: [name for name, _ in model.named_parameters()]
    checkpoint, _ = latest(folder, "checkpoint")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer.model


def transformers(folder, precision, record):
    from transformers import TrainingArguments

    from octavo.integrations.transformers import Fp8Trainer

    data = [{"input_ids": row, "labels": row} for row in rows()]
    args = _arguments(TrainingArguments, folder)
    return _train(
        Fp8Trainer, record, folder, model=model_of(), args=args, train_dataset=data, precision=precision
    )  # fmt: skip


def _sft(folder, model, **options):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig

    words = {f"w{n}": n for n in range(64)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    tokenizer.pad_token = tokenizer.eos_token = "w0"
    return {
        "model": model, "args": _arguments(SFTConfig, folder, dataset_kwargs={"skip_prepare_dataset": True}),
        "train_dataset": Dataset.from_dict({"input_ids": rows().tolist()}), "processing_class": tokenizer, **options,
    }  # fmt: skip


def trl(folder, precision, record):
    from trl import SFTTrainer

    from octavo.integrations.transformers import with_fp8

    fp8_trainer = with_fp8(SFTTrainer)
    return _train(fp8_trainer, record, folder, **_sft(folder, model_of(), precision=precision))


def plain_with_trl_loss(folder, precision, record):
    """TRL replaces the forward of a model by one that sums the loss in another order."""
    from trl import SFTTrainer

    model = octavo.convert(model_of(), precision=precision, verbose=False)
    trainer = SFTTrainer(**_sft(folder, model))

    def forward(input_ids, labels):
        batch = {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(labels)}
        return SimpleNamespace(loss=trainer.compute_loss(model, batch, num_items_in_batch=labels[:, 1:].numel()))

    loop(0, forward, adamw(model), torch.Tensor.backward, record, lambda step: None)
    return model


def accelerate(folder, precision, record):
    from octavo.integrations.accelerate import Fp8Accelerator

    accelerator = Fp8Accelerator(cpu=True, precision=precision)
    model = model_of()
    model, optimizer = accelerator.prepare(model, adamw(model))
    checkpoint, start = latest(folder, "state")
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
    save = lambda step: accelerator.save_state(str(folder / f"state-{step}"))  # noqa: E731
    loop(start, model, optimizer, accelerator.backward, record, save)
    return accelerator.unwrap_model(model)


def lightning(folder, precision, record):
    import lightning as tool

    from octavo.integrations.lightning import Fp8Precision

    class Recording(tool.Callback):  # after the checkpoint of a step is written
        def on_train_batch_start(self, trainer, task, *args):
            if task.losses:
                record(trainer.global_step, task.losses[-1].item())

    model = model_of()
    task = lightning_task(model, adamw(model))
    saving = tool.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, filename="at-{step}", save_top_k=-1, every_n_train_steps=SAVE_EVERY
    )
    saving.CHECKPOINT_EQUALS_CHAR = "-"
    trainer = lightning_trainer(
        Fp8Precision(precision, autocast=False), folder, STEPS, enable_checkpointing=True,
        callbacks=[saving, Recording()],
    )  # fmt: skip
    checkpoint, start = latest(folder, "at-step")
    data = rows().repeat(STEPS // PER_EPOCH, 1)[start * BATCH :]  # Lightning does not skip batches that were seen
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=BATCH), ckpt_path=checkpoint, weights_only=True)
    record(trainer.global_step, task.losses[-1].item())
    return task.model


def fabric(folder, precision, record):
    import lightning as tool

    from octavo.integrations.lightning import FabricFp8Precision

    plugin = FabricFp8Precision(precision, autocast=False)
    launched = tool.Fabric(accelerator="cpu", plugins=[plugin])
    model = model_of()
    model, optimizer = launched.setup(model, adamw(model))
    checkpoint, start = latest(folder, "fabric")
    if checkpoint is not None:
        rest = launched.load(checkpoint, {"model": model, "optimizer": optimizer})
        plugin.load_state_dict(rest["fp8"])

    def save(step):
        state = {"model": model, "optimizer": optimizer, "fp8": plugin.state_dict()}
        launched.save(folder / f"fabric-{step}.ckpt", state)

    loop(start, model, optimizer, launched.backward, record, save)
    return model.module


def main(tool, folder, kill_at="0"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    precision = octavo.Precision.level("fp8+activations+optimizer", recipe="rowwise_equalized")
    warnings.filterwarnings("error", "octavo")
    model = globals()[tool](folder, precision, Record(folder, int(kill_at)))
    (folder / "weights").write_text(digest(model.state_dict()))


if __name__ == "__main__":
    main(*sys.argv[1:])

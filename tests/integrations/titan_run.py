"""Train torchtitan's small Llama in FP8 for 50 steps on a CPU: `titan_run.py LOOP FOLDER [KILL_AT]`.

LOOP is "titan", torchtitan's own Trainer with FSDP2, mixed precision, selective checkpointing and DCP, "compiled", the
same with each block compiled, or "plain", a loop by hand from the weights in FOLDER/initial.pt that "titan" wrote.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import titan_on_cpu  # noqa: F401  (first: it replaces what torchtitan finds out about devices)
import torch
from tool_run import Record, digest, rows
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss, cross_entropy_loss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import CompileConfig, DebugConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import octavo

STEPS, BATCH, LR, SAVE_EVERY = 50, 4, 1e-3, 10
SETTINGS = {"recipe": "rowwise", "skip": ["layers.1.attention"]}


def batch(step):
    """Inputs and labels of a step, counted from 0."""
    records = rows()[BATCH * (step % 10) :][:BATCH]
    return records[:, :-1], records[:, 1:]


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, **kwargs):
        self.step = 0

    def __iter__(self):
        while True:
            inputs, labels = batch(self.step)
            self.step += 1
            yield {"input": inputs, "positions": torch.arange(inputs.shape[1]).expand_as(inputs)}, labels

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return 64


def model_spec(**options):
    """The spec of two layers of torchtitan's debug model, with an attention that runs on CPUs."""
    spec = model_registry("debugmodel", **options)
    for _, _, parent, attribute in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    del spec.model.layers[2:]
    return spec


def titan(folder, record, compiled=False):
    settings = {name: str(value) for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))}
    os.environ |= {**settings, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    config = Trainer.Config(
        model_spec=model_spec(), dump_folder=str(folder), tokenizer=NoTokenizer.Config(), dataloader=Tokens.Config(),
        loss=CrossEntropyLoss.Config(), optimizer=default_adamw(lr=LR),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(local_batch_size=BATCH, seq_len=15, steps=STEPS, disable_cuda_graphs=True),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True), debug=DebugConfig(seed=0),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=SAVE_EVERY, last_save_model_only=False, keep_latest_k=0
        ),
        override=OverrideConfig(imports=[("octavo.integrations.torchtitan.fp8", SETTINGS)]),
        compile=CompileConfig(enable=compiled, components=["model"], backend="aot_eager"),
    )  # fmt: skip
    trainer = config.build()
    initial = folder / "initial.pt"
    if not initial.exists():
        torch.save(full_state(trainer.model_parts[0]), initial)
    log = trainer.metrics_processor.log

    def recording(step, loss, *args, **kwargs):
        log(step, loss, *args, **kwargs)
        record(step, loss)

    trainer.metrics_processor.log = recording
    trainer.train()
    state = full_state(trainer.model_parts[0])
    trainer.close()
    torch.distributed.destroy_process_group()
    return state


def compiled(folder, record):
    return titan(folder, record, compiled=True)


def full_state(model):
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): value.full_tensor().clone()
        for name, value in model.state_dict().items()
    }


def plain(folder, record):
    model = model_spec().model.build()
    model.load_state_dict(torch.load(folder / "initial.pt"))
    model.init_weights = None
    octavo.convert(model, SETTINGS["recipe"], skip=SETTINGS["skip"], verbose=False)
    for module in model.modules():
        if hasattr(module, "_init_self_buffers"):
            module._init_self_buffers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, STEPS + 1):
        inputs, labels = batch(step - 1)
        parameters = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        output = torch.func.functional_call(model, parameters, (inputs,), {"positions": positions})
        loss = cross_entropy_loss(output, labels) / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        record(step, loss.item())
    return model.state_dict()


if __name__ == "__main__":
    loop, folder, *kill_at = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = globals()[loop](folder, Record(folder, int(kill_at[0]) if kill_at else 0))
    (folder / "weights").write_text(digest(state))

"""The state of a run of one process: weights and optimizer states in a file each."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from octavo.optim.sharded import local_rows
from octavo.serving.folder import apply_umask
from octavo.tensor import local_tensor
from octavo.train import lora
from octavo.train.checkpoint import shards
from octavo.train.checkpoint.pretrained import save_pretrained
from octavo.train.config.run_config import ConfigError
from octavo.train.optimizer import TrainerOptimizer


def save_whole(folder: Path, model: Any, optimizer: TrainerOptimizer) -> None:
    """Write weights, or adapters alone, and optimizer states. Raises OSError if the disk is full."""
    try:
        if lora.has_adapters(model):
            lora.save(lora.checkpointed(model), folder)
        else:
            save_pretrained(model, folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    except (RuntimeError, SafetensorError) as error:  # these two raise it for a full disk
        # torch reports the position in its archive and its own source, and safetensors its error's name.
        reason = "" if "inline_container" in str(error) else f": {' '.join(str(error).split())}"
        raise OSError(f"a file of it is cut off{reason}{shards.free_space(folder)}") from None
    apply_umask(folder)


def load_whole(folder: Path, weights: dict[str, Tensor], model: nn.Module, optimizer: TrainerOptimizer) -> None:
    """Load a checkpoint of one process: all of it, or this rank's rows. Raises ConfigError if it does not fit."""
    try:
        if shards.has_shards(model):
            state = lora.checkpointed(model)
            for name, value in state.items():
                local_tensor(value).copy_(local_rows(value, weights[name]))
            # already in place; this notifies the model of new weights
            model.load_state_dict(state, strict=not lora.has_adapters(model))
            device = "cpu"
        else:
            device = str(next(model.parameters()).device)
            model.load_state_dict(weights, strict=not lora.has_adapters(model))
        states = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True, mmap=True)
        if not isinstance(states, dict):
            raise TypeError(f"optimizer.pt holds a {type(states).__name__}")
        optimizer.load_state_dict(states)
    except Exception as error:  # no common type: damage raises any of them
        raise ConfigError(" ".join(str(error).split()) or type(error).__name__) from None

"""A checkpoint as a folder that `transformers` loads: as those of one process are already, and of many are not."""

import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from octavo.train import shards
from octavo.train.checkpoint import read_trainer_state
from octavo.train.config import ConfigError
from octavo.train.disk import output_folder
from octavo.train.model import DTYPES
from octavo.train.shards import SHARDS


def export(checkpoint: Path, out: Path) -> Path:
    """Write the weights of a checkpoint, of one process or of many, as `save_pretrained` does, with the tokenizer.

    Args:
        checkpoint: A folder step-NNNNNN.
        out: A folder that is new, or empty.

    Raises:
        ConfigError: For a folder that is no checkpoint or a damaged one, or an `out` that holds files.
    """
    if not (checkpoint / "trainer.json").exists():
        raise ConfigError(f"{checkpoint} is no checkpoint of a run: give a folder as runs/NAME/checkpoints/step-000100")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: choose another folder")
    state = read_trainer_state(checkpoint)
    with output_folder(out):
        model = _model(checkpoint, DTYPES[state["config"]["precision"]["parameters"]])
        try:
            _read(checkpoint, model)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{checkpoint} is damaged: {' '.join(str(error).split())}") from None
        model.save_pretrained(out)
        for path in checkpoint.glob("tokenizer*"):
            shutil.copy(path, out)
    return out


def _read(checkpoint: Path, model: Any) -> None:
    """Put the weights of a checkpoint of either kind into a model."""
    if (checkpoint / SHARDS).exists():
        shards.check(checkpoint / SHARDS)
        shards.read_weights(checkpoint / SHARDS, model)
    else:
        safetensors.torch.load_model(model, checkpoint / "model.safetensors")


def _model(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The model without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(settings, dtype=dtype)

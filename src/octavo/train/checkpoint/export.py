"""Export a checkpoint of one process or several to a folder that `transformers` loads."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from octavo.train.checkpoint import shards
from octavo.train.checkpoint.digests import DIGESTS, files_of, write_digests
from octavo.train.checkpoint.pretrained import (
    load_generation_config,
    load_model_config,
    load_pretrained,
    save_pretrained,
)
from octavo.train.checkpoint.shards import SHARDS
from octavo.train.checkpoint.store import check_files, read_trainer_state
from octavo.train.config.run_config import ConfigError
from octavo.train.disk import apply_umask, output_folder
from octavo.train.model import DTYPES
from octavo.train.ranks import Ranks

OWN = {"trainer.json", "optimizer.pt", DIGESTS}
"""Files of a checkpoint that `save_pretrained` does not write."""


def export(checkpoint: Path, out: Path) -> Path:
    """Write the weights of a checkpoint, of one process or of many, as `save_pretrained` does, with the tokenizer.

    `digests.json` is written beside them, so that damage is found where the folder is a run's `model.path`.

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
    check_files(checkpoint, Ranks(torch.device("cpu")))
    with output_folder(out):
        try:
            model = _read(checkpoint, DTYPES[state["config"]["precision"]["parameters"]])
            save_pretrained(model, out)
            for name in files_of(checkpoint):  # the tokenizer's, whatever they are
                path, target = checkpoint / name, out / name
                own = name in OWN or name.startswith(f"{SHARDS}/")
                if path.is_file() and not path.is_symlink() and not own and not target.exists():
                    target.parent.mkdir(exist_ok=True, parents=True)
                    shutil.copy(path, target)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{checkpoint} is damaged: {' '.join(str(error).split())}") from None
        apply_umask(out)
        write_digests(out, {})
    return out


def _read(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The model of a checkpoint of either kind."""
    if not (checkpoint / SHARDS).exists():
        return load_pretrained(checkpoint, dtype)
    from transformers import AutoModelForCausalLM

    shards.check(checkpoint / SHARDS)
    settings = load_model_config(checkpoint)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    load_generation_config(checkpoint, model)
    shards.read_weights(checkpoint / SHARDS, model)
    return model

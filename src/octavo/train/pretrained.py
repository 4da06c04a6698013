"""Folders as `save_pretrained` writes them: what a run starts from, and the weights and settings of a checkpoint.

Nothing in such a folder is run: code that comes with a model is refused, and weights are read as data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from octavo.train.config import ConfigError
from octavo.train.ranks import Ranks
from octavo.train.share import share_on_machine


def load_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    """The causal language model in `folder`, on the CPU. Raises ConfigError where it cannot be loaded whole."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with _no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except UnpicklingError:
        raise ConfigError("its weights are a pickle that names more than tensors, which is not read") from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"the model cannot be loaded: {error}") from None
    model, info = loaded
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random weights there
        raise ConfigError(f"the checkpoint lacks {missing[0]} ({len(missing)} weights in all)")
    return model


def load_weights(folder: Path, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """The weights in `folder` by the names that the model has for them, on every rank; one copy on each machine."""
    return share_on_machine(lambda: load_pretrained(folder, dtype).state_dict(), ranks)


def save_pretrained(model: Any, folder: Path) -> None:
    """Write weights and settings as `model.save_pretrained` does, without its progress bar."""
    with _no_progress_bar():
        model.save_pretrained(folder)


def save_settings(model: Any, folder: Path) -> None:
    """Write what `save_pretrained` writes of a model besides its weights.

    `model.save_pretrained` does not do for shards, whose weights are written otherwise.
    """
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

"""Where a run trains, and what that is called."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from octavo.train.config.run_config import ConfigError


def choose_device(name: str) -> torch.device:
    """The device for "auto" (CUDA where there is one), "cpu" or "cuda". Raises ConfigError for absent CUDA."""
    usable = torch.cuda.is_available()
    if name == "cuda" and not usable:
        raise ConfigError('run.device = "cuda", but torch finds no usable CUDA device: take "auto" or "cpu"')
    return torch.device("cuda" if name == "cuda" or (name == "auto" and usable) else "cpu")


def device_name(device: torch.device) -> str:
    """What a report calls the device, as "cpu" or "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable that cuBLAS reads when CUDA starts; deterministic products need it."""


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms in this context: on a GPU attention's backward adds atomically."""
    # An operation that has none raises a RuntimeError that names it. New memory is not filled: Octavo writes what it
    # allocates.
    if not enabled:
        yield
        return
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    settings: Any = torch.utils.deterministic
    before, fills = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills
        if workspace is None:
            del os.environ[WORKSPACE]

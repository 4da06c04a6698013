"""Where a run trains, and what that is called."""

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

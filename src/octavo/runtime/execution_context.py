"""The execution context of a tensor: what must be equal for a cached result to be valid for it."""

from typing import Any

import torch
from torch import Tensor

from octavo.runtime.torch_compat import current_dispatch_mode


def execution_context(x: Tensor) -> tuple[Any, ...]:
    """The dispatch mode that records work on x, the stream it runs on, and whether a CUDA graph captures it."""
    mode = current_dispatch_mode()
    if not x.is_cuda:
        return (mode,)
    return mode, stream_of(x.device), is_capturing(x.device)


def stream_of(device: torch.device) -> int:
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the current stream of a device."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()

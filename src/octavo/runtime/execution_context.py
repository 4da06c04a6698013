"""The execution context of a tensor: what must be equal for a cached result to be valid for it."""

from typing import Any

import torch
from torch import Tensor


def execution_context(x: Tensor) -> tuple[Any, ...]:
    """The dispatch mode that records work on x, the stream it runs on, and whether a CUDA graph captures it."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    if not x.is_cuda:
        return (mode,)
    return mode, torch.cuda.current_stream(x.device).cuda_stream, torch.cuda.is_current_stream_capturing()

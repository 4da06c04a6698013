"""A stand-in for a CUDA graph on a CPU: records the operations of a call, and runs them again on the same memory.

It replaces the graph only. It shows that a state is read and written where it was when the call was recorded, and that
no decision of Python's is missed. It does not show what CUDA refuses to capture, nor what happens to memory that a
graph reads and nobody holds: recorded operations hold their tensors.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """Operations inside the block, until `replay`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, outputs))
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations on what their inputs hold now; write results where the recorded ones are."""
        for func, args, kwargs, outputs in self._calls:
            for recorded, new in zip(tree_leaves(outputs), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(recorded, torch.Tensor) and recorded.data_ptr() != new.data_ptr():
                    recorded.copy_(new)

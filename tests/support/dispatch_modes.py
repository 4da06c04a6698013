import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Passing(TorchDispatchMode):
    """Pass operations on, and list them in `seen`; `look` is called with each tensor that one returns."""

    def __init__(self, look=lambda tensor: None):
        super().__init__()
        self.seen, self.look = [], look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.look(leaf)
        return out

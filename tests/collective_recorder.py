"""What a process hands to `torch.distributed`, seen where every collective passes: the dispatcher."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Position of the input argument of each c10d operation.
_INPUT_POSITION = {
    "_allgather_base_": 1, "_reduce_scatter_base_": 1, "alltoall_base_": 1, "allgather_": 1, "reduce_scatter_": 1,
    "allreduce_": 0, "broadcast_": 0, "send": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective: its name in c10d, the bytes this rank gave, and their dtype."""

    name: str
    bytes: int
    dtype: torch.dtype


class CollectiveRecorder(TorchDispatchMode):
    """Records collectives while it is on."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def named(self, name):
        return [call for call in self.calls if call.name == name]

    def bytes(self, name, dtype=None):
        return sum(call.bytes for call in self.named(name) if dtype in (None, call.dtype))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name in _INPUT_POSITION:
                tensors = _flat(args[_INPUT_POSITION[name]])
                self.calls.append(Call(name, sum(t.nbytes for t in tensors), tensors[0].dtype))
            elif not name.startswith(("recv", "barrier", "monitored")):
                raise AssertionError(f"a collective that this recorder does not know: {name}")
        return func(*args, **(kwargs or {}))


def _flat(value):
    return [value] if isinstance(value, Tensor) else [t for v in value for t in _flat(v)]

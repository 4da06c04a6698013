"""Products of bf16 tensors in float32: on CPUs without bf16 instructions, PyTorch's own take many times as long."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default)


class Float32Products(TorchDispatchMode):
    """Multiplies bf16 tensors in float32 and rounds the result once, as bf16 instructions do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        bf16 = [isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in args]
        if func not in _PRODUCTS or not any(bf16) or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        wide = (value.float() if is_bf16 else value for value, is_bf16 in zip(args, bf16, strict=True))
        return func(*wide, **(kwargs or {})).bfloat16()

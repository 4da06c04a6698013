"""adamw: one step on many parameters, with moments in FP8 or float32 and exact masters in 16 bits or 32."""

from octavo.kernels.adamw.moments import GROUP, compress, expand, groups
from octavo.kernels.adamw.reference import Hyper, Slot, split, step

__all__ = ["GROUP", "Hyper", "Slot", "compress", "expand", "groups", "split", "step"]

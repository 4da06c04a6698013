"""One kernel with everything it is compiled with: what a backend launches, and what can be compiled without a GPU.

Imports Triton, so only the Triton backends and the tools that look at them import this.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's CPU interpreter (TRITON_INTERPRET=1 when Triton was imported)."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel with its compile-time constants.

    Attributes:
        kernel: The `@triton.jit` function.
        constants: Its `tl.constexpr` arguments.
        num_warps: Warps per program.
        num_stages: Depth of software pipelining of its loops.
    """

    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3

    def run(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Launch on `grid` programs with those of `arguments` that the kernel takes.

        Triton launches on the current device, whatever its tensors are on, so that is made theirs. Products and sums
        are never contracted to fused multiply-adds: the reference rounds after each.
        """
        taken = {name: arguments[name] for name in self.kernel.arg_names if name in arguments}
        device = next(value.device for value in taken.values() if isinstance(value, torch.Tensor))
        with torch.cuda.device(device) if _elsewhere(device) else nullcontext():
            self.kernel[grid](
                **taken, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=False
            )


def _elsewhere(device: torch.device) -> bool:
    """Whether a device is a GPU, but not the current one."""
    return device.type == "cuda" and device.index not in (None, torch.cuda.current_device())


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way an op is compiled: one kernel in one configuration for bf16 input, aligned and contiguous.

    Attributes:
        op: Op, as in `torch.ops.octavo`.
        case: What distinguishes it within the op, such as `"e4m3/row fold=columns both"`.
        config: Index of its configuration (tile, warps, stages) among those of its kernel; 0 is the default.
        launch: What is compiled.
        types: Triton types of the arguments that are not sizes; a size is an i32 divisible by 16.
        tile: Elements of the input that one program handles, or handles per trip of its loops.
        device_bytes: Bytes per element of the input that this launch moves through device memory.
        ones: Arguments that are 1 here, such as the stride between columns.
        trips: Trips of its loops, for 4096 columns (or a contraction over 4096).
    """

    op: str
    case: str
    config: int
    launch: Launch
    types: dict[str, str]
    tile: int
    device_bytes: float
    ones: tuple[str, ...] = field(default=())
    trips: int = 1

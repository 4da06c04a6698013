"""Triton kernels with their compile-time arguments, to launch or to compile without a GPU.

This module imports Triton; only Triton backends and tools for them import it.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's CPU interpreter (TRITON_INTERPRET=1 at the import of Triton)."""

MAX_GRID_YZ = 65535
"""Largest second and third dimension of a grid in CUDA."""


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

        Triton launches on the current device, so this switches to the device of the tensors. FP fusion is off: the
        reference rounds after each operation.

        Raises:
            ValueError: If the second or third dimension of the grid is larger than CUDA allows.
        """
        if any(programs > MAX_GRID_YZ for programs in grid[1:]):
            raise ValueError(
                f"{self.kernel.fn.__name__} cannot be launched on a grid of {grid}: CUDA allows {MAX_GRID_YZ} in the "
                "second and third dimension. Reshape the input to more rows and fewer columns"
            )
        kernel_arguments = {name: arguments[name] for name in self.kernel.arg_names if name in arguments}
        device = next(value.device for value in kernel_arguments.values() if isinstance(value, torch.Tensor))
        with torch.cuda.device(device) if _on_other_gpu(device) else nullcontext():
            self.kernel[grid](
                **kernel_arguments,
                **self.constants,
                num_warps=self.num_warps,
                num_stages=self.num_stages,
                enable_fp_fusion=False,
            )


def _on_other_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU other than the current one."""
    return device.type == "cuda" and device.index not in (None, torch.cuda.current_device())


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation of an op: one kernel in one configuration for aligned, contiguous bf16 input.

    Attributes:
        op: Name in `torch.ops.octavo`.
        case: Label within the op, such as `"e4m3/row fold=columns both"`.
        config: Index of the kernel's configuration (tile, warps, stages); 0 is the default.
        launch: Kernel and constants to compile.
        types: Triton types of all arguments except sizes, which are i32 divisible by 16.
        tile: Input elements per program, or per loop iteration of a program.
        device_bytes: Device-memory traffic of this launch, in bytes per input element.
        ones: Arguments with value 1, such as the stride between columns.
        trips: Loop iterations for 4096 columns (or a contraction over 4096).
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

"""Run Octavo's launches in the interpreter: each is compiled as Triton would for the very tensors and numbers it gets.

    with interpreted() as executed:
        octavo.kernels.quantize.triton.quantize(x, spec, None, None, None, "rows", 0)    # x on the CPU

Triton specializes for integers that are 1, and for addresses and integers that are multiples of 16.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.ptx.machine import run
from benchmarks.ptx.memory import Counts, DeviceMemory
from benchmarks.ptx.products import Cta, Descriptor
from benchmarks.ptx.program import parse
from benchmarks.sass import compile_launch
from octavo.kernels.adamw import ParamState
from octavo.kernels.adamw import triton as adamw
from octavo.kernels.launch import Launch, PreparedLaunch

CAPABILITY = 90
_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_COMPILED: dict[str, Any] = {}


@dataclass(frozen=True)
class Executed:
    """One launch in the interpreter: its kernel and what it did."""

    kernel: str
    counts: Counts


@contextmanager
def interpreted(change: Callable[[str], str] = lambda text: text, seed: int = 0) -> Iterator[list[Executed]]:
    """Run the launches inside the block in the interpreter; collect what they did.

    Args:
        change: Applied to the PTX of each kernel, to plant a fault.
        seed: Of the order in which warps of products go on.
    """
    executed: list[Executed] = []
    reachable: list[Tensor] = []

    def run_launch(self: PreparedLaunch, tensors: Sequence[Tensor]) -> None:
        executed.append(_run(self.launch, self.grid, self.arguments(tensors), change, reachable, seed))

    def addresses(state: ParamState) -> list[int]:
        """Return the addresses that AdamW's kernel reads from a table, and make them reachable."""
        values = (*vars(state).values(), *(state.scales or ()))
        reachable.extend(value for value in values if isinstance(value, Tensor))
        return addresses_of(state)

    addresses_of = adamw._pointers
    with (
        mock.patch.object(PreparedLaunch, "__call__", run_launch),
        mock.patch.object(adamw, "_pointers", addresses),
    ):
        yield executed


def _run(
    launch: Launch, grid: tuple[int, ...], arguments: Mapping[str, Any], change: Callable[[str], str],
    reachable: list[Tensor], seed: int,
) -> Executed:  # fmt: skip
    values = {name: arguments[name] for name in launch.kernel.arg_names if name not in launch.constants}
    numbers = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in values.items()}
    ones = {name: 1 for name, value in values.items() if isinstance(value, int) and value == 1}
    aligned = {name for name, value in numbers.items() if isinstance(value, int) and value % 16 == 0}
    types = {name: _type(value) for name, value in values.items()}
    key = repr((launch.kernel.fn.__qualname__, launch.constants, launch.num_warps, types, ones, sorted(aligned)))
    if key not in _COMPILED:
        _COMPILED[key] = compile_launch(CAPABILITY, launch, types, ones, aligned)
    compiled = _COMPILED[key]
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    memory = DeviceMemory([*tensors.values(), *reachable], list(tensors))
    program, shared = parse(change(compiled.asm["ptx"])), compiled.metadata.shared
    passed = [parameter for name, number in numbers.items() if name not in ones for parameter in _parameters(number)]
    if any(isinstance(parameter, Descriptor) for parameter in passed):
        counts = Counts()
        for cta in range(math.prod(grid)):
            Cta(program, passed, grid, memory, cta, shared, counts, seed).run()
    else:
        counts = run(program, passed, grid, memory, shared)
    return Executed(launch.kernel.fn.__name__, counts)


def _parameters(value: Any) -> list[Any]:
    """Return the parameters of the compiled kernel for an argument: of a TMA descriptor also its sizes and strides."""
    if not hasattr(value, "block_shape"):
        return [value]
    return [Descriptor(value.base, *value.block_shape), *value.shape, *value.strides]


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if hasattr(value, "block_shape"):
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{value.block_shape}{layout}>"
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"

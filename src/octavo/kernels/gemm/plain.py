"""The products of a linear in bf16, timed by `octavo calibrate` beside those in FP8: what the planner weighs them
against.

There is one backend, torch's; nothing at run time looks these times up.
"""

import math
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from octavo.kernels.calibration import Entry
from octavo.kernels.registry import Shape
from octavo.kernels.timing import CALLS, Call, Result, Timer, cache_bytes

MATMUL = "matmul"
"""Op of these entries in the calibration table."""
CASES = {"forward": ("bf16", "bf16", "nt"), "dgrad": ("bf16", "bf16", "nn"), "wgrad": ("bf16", "bf16", "tn")}
"""Their cases, by product; layouts as in `octavo.kernels.gemm`."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """One product to measure.

    Attributes:
        name: Such as `"bf16 dgrad"`.
        case: Key of the calibration table, beside the op.
        shape: m, n, k of the product.
    """

    name: str
    case: tuple[str, ...]
    shape: Shape

    def rate(self, microseconds: float) -> str:
        """What a time means, for tables."""
        return f"{2 * math.prod(self.shape) / microseconds / 1e6:.0f} TFLOP/s"


def products(shapes: list[tuple[int, int, int]]) -> list[Plain]:
    """The products of linears of these sizes (tokens, in_features, out_features)."""
    found = []
    for tokens, inner, outer in shapes:
        sizes = {"forward": (tokens, outer, inner), "dgrad": (tokens, inner, outer), "wgrad": (outer, inner, tokens)}
        found += [Plain(name=f"bf16 {name}", case=CASES[name], shape=sizes[name]) for name in CASES]
    return found


def measure(what: Plain, device: torch.device, time: Timer) -> Result:
    """Time one product on random operands from device memory."""
    m, n, k = what.shape
    layout = what.case[2]
    copies = max(1, min(CALLS, cache_bytes(device) // (m * k + n * k) + 1))

    def operand(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        stored = torch.randn((columns, rows) if transposed else (rows, columns), device=device, dtype=torch.bfloat16)
        return stored.t() if transposed else stored

    pairs = [(operand(m, k, layout[0] == "t"), operand(k, n, layout[1] == "t")) for _ in range(copies)]
    calls: list[Call] = [partial(torch.mm, *pairs[i % copies]) for i in range(CALLS)]
    took = median(time(calls))
    entry = Entry(op=MATMUL, case=what.case, shape=what.shape, backend="torch", config=None, microseconds=took)
    return Result(task=what, times={"torch": took}, entry=entry)

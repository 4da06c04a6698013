"""Time bf16 products of linears, for `octavo calibrate`. The planner compares FP8 times with them.

There is one backend, torch. Only the planner reads these times.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch

from octavo.kernels.registry import Shape
from octavo.kernels.timing import CALLS, TimedCall, Timer, TimingResult, cache_bytes

MATMUL = "matmul"  # Op name of these entries in the calibration table
CASES = {"forward": ("bf16", "bf16", "nt"), "dgrad": ("bf16", "bf16", "nn"), "wgrad": ("bf16", "bf16", "tn")}
"""Cases by product; layouts as in `octavo.kernels.gemm`."""


@dataclass(frozen=True, kw_only=True)
class Bf16Gemm:
    """One bf16 product to measure."""

    name: str  # Such as `"bf16 dgrad"`
    case: tuple[str, ...]  # Key in the calibration table, next to the op
    shape: Shape  # m, n, k of the product

    def rate(self, microseconds: float) -> str:
        """Format the achieved rate."""
        return f"{2 * math.prod(self.shape) / microseconds / 1e6:.0f} TFLOP/s"


def bf16_gemms(shapes: list[tuple[int, int, int]]) -> list[Bf16Gemm]:
    """Return the products of linears of these sizes (tokens, in_features, out_features)."""
    products = []
    for tokens, inner, outer in shapes:
        sizes = {"forward": (tokens, outer, inner), "dgrad": (tokens, inner, outer), "wgrad": (outer, inner, tokens)}
        products += [Bf16Gemm(name=f"bf16 {name}", case=CASES[name], shape=sizes[name]) for name in CASES]
    return products


def time_bf16_product(product: Bf16Gemm, device: torch.device, time: Timer) -> TimingResult:
    """Time one product on random operands from device memory."""
    m, n, k = product.shape
    layout = product.case[2]
    copies = max(1, min(CALLS, cache_bytes(device) // (m * k + n * k) + 1))

    def operand(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        stored = torch.randn((columns, rows) if transposed else (rows, columns), device=device, dtype=torch.bfloat16)
        return stored.t() if transposed else stored

    pairs = [(operand(m, k, layout[0] == "t"), operand(k, n, layout[1] == "t")) for _ in range(copies)]
    calls: list[TimedCall] = [partial(torch.mm, *pairs[i % copies]) for i in range(CALLS)]
    measured = {"torch": time(calls)}
    return TimingResult.of_candidates(product, MATMUL, measured, {"torch": ("torch", None)}, {})

"""The fused kernels beside what they replace: part `fused` of `python -m benchmarks kernels`.

    fused      one launch: the norm or GLU and the FP8 copies that the next products read
    separate   PyTorch's own op in bf16, compiled by nobody, then `quantize`: what an unfused eager layer runs

Both are given the bytes of the fused kernel, so their rates compare as their times do.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.session import Row, Session, times
from benchmarks.timing import sets
from octavo.kernels import fused
from octavo.kernels.quantize import quantize
from octavo.numerics import QuantSpec

MATRICES = ((16384, 4096), (16384, 14336))
TINY = ((33, 64),)
ROW = QuantSpec.parse("e4m3/row")
TENSOR = QuantSpec.parse("e4m3/tensor")
EPS = 1e-5


@dataclass(frozen=True)
class Operands:
    """Random matrices [R,C] in bf16, a weight [C], and what the backward of a norm is given."""

    x: Tensor
    other: Tensor
    grad: Tensor
    weight: Tensor
    rstd: Tensor


@dataclass(frozen=True)
class Kernel:
    """One fused kernel.

    Attributes:
        name: For tables.
        bytes: Per element of x that it must move.
        run: It.
        separate: What it replaces; None for a backward, which is compared with nothing.
    """

    name: str
    bytes: int
    run: Callable[[Operands], Any]
    separate: Callable[[Operands], Any] | None = None


def _norm_then_quantize(o: Operands, spec: QuantSpec = ROW) -> Any:
    return quantize(F.rms_norm(o.x, (o.x.shape[1],), o.weight, EPS), spec, order="both")


def _add_norm_quantize(o: Operands) -> Any:
    total = o.x + o.other
    return total, quantize(F.rms_norm(total, (o.x.shape[1],), o.weight, EPS), ROW, order="both")


def _glu_then_quantize(o: Operands) -> Any:
    return quantize(F.silu(o.x) * o.other, ROW, order="both")


KERNELS = (
    Kernel("rms_norm → FP8 by row, both orders", 2 + 1 + 1,
           lambda o: fused.rms_norm(o.x, o.weight, EPS, ROW, "both", return_unquantized=False), _norm_then_quantize),
    Kernel("add + rms_norm → total, FP8 by row, both orders", 2 + 2 + 2 + 1 + 1,
           lambda o: fused.rms_norm(o.x, o.weight, EPS, ROW, "both", o.other, return_unquantized=False),
           _add_norm_quantize),
    Kernel("rms_norm → y, FP8 by row, both orders", 2 + 2 + 1 + 1,
           lambda o: fused.rms_norm(o.x, o.weight, EPS, ROW, "both"), _norm_then_quantize),
    Kernel("rms_norm → y, amax", 2 + 2,
           lambda o: fused.rms_norm(o.x, o.weight, EPS, TENSOR)),
    Kernel("layer_norm → FP8 by row, both orders", 2 + 1 + 1,
           lambda o: fused.layer_norm(o.x, o.weight, None, EPS, ROW, "both", return_unquantized=False)),
    Kernel("silu(gate) · up → FP8 by row, both orders", 2 + 2 + 1 + 1,
           lambda o: fused.glu(o.x, o.other, "silu", ROW, "both", return_unquantized=False), _glu_then_quantize),
    Kernel("silu(gate) · up → h, amax", 2 + 2 + 2,
           lambda o: fused.glu(o.x, o.other, "silu", TENSOR)),
    Kernel("rms_norm backward", 2 + 2 + 2,
           lambda o: fused.rms_norm_backward(o.grad, o.x, o.weight, o.rstd)),
    Kernel("silu(gate) · up backward", 2 + 2 + 2 + 2 + 2,
           lambda o: fused.glu_backward(o.grad, o.x, o.other, "silu")),
)  # fmt: skip


def kernels(session: Session) -> None:
    """Each fused kernel and what it replaces, at the widths of a Llama 3 8B layer."""
    for shape in TINY if session.tiny else MATRICES[:1] if session.options.quick else MATRICES:
        for kernel in KERNELS:
            same: Row = {"stage": "fused", "shape": f"{shape[0]}×{shape[1]}", "case": kernel.name}
            for arm, run in (("fused", kernel.run), ("separate", kernel.separate)):
                if run is not None:
                    one = functools.partial(_measure, session, shape, kernel.bytes, run)
                    session.attempt({**same, "arm": arm}, one)


def _measure(session: Session, shape: tuple[int, int], per_element: int, run: Callable[[Operands], Any]) -> Row:
    elements = shape[0] * shape[1]
    count = sets(per_element * elements, session.clock.l2_bytes) if session.gpu else 1
    timings = times(session.clock.measure([functools.partial(run, _operands(session, shape)) for _ in range(count)]))
    timings["bytes_per_element"] = per_element
    if timings["kernel_ms"] is not None:
        timings["tbs"] = round(per_element * elements / timings["kernel_ms"] / 1e9, 4)
        timings["percent"] = round(100 * timings["tbs"] / session.facts["ceilings"]["copy_tbs"], 1)
    return timings


def _operands(session: Session, shape: tuple[int, int]) -> Operands:
    x, other, grad = (torch.randn(shape, device=session.device).bfloat16() for _ in range(3))
    weight = torch.randn(shape[1], device=session.device).bfloat16()
    rstd = (x.float().square().mean(1, keepdim=True) + EPS).rsqrt()
    return Operands(x, other, grad, weight, rstd)

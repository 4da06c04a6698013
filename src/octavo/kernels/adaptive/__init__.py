"""adaptive_quantize and adaptive_dequantize: 8-bit matrices, for no product, that lose less than e4m3.

Each group of 128 elements of a row has e4m3, e3m4 or e2m5: docs/numerics.md, "Messages", and docs/kernels.md.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.adaptive import reference
from octavo.kernels.library import check_matrix, define, sample
from octavo.kernels.registry import Case, register, same_bytes, triton_backend
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import ADAPTIVE

__all__ = ["ADAPTIVE_DEQUANTIZE", "ADAPTIVE_QUANTIZE", "CASE", "adaptive_dequantize", "adaptive_quantize"]

CASE: Case = (ADAPTIVE.text,)  # The only case of both ops


def adaptive_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous codes uint8 [R,C] and scales float32 [R, ⌈C/128⌉] of a float32, bfloat16 or float16 matrix."""
    check_matrix("adaptive_quantize", "x", x)
    return _QUANTIZE(x)


def adaptive_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [R,C] of contiguous codes and scales, in float32, bfloat16 or float16."""
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"adaptive_dequantize returns float32, bfloat16 or float16; got {dtype}")
    return _DEQUANTIZE(codes, scale, dtype)


def _sample(device: torch.device) -> Tensor:
    return sample(device)[0] * torch.logspace(0, 4, 48, device=device)[:, None] ** torch.linspace(
        -1, 1, 272, device=device
    )


def _inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    return [(_sample(device).to(dtype),) for dtype in SUPPORTED_DTYPES]


def _messages(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    return [(*reference.adaptive_quantize(_sample(device)), dtype) for dtype in SUPPORTED_DTYPES]


ADAPTIVE_QUANTIZE = register(
    "adaptive_quantize", {ADAPTIVE.text: CASE}, same_bytes(reference.adaptive_quantize, _inputs, ("codes", "scales")),
    triton_backend("adaptive.triton:adaptive_quantize"), reference=reference.adaptive_quantize,
)  # fmt: skip
ADAPTIVE_DEQUANTIZE = register(
    "adaptive_dequantize", {ADAPTIVE.text: CASE}, same_bytes(reference.adaptive_dequantize, _messages),
    triton_backend("adaptive.triton:adaptive_dequantize"), reference=reference.adaptive_dequantize,
)  # fmt: skip


def _run_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    return ADAPTIVE_QUANTIZE.choose(x.device, CASE).run(x)


def _run_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return ADAPTIVE_DEQUANTIZE.choose(codes.device, CASE).run(codes, scale, dtype)


def _fake_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((x.shape[0], reference.groups(x.shape[1])), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.uint8), scale


_QUANTIZE = define("adaptive_quantize", _run_quantize, _fake_quantize)
_DEQUANTIZE = define(
    "adaptive_dequantize", _run_dequantize, lambda codes, scale, dtype: codes.new_empty(codes.shape, dtype=dtype)
)

"""Argument checks, probes and inputs shared by the fused ops."""

from typing import get_args

import torch
from torch import Tensor

from octavo.kernels.fused.fp8_outputs import supports_output
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.names import nearest
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import QuantSpec
from octavo.tensor import Order


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless x is a matrix [R,C] of a supported dtype."""
    if x.ndim != 2 or x.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"{op}: {name} must be a float32, bfloat16 or float16 matrix [R,C]; got {x.dtype} of shape {tuple(x.shape)}"
        )


def check_like(
    op: str, name: str, value: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], x: Tensor
) -> None:
    """Raise ValueError unless an operand is None or has this shape, one of these dtypes, and x's device."""
    if value is not None and (value.shape != shape or value.dtype not in dtypes or value.device != x.device):
        expected_dtypes = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise ValueError(
            f"{op}: {name} must be {expected_dtypes} {list(shape)} on {x.device}; "
            f"got {value.dtype} {list(value.shape)} on {value.device}"
        )


def check_output(op: str, spec: QuantSpec | None, order: str) -> None:
    """Raise ValueError unless a fused op supports a result in this form."""
    if order not in get_args(Order):
        raise ValueError(
            f"{op}: order must be one of {', '.join(get_args(Order))}; got {order!r}{nearest(order, get_args(Order))}"
        )
    if spec is not None and not supports_output(spec):
        raise ValueError(
            f"{op}: scales must be by row, or by block 1xN with N = 16, 32, 64 or 128; got {spec}. "
            f"For others, call {op} with spec=None and quantize its result"
        )


def cases_of_inputs() -> list[str]:
    """Return the specs of X in all recipes that fused ops support, behind "" for a result that is not in FP8."""
    return ["", *dict.fromkeys(recipe.x.text for recipe in RECIPES.values() if supports_output(recipe.x))]


def sample(device: torch.device, count: int) -> list[Tensor]:
    """Return bf16 matrices [48,272], whose sizes are no multiple of a tile."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(48, 272, generator=generator, device="cpu", dtype=torch.float32).to(device, torch.bfloat16)
        for _ in range(count)
    ]

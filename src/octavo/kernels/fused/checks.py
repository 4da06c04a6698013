"""What the public functions of this package check, and how they say it."""

from importlib.util import find_spec

import torch
from torch import Tensor

from octavo.kernels.fused.forms import ORDERS, serves
from octavo.kernels.registry import Case
from octavo.numerics.error import first_mismatch
from octavo.numerics.names import nearest
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import TENSOR, QuantSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """A matrix [R,C] of a supported dtype, or ValueError."""
    if x.ndim != 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"{op}: {name} is a float32, bfloat16 or float16 matrix [R,C]; got {x.dtype} of shape {tuple(x.shape)}"
        )


def check_like(
    op: str, name: str, given: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], x: Tensor
) -> None:
    """An operand of this shape, of one of these dtypes, on x's device, or None; else ValueError."""
    if given is not None and (given.shape != shape or given.dtype not in dtypes or given.device != x.device):
        wanted = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise ValueError(
            f"{op}: {name} is {wanted} {list(shape)} on {x.device}; "
            f"got {given.dtype} {list(given.shape)} on {given.device}"
        )


def check_form(op: str, spec: QuantSpec | None, order: str, keep: bool) -> None:
    """A form that producers can make, or ValueError."""
    if order not in ORDERS:
        raise ValueError(f"{op}: order is one of {', '.join(ORDERS)}; got {order!r}{nearest(order, ORDERS)}")
    if spec is None:
        if not keep:
            raise ValueError(f"{op}: nothing is asked for: give a spec, keep=True, or both")
        return
    if not serves(spec):
        raise ValueError(
            f"{op}: scales are by tensor, by row, or by block 1xN with N = 16, 32, 64 or 128; got {spec}. "
            f"For others, call {op} with spec=None and quantize its result"
        )
    if spec.granularity == TENSOR and not keep:
        raise ValueError(
            f"{op}: by tensor the FP8 form is made by quantize(y, spec, amax=...), which needs y: keep=True; got {spec}"
        )


def cases_of_inputs() -> list[str]:
    """Specs of X in the recipes: the forms that a producer is asked for."""
    return list(dict.fromkeys(recipe.x.text for recipe in RECIPES.values()))


def refuses_triton(device: torch.device, case: Case) -> str | None:
    """Why Triton does not run here."""
    if device.type != "cuda":
        return f"Triton compiles for GPUs; this device is {device.type!r}"
    return None if find_spec("triton") else "Triton is not installed"


def difference(expected: list[Tensor], actual: list[Tensor]) -> str | None:
    """The first output that differs from reference, and where."""
    for index, (e, a) in enumerate(zip(expected, actual, strict=True)):
        if (mismatch := first_mismatch(e, a)) is not None:
            return f"output {index} differs from reference: {mismatch}"
    return None


def sample(device: torch.device, count: int) -> list[Tensor]:
    """Matrices [48,272], sizes that fill no tile, bf16."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(48, 272, generator=generator, device="cpu").to(device, torch.bfloat16) for _ in range(count)]

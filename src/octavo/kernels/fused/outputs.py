"""Results of the fused ops in FP8: allocation, unpacking and kernel arguments."""

from typing import Any, get_args

import torch
from torch import Tensor

from octavo.kernels.quantize import reference
from octavo.numerics.formats import E4M3
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import FULL, ROW, QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.tensor import Order, ScaledTensor


def optional_spec(text: str) -> QuantSpec | None:
    """Parse an op's string argument; an empty one means no FP8."""
    return QuantSpec.parse(text) if text else None


def supports_output(spec: QuantSpec) -> bool:
    """Whether fused ops support a spec: scales by row, or by block of a row (16, 32, 64, 128 columns)."""
    rows, columns = spec.granularity
    return spec.granularity == ROW or (rows == 1 and columns in (16, 32, 64, 128))


def empty_outputs(y: Tensor, spec: QuantSpec | None, order: str) -> list[Tensor]:
    """Allocate a result of y's shape and device: in its dtype, or FP8 data and scales."""
    return [y.new_empty(y.shape)] if spec is None else reference.empty_outputs(y, spec, order)


def unpack_outputs(outputs: list[Tensor], spec: QuantSpec, order: str) -> ScaledTensor:
    *data, scale = outputs
    views = [data[0] if order != "columns" else data[0].t(), *(d.t() for d in data[1:])]
    return ScaledTensor(views[0], scale, spec, views[1] if len(views) == 2 else None)


def kernel_arguments(outputs: list[Tensor], spec: QuantSpec | None, order: str, y: Tensor) -> dict[str, Any]:
    """Return the kernel arguments for the outputs: q, qt, s (y as a placeholder) and sizes."""
    pointers: dict[str, Any] = dict.fromkeys(("q", "qt", "s"), y)
    pointers |= {"grid_columns": 0, "words": reference.padded(y.shape[0]) // 4}
    if spec is None:
        return pointers
    *data, scale = outputs
    pointers["q"], pointers["qt"] = data[0], data[-1]  # kernels write only the requested ones
    pointers["s"] = scale.view(torch.uint8) if spec.scale_rule == "e8m0" else scale
    return pointers | {"grid_columns": scale.shape[1]}


def kernel_constants(spec: QuantSpec | None) -> dict[str, Any]:
    """Return the compile-time constants for a spec; `OUTPUT` is one of the constants in `device`."""
    output = 0 if spec is None else 1 if spec.granularity == ROW else 2
    spec = spec or QuantSpec()
    return {
        "OUTPUT": output, "FP8_MAX": spec.format.max, "E4M3": spec.format is E4M3,
        "POWER_OF_TWO": spec.scale_rule != "amax", "E8M0": spec.scale_rule == "e8m0",
        "BLOCK": spec.granularity.columns if FULL not in spec.granularity else 1,
    }  # fmt: skip


def check_output(op: str, spec: QuantSpec | None, order: str) -> None:
    check_choice(f"{op}: order", order, get_args(Order))
    if spec is not None and not supports_output(spec):
        raise ValueError(
            f"{op}: scales must be by row, or by block 1xN with N = 16, 32, 64 or 128; got {spec}. "
            f"For others, call {op} with spec=None and quantize its result"
        )


def cases_of_inputs() -> list[str]:
    """Return the specs of X in all recipes that fused ops support, behind "" for a result that is not in FP8."""
    return ["", *dict.fromkeys(recipe.x.text for recipe in RECIPES.values() if supports_output(recipe.x))]

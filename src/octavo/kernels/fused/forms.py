"""What becomes of y: which tensors hold its FP8 forms, how large they are, and how a kernel is told."""

from typing import Any, Literal

import torch
from torch import Tensor

from octavo.kernels.quantize.reference import padded
from octavo.numerics.formats import E4M3
from octavo.numerics.spec import FULL, ROW, TENSOR, QuantSpec
from octavo.tensor import ScaledTensor

Order = Literal["rows", "columns", "both"]
ORDERS = ("rows", "columns", "both")


def parse(text: str) -> QuantSpec | None:
    """The spec of an op's string argument; empty: no FP8 form."""
    return QuantSpec.parse(text) if text else None


def serves(spec: QuantSpec) -> bool:
    """Whether a producer can make this form: scales by tensor, row, or block of a row (16, 32, 64, 128 columns)."""
    rows, columns = spec.granularity
    return spec.granularity in (TENSOR, ROW) or (rows == 1 and columns in (16, 32, 64, 128))


def empty_forms(y: Tensor, spec: QuantSpec | None, order: str) -> list[Tensor]:
    """Tensors for the forms of `y` (only its shape and device count), as `reference.forms` returns them; amax is 0."""
    rows, columns = y.shape
    if spec is None:
        return []
    if spec.granularity == TENSOR:
        return [y.new_zeros((1, 1), dtype=torch.float32)]
    found = [y.new_empty((rows, columns), dtype=spec.format.dtype)] if order != "columns" else []
    if order != "rows":
        found.append(y.new_empty((columns, padded(rows)), dtype=spec.format.dtype)[:, :rows])
    return [*found, y.new_empty(spec.granularity.scale_shape((rows, columns)), dtype=spec.scale_dtype)]


def unpack(forms: list[Tensor], spec: QuantSpec | None, order: str) -> tuple[ScaledTensor | None, Tensor | None]:
    """The quantized matrix, or None and the amax by tensor, from what `reference.forms` returns."""
    if spec is None:
        return None, None
    if spec.granularity == TENSOR:
        return None, forms[0]
    *data, scale = forms
    views = [data[0] if order != "columns" else data[0].t(), *(d.t() for d in data[1:])]
    return ScaledTensor(views[0], scale, spec, views[1] if len(views) == 2 else None), None


def arguments_of(forms: list[Tensor], spec: QuantSpec | None, order: str, y: Tensor) -> dict[str, Any]:
    """Arguments of a kernel that follow from the forms: q, qt, s, amax (or y in their place) and sizes."""
    pointers: dict[str, Any] = dict.fromkeys(("q", "qt", "s", "amax"), y)
    pointers |= {"grid_columns": 0, "words": padded(y.shape[0]) // 4}
    if spec is None:
        return pointers
    if spec.granularity == TENSOR:
        return pointers | {"amax": forms[0].view(torch.int32)}
    *data, scale = forms
    pointers["q"], pointers["qt"] = data[0], data[-1]  # the one that is not wanted is not written
    pointers["s"] = scale.view(torch.uint8) if spec.scale_rule == "e8m0" else scale
    return pointers | {"grid_columns": scale.shape[1]}


def constants_of(spec: QuantSpec | None) -> dict[str, Any]:
    """Compile-time constants of a kernel that follow from the spec; `FORM` as the names in `device`."""
    if spec is None or spec.granularity == TENSOR:
        form, spec = 0 if spec is None else 1, QuantSpec()
    else:
        form = 2 if spec.granularity == ROW else 3
    return {
        "FORM": form,
        "FP8_MAX": spec.format.max,
        "E4M3": spec.format is E4M3,
        "POWER_OF_TWO": spec.scale_rule != "amax",
        "E8M0": spec.scale_rule == "e8m0",
        "BLOCK": spec.granularity.columns if FULL not in spec.granularity else 1,
    }

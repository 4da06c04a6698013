"""The fused ops in PyTorch operations: the reference that other backends match byte for byte.

Arithmetic is float32, rounded after each operation. Sums along a row add 8 neighbours pairwise in float32, then these
sums in float64, rounded once. Quotients and roots are computed in float64 and rounded. docs/kernels.md says why.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from octavo.kernels.fused.activations import activation_value, value_and_slope
from octavo.kernels.quantize import reference
from octavo.numerics.formats import E4M3, row_chunks
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import FULL, ROW, QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.tensor import Order

ROW_BLOCK = 32  # Rows whose contributions to a weight's gradient are added before they are stored


def outputs_of(y: Tensor, spec: QuantSpec | None, order: str) -> list[Tensor]:
    """Return y; with a spec its FP8 data (row-major [R,C], transposed [C,R]) and scales."""
    return [y] if spec is None else reference.quantize(y, spec, None, order=order)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: bool, center: bool, spec: QuantSpec | None,
    order: str,
) -> list[Tensor]:  # fmt: skip
    """Return rstd, mean if `center`, and `outputs_of` y."""
    values = x.to(torch.float32, copy=True)
    mean = _row_mean(values) if center else None
    if mean is not None:
        values.sub_(mean)
    variance = _row_mean(values * values) + torch.tensor(eps, dtype=torch.float32, device="cpu")
    rstd = 1.0 / variance.double().sqrt().float()
    values.mul_(rstd).mul_(_scale(weight, offset))
    y = (values if bias is None else values.add_(bias.float())).to(x.dtype).contiguous()
    return [rstd, *([] if mean is None else [mean]), *outputs_of(y, spec, order)]


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, offset: bool, bias: bool
) -> list[Tensor]:
    """Return dx, dweight, and dbias if there is a bias."""
    g = grad.float()
    normalized = x.to(torch.float32, copy=True)
    if mean is not None:
        normalized.sub_(mean)
    normalized.mul_(rstd)
    weighted = g * _scale(weight, offset)
    along = _row_mean(weighted * normalized)
    if mean is not None:
        weighted.sub_(_row_mean(weighted))
    dx = weighted.sub_(normalized * along).mul_(rstd)
    sums = [_column_sum(normalized.mul_(g)), *([_column_sum(g)] if bias else [])]
    return [dx.to(x.dtype).contiguous(), *(s.to(weight.dtype) for s in sums)]


def glu(gate: Tensor, up: Tensor, activation: str, spec: QuantSpec | None, order: str) -> list[Tensor]:
    """Return `outputs_of` h."""
    h = gate.new_empty(gate.shape)
    for rows in row_chunks((gate.shape[0], gate.shape[1])):
        h[rows] = activation_value(gate[rows], activation).mul_(up[rows])
    return outputs_of(h, spec, order)


def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str, joined: bool) -> list[Tensor]:
    """Return dgate and dup, or (`joined`) both side by side in one [R,2C] tensor."""
    height, width = gate.shape
    both = [gate.new_empty((height, 2 * width))] if joined else [gate.new_empty((height, width)) for _ in range(2)]
    dgate, dup = both[0].chunk(2, dim=1) if joined else both
    for rows in row_chunks((gate.shape[0], gate.shape[1])):
        value, slope = value_and_slope(gate[rows], activation)
        upstream = grad[rows].float()
        dup[rows] = value.mul_(upstream)
        dgate[rows] = slope.mul_(upstream.mul_(up[rows]) if grad.dtype != torch.float32 else upstream * up[rows])
    return both


def _scale(weight: Tensor, offset: bool) -> Tensor:
    return 1.0 + weight.float() if offset else weight.float()


def _row_mean(values: Tensor) -> Tensor:
    """[R,1] float32."""
    missing = -values.shape[1] % 8
    sums = torch.nn.functional.pad(values, (0, missing)) if missing else values
    for _ in range(3):
        sums = sums[:, 0::2] + sums[:, 1::2]
    return (sums.double().sum(1, keepdim=True).float().double() / max(values.shape[1], 1)).float()


def _column_sum(values: Tensor) -> Tensor:
    """[C] float32."""
    rows, columns = values.shape
    missing = -rows % ROW_BLOCK
    padded = torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values
    blocks = padded.reshape(-(-rows // ROW_BLOCK), ROW_BLOCK, columns)
    partial = torch.zeros_like(blocks[:, 0])
    for row in blocks.unbind(1):
        partial.add_(row)
    return partial.double().sum(0).float()


# Results of the fused ops in FP8: allocation, unpacking and kernel arguments.


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

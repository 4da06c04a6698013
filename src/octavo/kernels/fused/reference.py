"""The fused producers in plain PyTorch: the definition every other backend is compared with, byte for byte.

All arithmetic in float32, rounded after each operation. Sums along a row: 8 neighbours in float32, pairs first, then
pairs of pairs; the sums of 8 in float64, rounded once. Any order of the latter gives the same float32 (two orders
differ by 2⁻⁵⁰ of the sum; that a rounding boundary lies between them has a chance of about 2⁻²⁶), so each kernel is
free in its order and its tiles.
Quotients and roots are correctly rounded: PyTorch's own are not everywhere, so float64 ones are rounded to float32.
Gradients of weights are sums down a column: in float32, row after row within bands of `BAND` rows, then over the bands
as above.

The FP8 form is the one `quantize` makes of y after y was rounded to its dtype: fusing changes no byte.
"""

import torch
from torch import Tensor

from octavo.kernels.fused.activations import factor, factor_and_slope
from octavo.kernels.quantize import reference as quantize_reference
from octavo.numerics.bands import bands
from octavo.numerics.spec import TENSOR, QuantSpec

BAND = 32
"""Rows whose contributions to the gradient of a weight are added before they are written down."""


def forms(y: Tensor, spec: QuantSpec | None, order: str) -> list[Tensor]:
    """FP8 data (row-major [R,C], then transposed [C,R]) and scales; by tensor the amax [1,1]; empty without a spec."""
    if spec is None:
        return []
    if spec.granularity == TENSOR:
        return [y.float().abs().amax().reshape(1, 1) if y.numel() else y.new_zeros((1, 1), dtype=torch.float32)]
    return quantize_reference.quantize(y, spec, None, order=order)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: bool, center: bool,
    spec: QuantSpec | None, order: str, keep: bool,
) -> list[Tensor]:  # fmt: skip
    """rstd, mean if centered, x + residual if there is one, y if kept, and the forms of y."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype).contiguous()
    values = total.float()
    mean = _row_mean(values) if center else None
    if mean is not None:
        values = values - mean
    rstd = 1.0 / (_row_mean(values * values) + torch.tensor(eps, dtype=torch.float32)).double().sqrt().float()
    y = values * rstd * _scale(weight, offset)
    y = (y if bias is None else y + bias.float()).to(x.dtype).contiguous()
    found = [rstd, mean, None if residual is None else total, y if keep else None, *forms(y, spec, order)]
    return [t for t in found if t is not None]


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, grad_total: Tensor | None,
    offset: bool, bias: bool,
) -> list[Tensor]:  # fmt: skip
    """dx, dweight, and dbias if there is a bias."""
    g = grad.float()
    normalized = (x.float() if mean is None else x.float() - mean) * rstd
    weighted = g * _scale(weight, offset)
    along = _row_mean(weighted * normalized)
    if mean is not None:
        weighted = weighted - _row_mean(weighted)
    dx = (weighted - normalized * along) * rstd
    dx = dx if grad_total is None else dx + grad_total.float()
    sums = [_column_sum(g * normalized), *([_column_sum(g)] if bias else [])]
    return [dx.to(x.dtype).contiguous(), *(s.to(weight.dtype) for s in sums)]


def glu(gate: Tensor, up: Tensor, activation: str, spec: QuantSpec | None, order: str, keep: bool) -> list[Tensor]:
    """The product h if kept, and the forms of h."""
    h = gate.new_empty(gate.shape)
    for rows in bands((gate.shape[0], gate.shape[1])):
        g = gate[rows].float()
        h[rows] = factor(g, activation).mul_(g).mul_(up[rows])
    return [*([h] if keep else []), *forms(h, spec, order)]


def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str, joined: bool) -> list[Tensor]:
    """Gradients dgate and dup, or both side by side in one [R,2C] tensor."""
    height, width = gate.shape
    both = [gate.new_empty((height, 2 * width))] if joined else [gate.new_empty((height, width)) for _ in range(2)]
    dgate, dup = both[0].chunk(2, dim=1) if joined else both
    for rows in bands((gate.shape[0], gate.shape[1])):
        g, upstream = gate[rows].float(), grad[rows].float()
        value, slope = factor_and_slope(g, activation)
        dgate[rows] = slope.mul_(upstream * up[rows].float())
        dup[rows] = value.mul_(g).mul_(upstream)
    return both


def _scale(weight: Tensor, offset: bool) -> Tensor:
    return 1.0 + weight.float() if offset else weight.float()


def _row_mean(values: Tensor) -> Tensor:
    """[R,1] float32."""
    sums = torch.nn.functional.pad(values, (0, -values.shape[1] % 8))
    for _ in range(3):
        sums = sums[:, 0::2] + sums[:, 1::2]
    return (sums.double().sum(1, keepdim=True).float().double() / max(values.shape[1], 1)).float()


def _column_sum(values: Tensor) -> Tensor:
    """[C] float32."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, 0, 0, -rows % BAND)).reshape(-(-rows // BAND), BAND, columns)
    partial = torch.zeros_like(padded[:, 0])
    for row in range(BAND):
        partial += padded[:, row]
    return partial.double().sum(0).float()

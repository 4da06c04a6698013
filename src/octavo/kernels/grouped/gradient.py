"""Quantize G of a grouped linear: by row with each expert's scales of W folded in, by column and expert for wgrad.

Elementwise PyTorch operations apply factors per row and expert in float32, then `quantize` casts: the bits of
`quantize` on the rows of each expert alone, on any device, without reading offsets on the host. The factors cost a
float32 copy of G, 8 bytes of memory traffic per element more than a kernel of their own would.
"""

import torch
from torch import Tensor

from octavo.kernels.library import define
from octavo.kernels.quantize import quantize
from octavo.kernels.quantize.reference import scale_of
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.spec import TENSOR, QuantSpec
from octavo.tensor import Order, ScaledTensor


def groups_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, int64 [rows]; E for rows that belong to no expert."""
    index = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, index, right=True)


def quantize_grouped_gradient(
    g: Tensor, group: Tensor, spec: QuantSpec, *, w_scale: Tensor | None = None, x_scale: Tensor | None = None,
    experts: int = 0, order: Order = "rows",
) -> ScaledTensor:  # fmt: skip
    """Quantize G [M,N] for dgrad (with `w_scale`) or wgrad (with `x_scale`)."""
    if w_scale is not None:
        # Rows of no expert take the last expert's scales: nothing reads them.
        factor = w_scale.index_select(0, group.clamp(max=w_scale.shape[0] - 1))
        return quantize(factor.mul_(g), spec, order=order)
    assert x_scale is not None
    values = g.to(torch.float32, copy=True).mul_(x_scale)
    bits = values.view(torch.int32) & 0x7FFFFFFF  # magnitudes sort like their bits, NaN last
    amax = bits.new_zeros((experts + 1, g.shape[1]))
    amax.scatter_reduce_(0, group[:, None].expand_as(bits), bits, "amax")
    scale, inverse = scale_of(amax.view(torch.float32), spec)
    values.mul_(inverse.index_select(0, group))
    one = values.new_ones((1, 1))
    data = quantize(values, _ONE_SCALE[spec.format.name], order=order, scale=one)
    return ScaledTensor(data.data, scale[:experts], spec, data.other_order)


_ONE_SCALE = {fmt.name: QuantSpec(format=fmt, granularity=TENSOR) for fmt in (E4M3, E5M2)}
"""Made here, so that torch.compile sees constants."""


def sum_by_group(g: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each expert's rows of G [M,N], float32 [E,N], for `offsets` int32 [E]."""
    sums: Tensor = torch.ops.octavo.sum_by_group.default(g, offsets)
    return sums


def _sum_by_group(g: Tensor, offsets: Tensor) -> Tensor:
    if g.device.type == "cpu":
        ends = offsets.tolist()
        return torch.stack([g[a:b].sum(0, dtype=torch.float32) for a, b in zip([0, *ends], ends, strict=False)])
    lengths = torch.diff(offsets, prepend=offsets.new_zeros(1), append=offsets.new_full((1,), g.shape[0]))
    # `unsafe`: no check of the lengths, which would wait for the GPU.
    return torch.segment_reduce(g.float(), "sum", lengths=lengths.long(), axis=0, unsafe=True)[:-1].contiguous()


define(
    "sum_by_group(Tensor g, Tensor offsets) -> Tensor",
    _sum_by_group,
    lambda g, offsets: g.new_empty((offsets.shape[0], g.shape[1]), dtype=torch.float32),
)

"""Quantize G of a grouped linear from the same reads, with the bits of `quantize` on the rows of each expert alone.

    dgrad    G[g] diag(b[e])     by row
    wgrad    diag(a[g]) G[g]     by column of e

g are the rows of expert e, a the scales of X by row [M,1], b those of W [E,N].
"""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.library import define
from octavo.kernels.quantize import reference as quantize
from octavo.kernels.registry import Backend, Case, register, triton_backend
from octavo.numerics.recipe import RECIPES, Recipe
from octavo.numerics.spec import COLUMN, ROW, TENSOR, QuantSpec
from octavo.tensor import Order, ScaledTensor


def is_grouped(recipe: Recipe) -> bool:
    """Return whether a recipe's products run as grouped ones: X and W by row, folded into G, all in FP8."""
    granularities = recipe.x.granularity, recipe.w.granularity, recipe.dgrad_g.granularity
    by_row = granularities == (ROW, ROW, ROW) and recipe.x.scale_rule != "e8m0" != recipe.w.scale_rule
    one_copy = recipe.dgrad_w == recipe.w and recipe.wgrad_x == recipe.x
    if recipe.equalization or recipe.weight_only:
        return False
    return by_row and one_copy and recipe.wgrad_g is not None and recipe.wgrad_g.granularity == COLUMN


def rows_of_groups(offsets: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, int32 [rows]; E for rows that belong to no expert."""
    index = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, index, right=True, out_int32=True)


def quantize_grouped(
    g: Tensor, offsets: Tensor, dgrad: QuantSpec | None, wgrad: QuantSpec | None, w_scale: Tensor | None,
    x_scale: Tensor | None, order: Order = "rows",
) -> tuple[ScaledTensor | None, ScaledTensor | None]:  # fmt: skip
    """Quantize G [M,N] for dgrad with the scales of W [E,N], and for wgrad with those of X [M,1]; each may be None.

    `order` is that of the data for wgrad. Data in rows of no expert is undefined.
    """
    if dgrad is not None and wgrad is not None and (dgrad.format, dgrad.scale_rule) != (wgrad.format, wgrad.scale_rule):
        by_row, _ = quantize_grouped(g, offsets, dgrad, None, w_scale, None)
        return by_row, quantize_grouped(g, offsets, None, wgrad, None, x_scale, order)[1]
    spec = dgrad or wgrad
    assert spec is not None and (dgrad is None or w_scale is not None) and (wgrad is None or x_scale is not None)
    outputs = _QUANTIZE_GROUPED(
        g, offsets, spec.text, w_scale if dgrad is not None else None, x_scale if wgrad is not None else None, order
    )
    by_row = by_expert = None
    if dgrad is not None:
        by_row = ScaledTensor(outputs[0], outputs[1], dgrad)
    if wgrad is not None:
        by_expert = ScaledTensor(outputs[-2].t() if order == "columns" else outputs[-2], outputs[-1], wgrad)
    return by_row, by_expert


def reference(
    g: Tensor, offsets: Tensor, spec: QuantSpec, w_scale: Tensor | None, x_scale: Tensor | None, transposed: bool
) -> list[Tensor]:
    """Return data and scales for dgrad, then data (as [N,M] if `transposed`) and scales for wgrad."""
    # Elementwise operations apply factors per row and expert in float32, then `quantize` casts.
    outputs, group, experts = [], rows_of_groups(offsets, g.shape[0]), offsets.shape[0]
    if w_scale is not None:
        # Rows of no expert take the last expert's scales: nothing reads them.
        factor = w_scale.index_select(0, group.clamp(max=experts - 1))
        outputs += quantize.quantize(factor.mul_(g), replace(spec, granularity=ROW), None)
    if x_scale is not None:
        values = g.to(torch.float32, copy=True).mul_(x_scale)
        bits = values.view(torch.int32) & 0x7FFFFFFF  # magnitudes sort like their bits, NaN last
        amax = bits.new_zeros((experts + 1, g.shape[1]))
        amax.scatter_reduce_(0, group.long()[:, None].expand_as(bits), bits, "amax")
        scale, inverse = quantize.scale_of(amax.view(torch.float32), spec)
        values.mul_(inverse.index_select(0, group))
        one_scale, order = replace(spec, granularity=TENSOR, scale_rule="amax"), "columns" if transposed else "rows"
        outputs += quantize.quantize(values, one_scale, None, scale=values.new_ones((1, 1)), order=order)
        outputs.append(scale[:experts])
    return outputs


def _probe(backend: Backend[list[Tensor]], device: torch.device, case: Case) -> str | None:
    """Compare with the reference: experts of no rows and of one, one that begins within a tile, rows of no expert."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([5, 5, 6, 200, 263], device="cpu").int().to(device)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32).to(device)

    g = (draw(270, 272) - 0.5).bfloat16()
    call = (g, ends, QuantSpec.parse(case[0]), draw(5, 272), draw(270, 1), True)
    names = ("data by row", "its scales", "data by expert", "its scales")
    expected, actual = (
        [x[:263] if i < 2 else x for i, x in enumerate(outputs)] for outputs in (reference(*call), backend.run(*call))
    )
    return difference(expected, actual, names)


_SPECS: dict[str, Case] = {spec.text: (spec.text,) for r in RECIPES.values() if is_grouped(r) for spec in (r.dgrad_g,)}

QUANTIZE_GROUPED = register(
    "quantize_grouped", _SPECS, _probe, triton_backend("grouped.gradient_triton:quantize_grouped"), reference=reference
)


def _run(
    g: Tensor, offsets: Tensor, spec: str, w_scale: Tensor | None, x_scale: Tensor | None, order: str
) -> list[Tensor]:
    run = QUANTIZE_GROUPED.choose(g.device, (spec,)).run
    return run(g, offsets, QuantSpec.parse(spec), w_scale, x_scale, order == "columns")


def _fake(
    g: Tensor, offsets: Tensor, spec: str, w_scale: Tensor | None, x_scale: Tensor | None, order: str
) -> list[Tensor]:
    (rows, columns), dtype, outputs = g.shape, QuantSpec.parse(spec).format.dtype, []
    if w_scale is not None:
        outputs += [g.new_empty((rows, columns), dtype=dtype), g.new_empty((rows, 1), dtype=torch.float32)]
    if x_scale is not None:
        shape = (columns, quantize.padded(rows)) if order == "columns" else (rows, columns)
        data = g.new_empty(shape, dtype=dtype)
        outputs += [data[:, :rows] if order == "columns" else data]
        outputs += [g.new_empty((offsets.shape[0], columns), dtype=torch.float32)]
    return outputs


_QUANTIZE_GROUPED = define("quantize_grouped", _run, _fake)


def _sum_by_group(g: Tensor, offsets: Tensor) -> Tensor:
    if g.device.type == "cpu":
        ends = offsets.tolist()
        return torch.stack([g[a:b].sum(0, dtype=torch.float32) for a, b in zip([0, *ends], ends, strict=False)])
    lengths = torch.diff(offsets, prepend=offsets.new_zeros(1), append=offsets.new_full((1,), g.shape[0]))
    # `unsafe`: no check of the lengths, which would wait for the GPU.
    return torch.segment_reduce(g.float(), "sum", lengths=lengths.long(), axis=0, unsafe=True)[:-1].contiguous()


sum_by_group = define(
    "sum_by_group", _sum_by_group, lambda g, offsets: g.new_empty((offsets.shape[0], g.shape[1]), dtype=torch.float32),
)  # fmt: skip
"""Return the sum of each expert's rows of G [M,N], float32 [E,N], for `offsets` int32 [E]."""

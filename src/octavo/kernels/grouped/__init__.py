"""grouped_mm: the products of a linear layer with one weight per expert, over rows that are sorted by expert.

    nt    Y[g] = A[g] B[e]ᵀ    A [M,K], B [E·N,K] → [M,N]      forward   Y  = X Wᵀ
    nn    Y[g] = A[g] B[e]     A [M,N], B [E·N,K] → [M,K]      dgrad     ∂X = G W
    tn    Y[e] = A[g]ᵀ B[g]    A [M,N], B [M,K]   → [E,N,K]    wgrad     ∂W = Gᵀ X

g are the rows of expert e: from `offsets[e - 1]` (0 for the first) to `offsets[e]`. Rows from `offsets[-1]` on belong
to no expert: no product reads them, and they are zero in nt and nn. Scales fold per expert. Only `reference` reads
offsets on the host; each expert equals `scaled_mm` alone, bit for bit.
"""

from functools import partial

import torch
from torch import Tensor

from octavo.kernels.conformance.mismatches import low_sqnr
from octavo.kernels.gemm import Layout, random_operand, torch_bf16
from octavo.kernels.gemm.operand_layout import CONTRACTED, UNIT_SCALE, data_along
from octavo.kernels.grouped import reference, torch_scaled
from octavo.kernels.grouped.gradient import is_grouped, quantize_grouped, sum_by_group
from octavo.kernels.library import define
from octavo.kernels.registry import Backend, Case, register, triton_backend
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.recipe import RECIPES, Recipe
from octavo.numerics.spec import QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.tensor import ScaledTensor

__all__ = ["GROUPED_MM", "grouped_mm", "is_grouped", "quantize_grouped", "sum_by_group"]


def grouped_mm(
    a: ScaledTensor, b: ScaledTensor, offsets: Tensor, layout: Layout, *, out_dtype: torch.dtype,
    bias: Tensor | None = None, fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert by its weight (nt, nn), or by its other rows (tn).

    `a` has scales by row [M,1], in tn by column and expert [E,N]. `b` has scales by row in nt, else unit scales.
    `offsets`, int32 [E], ascending, are where the rows of each expert end. `bias` [E,N] is added in layout nt. Dtypes
    and `fast_accum` are as in `octavo.kernels.scaled_mm`. Raises ValueError if sizes, dtypes, scales or devices misfit.
    """
    _check(a, b, offsets, layout, out_dtype, bias)
    assert a.scale is not None
    return _GROUPED_MM(
        data_along(a, CONTRACTED[layout][0]), a.scale, a.spec.text, data_along(b, CONTRACTED[layout][1]), b.scale,
        b.spec.text, offsets, layout, out_dtype, bias, fast_accum,
    )  # fmt: skip


def _check(
    a: ScaledTensor, b: ScaledTensor, offsets: Tensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None
) -> None:
    if layout not in CONTRACTED:  # looked at in every call: without a call
        check_choice("grouped_mm: layout", layout, CONTRACTED)
    if offsets.ndim != 1 or offsets.dtype != torch.int32 or not offsets.numel():
        raise ValueError(f"grouped_mm: offsets must be int32 [experts]; got {offsets.dtype} {list(offsets.shape)}")
    experts, (m, columns), (rows, k) = offsets.numel(), a.data.shape, b.data.shape
    n = rows // experts
    fits = {"nt": columns == k and rows == n * experts, "nn": rows == columns * experts, "tn": rows == m}[layout]
    if not fits:
        raise ValueError(f"grouped_mm {layout}: A [{m},{columns}] and B [{rows},{k}] do not fit for {experts} experts")
    scales = {"nt": ((m, 1), (rows, 1)), "nn": ((m, 1), None), "tn": ((experts, columns), None)}[layout]
    for name, operand, shape in zip("AB", (a, b), scales, strict=True):
        scale = operand.scale
        if (None if scale is None else tuple(scale.shape)) != shape or operand.spec.scale_rule == "e8m0":
            raise ValueError(
                f"grouped_mm {layout}: {name} needs float32 scales {shape or 'folded away (None)'}; got "
                f"{None if scale is None else tuple(scale.shape)} with spec {operand.spec}"
            )
        if operand.data.dtype != operand.spec.format.dtype:
            raise ValueError(f"grouped_mm {layout}: {name} is {operand.data.dtype}; its spec is {operand.spec}")
    if out_dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"grouped_mm {layout}: out_dtype must be float32, bfloat16 or float16; got {out_dtype}")
    if bias is not None and (layout != "nt" or bias.shape != (experts, n) or bias.dtype not in SUPPORTED_DTYPES):
        raise ValueError(
            f"grouped_mm {layout}: bias is [{experts},{n}] in layout nt, None otherwise; got {bias.dtype} "
            f"{list(bias.shape)}"
        )
    tensors = (a.data, b.data, offsets, *(t for t in (a.scale, b.scale, bias) if t is not None))
    if len({t.device for t in tensors}) > 1:
        raise ValueError(f"grouped_mm {layout}: operands are on {', '.join(sorted({str(t.device) for t in tensors}))}")


def cases_of(recipe: Recipe) -> dict[str, Case]:
    """Return the grouped FP8 products of a recipe, by name. The last entry of a case: whether it has a bias."""
    assert recipe.wgrad_g is not None
    return {
        "forward": (recipe.x.text, recipe.w.text, "nt", ""),
        "forward with bias": (recipe.x.text, recipe.w.text, "nt", "bias"),
        "dgrad": (recipe.dgrad_g.text, UNIT_SCALE, "nn", ""),
        "wgrad": (recipe.wgrad_g.text, UNIT_SCALE, "tn", ""),
    }


def random_operands(
    case: Case, counts: list[int], n: int, k: int, device: torch.device, seed: int = 0
) -> tuple[ScaledTensor, ScaledTensor, Tensor, Tensor | None]:
    """Return random operands, offsets and bias of a case; three more rows than `counts` belong to no expert."""
    generator = torch.Generator().manual_seed(seed)
    a_text, b_text, layout, biased = case
    experts, m = len(counts), sum(counts) + 3
    offsets = torch.tensor(counts, device="cpu").cumsum(0).int().to(device)

    a = random_operand(a_text, (m, k if layout == "nt" else n), generator, device)
    b = random_operand(b_text, (m if layout == "tn" else experts * n, k), generator, device)
    if layout == "tn":
        by_group = torch.rand((experts, n), generator=generator, device="cpu", dtype=torch.float32).to(device)
        a = ScaledTensor(a.data, by_group, a.spec)
    if not biased:
        return a, b, offsets, None
    bias = torch.randn((experts, n), generator=generator, device="cpu", dtype=torch.float32)
    return a, b, offsets, bias.to(device, torch.bfloat16)


def _probe(backend: Backend[Tensor], device: torch.device, case: Case) -> str | None:
    """Compare grouped products with `reference` within bf16 rounding: no rows, one row, odd counts, odd sizes."""
    for counts, n, k in (([5, 0, 1, 33], 70, 167), ([300, 17, 0, 190], 272, 384)):
        a, b, offsets, bias = random_operands(case, counts, n, k, device)
        for dtype in (torch.bfloat16, torch.float32):
            arguments = (a, b, offsets, case[2], dtype, bias, case[2] == "nt")
            expected, actual = reference.grouped_mm(*arguments), backend.run(*arguments)
            if problem := low_sqnr([expected], [actual], 45, [f"the grouped product of {dtype}, rows {counts}"]):
                return problem
    return None


GROUPED_MM = register(
    "grouped_mm",
    {f"{r.name} {name}": case for r in RECIPES.values() if is_grouped(r) for name, case in cases_of(r).items()},
    _probe,
    Backend(name="torch_scaled", run=torch_scaled.grouped_mm, unsupported_reason=torch_scaled.unsupported_reason),
    triton_backend("grouped.triton:grouped_mm"),
    Backend(
        name="torch_bf16", run=partial(reference.grouped_mm, product=torch_bf16.scaled_mm), emulates=True,
        unsupported_reason=lambda device, case: torch_bf16.unsupported_reason(device, case[:3]),
    ),
    reference=reference.grouped_mm, emulates=True,
)  # fmt: skip


def _run(
    a: Tensor, a_scale: Tensor, a_spec: str, b: Tensor, b_scale: Tensor | None, b_spec: str, offsets: Tensor,
    layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
) -> Tensor:  # fmt: skip
    left = ScaledTensor(a, a_scale, QuantSpec.parse(a_spec))
    right = ScaledTensor(b, b_scale, QuantSpec.parse(b_spec))
    case = a_spec, UNIT_SCALE if b_scale is None else b_spec, layout, "" if bias is None else "bias"
    return GROUPED_MM.choose(a.device, case).run(left, right, offsets, layout, out_dtype, bias, fast_accum)


def _fake(
    a: Tensor, a_scale: object, a_spec: str, b: Tensor, b_scale: object, b_spec: str, offsets: Tensor, layout: str,
    out_dtype: torch.dtype, *options: object,
) -> Tensor:  # fmt: skip
    experts = offsets.shape[0]
    if layout == "tn":
        return a.new_empty((experts, a.shape[1], b.shape[1]), dtype=out_dtype)
    return a.new_empty((a.shape[0], b.shape[0] // experts if layout == "nt" else b.shape[1]), dtype=out_dtype)


def _flops(
    a: torch.Size, a_scale: object, a_spec: str, b: torch.Size, b_scale: object, b_spec: str,
    offsets: torch.Size, layout: str, *options: object, out_shape: torch.Size, **_: object,
) -> int:  # fmt: skip
    # Of all rows, also those that belong to no expert: where the offsets end is known on the device only.
    return 2 * a[0] * a[1] * out_shape[-1]


_GROUPED_MM = define("grouped_mm", _run, _fake, flops=_flops)

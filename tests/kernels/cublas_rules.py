"""PyTorch's two FP8 products as a GPU has them: refusing what they refuse there, computing what the reference computes.

The rules are those of torch 2.11-2.13 on sm_90 and sm_100 (`aten/src/ATen/native/cuda/ScaledBlas.cpp`): operands
row-major by column-major, sizes in multiples of 16, scales of exactly these shapes and strides, bias in the output's
dtype. Vectors of scales begin at multiples of 16 bytes, as cuBLAS wants them.
"""

import torch
import torch.nn.functional as F

from octavo.numerics import E4M3, E5M2


class Rules:
    """Stands in for `torch._scaled_mm` and `F.scaled_mm`; `calls` lists (kind, out_dtype, with bias).

    `refused` holds (kind, out_dtype) pairs, kind "row", "tensor", "block" or "mx", that raise, as on another device.
    """

    def __init__(self, refused=()):
        self.calls = []
        self.refused = set(refused)

    def scaled_mm_v1(
        self, a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
    ):  # fmt: skip
        self._operands(a, b, scale_a, scale_b, bias, out_dtype)
        m, n = a.shape[0], b.shape[1]
        assert scale_a.dtype == scale_b.dtype == torch.float32
        if scale_a.numel() == scale_b.numel() == 1:
            kind = "tensor"
        else:
            kind = "row"
            assert scale_a.shape == (m, 1) and scale_b.shape == (1, n)
            assert scale_a.is_contiguous() and scale_b.is_contiguous()
            assert scale_a.stride(1) == 1 and scale_b.stride(1) == 1
        return self._product(kind, a, b, scale_a, scale_b, bias, out_dtype)

    def scaled_mm_v2(
        self, a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a=None, swizzle_b=None, bias=None,
        output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False,
    ):  # fmt: skip
        self._operands(a, b, scale_a, scale_b, bias, output_dtype)
        assert a.dtype == b.dtype == E4M3.dtype
        (m, k), n = a.shape, b.shape[1]
        names = recipe_a.name, recipe_b.name
        if names == ("BlockWise1x32", "BlockWise1x32"):
            assert k % 32 == 0 and swizzle_a.name == swizzle_b.name == "SWIZZLE_32_4_4"
            left, right = self._unswizzled(scale_a, m, k), self._unswizzled(scale_b, n, k)
            return self._product("mx", a, b, left, right.t(), bias, output_dtype)
        assert "BlockWise1x128" in names and {*names} <= {"BlockWise1x128", "BlockWise128x128"} and k % 128 == 0
        left, right = self._spread(scale_a, names[0], m, k), self._spread(scale_b, names[1], n, k)
        return self._product("block", a, b, left, right.t(), bias, output_dtype)

    def scaled_mm_integers(self, a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype):
        """`torch._scaled_mm_v2`, which `F.scaled_mm` calls with lists."""
        types = [F.ScalingType(*recipe) for recipe in (recipe_a, recipe_b)]
        orders = [F.SwizzleType(*swizzle) for swizzle in (swizzle_a, swizzle_b)]
        return self.scaled_mm_v2(a, b, *scale_a, types[0], *scale_b, types[1], *orders, bias, out_dtype)

    @staticmethod
    def _operands(a, b, scale_a, scale_b, bias, out_dtype):
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        for scale in (scale_a, scale_b):
            assert scale.data_ptr() % (16 if scale.numel() > 1 else 4) == 0, "scales are not 16-byte aligned"
        assert not a.dtype == b.dtype == E5M2.dtype
        if bias is not None:
            assert bias.numel() == b.shape[1] and bias.is_contiguous() and bias.data_ptr() % 16 == 0
            if out_dtype == torch.float32:
                raise RuntimeError("Bias is not supported when out_dtype is set to Float32")
            assert bias.dtype == out_dtype

    @staticmethod
    def _spread(scale, name, rows, k):
        blocks = k // 128
        assert scale.dtype == torch.float32
        if name == "BlockWise1x128":
            assert scale.shape == (rows, blocks) and scale.stride() == (1, rows)
            return scale.repeat_interleave(128, 1)
        padded = -(-blocks // 4) * 4
        assert rows % 128 == 0
        assert scale.shape == (padded, rows // 128) and scale.stride() == (1, padded)
        return scale[:blocks].t().repeat_interleave(128, 1).repeat_interleave(128, 0)

    @staticmethod
    def _unswizzled(scale, rows, k):
        tall, groups = -(-rows // 128), k // 32
        wide = -(-groups // 4)
        assert scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous() and scale.numel() == tall * wide * 512
        flat = scale.float().flatten()
        r, g = torch.arange(rows)[:, None], torch.arange(groups)[None, :]
        # cuBLAS documents the offset of scale (r, g) inside its 128 × 4 tile so.
        inside = (r % 32) * 16 + (r % 128 // 32) * 4 + g % 4
        return flat[((r // 128) * wide + g // 4) * 512 + inside].repeat_interleave(32, 1)

    def _product(self, kind, a, b, scale_a, scale_b, bias, out_dtype):
        if (kind, out_dtype) in self.refused:
            raise RuntimeError(f"no {kind} product for {out_dtype}")
        self.calls.append((kind, out_dtype, bias is not None))
        sums = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
        return (sums if bias is None else sums + bias.double()).to(out_dtype)


def install(monkeypatch, rules):
    """Put the rules in place of PyTorch's products, and forget what was found out about those."""
    from octavo.kernels.gemm import torch_scaled

    monkeypatch.setattr(torch, "_scaled_mm", rules.scaled_mm_v1)
    monkeypatch.setattr(F, "scaled_mm", rules.scaled_mm_v2)
    monkeypatch.setattr(torch, "_scaled_mm_v2", rules.scaled_mm_integers)
    monkeypatch.setattr(torch_scaled, "_SUPPORTED", {})
    return rules

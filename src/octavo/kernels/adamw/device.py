"""The AdamW step as one Triton kernel for many parameters, with tables of their addresses, shapes and numbers.

A program handles PER groups of 128 elements of one parameter. MOMENTS: whether moments are FP8. MASTER: 0 the parameter
itself, 1 remainder, 2 float32. NOISE: stochastic rounding. ALIGNED: tensors start at multiples of 16 bytes and rows are
whole groups, so an element's index is its offset.
"""

import triton
import triton.language as tl

from octavo.kernels.adamw.reference import MAX_GRADIENT as _MAX_GRADIENT
from octavo.kernels.adamw.reference import NAN_BITS as _NAN_BITS
from octavo.kernels.primitives import magnitude, to_fp8

GROUP = tl.constexpr(128)
NAN_BITS = tl.constexpr(_NAN_BITS)
MAX_GRADIENT = tl.constexpr(_MAX_GRADIENT)


@triton.jit
def _random(index, seed):
    """Hash an element's index and a seed to 32 random bits (the finalizer of MurmurHash3)."""
    bits = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits.to(tl.uint32) ^ (bits.to(tl.uint32) >> 13)) * 0xC2B2AE35
    bits = bits.to(tl.uint32)
    return (bits ^ (bits >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def _log2(x, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp2(x, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _expanded(size, hi, k, INTERPRETED: tl.constexpr):
    """Return hi · size^(16/k) for sizes from 0 to 1, k in sixteenths; NaN for a whole group with non-finite hi."""
    half = _exp2(_log2(tl.where(size > 0, size, 1.0), INTERPRETED) * (8.0 / k)[:, None], INTERPRETED)
    return tl.where(size > 0, half * hi[:, None] * half, hi[:, None] * 0.0)


@triton.jit
def _compressed(size, TOP: tl.constexpr, REACH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return TOP · (size/hi)^(k/16), hi and k of each group."""
    # Bits of magnitudes sort like the numbers, NaN last, so hi is NaN if any size is.
    hi = tl.max(magnitude(size), axis=1).to(tl.float32, bitcast=True)
    lo = tl.min(tl.where(size > 0, size, float("inf")), axis=1)
    empty = hi == 0
    log_hi = _log2(tl.where(empty, 1.0, hi), INTERPRETED)
    spread = log_hi - _log2(tl.where(empty, 1.0, lo), INTERPRETED)
    k = tl.where(spread > 16 * REACH / 255, tl.floor(16 * REACH / tl.where(spread > 0, spread, 1.0)), 255.0)
    k = tl.maximum(tl.minimum(k, 255.0), 1.0)
    above = _log2(tl.where(size > 0, size, 1.0), INTERPRETED) - log_hi[:, None]
    stretched = _exp2(above * (k / 16)[:, None], INTERPRETED) * TOP
    return tl.where(size > 0, stretched, 0.0), hi, k


@triton.jit
def _to_bf16_bits(x):
    """Round float32 to the nearest bf16, ties to even; return its bits as int32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, NAN_BITS)


@triton.jit
def _tensor_pointer(pointers, which, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(pointers + 9 * which + FIELD).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load_moments(
    pointers, which, at, inside, group, real,
    MOMENTS: tl.constexpr, TOP: tl.constexpr, TOP_T: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if MOMENTS:
        q = tl.load(_tensor_pointer(pointers, which, 2, tl.float8e4nv, ALIGNED) + at, mask=inside, other=0.0).to(
            tl.float32
        )
        hi = tl.load(_tensor_pointer(pointers, which, 4, tl.float32, ALIGNED) + group, mask=real, other=0.0)
        k = tl.load(_tensor_pointer(pointers, which, 5, tl.uint8, ALIGNED) + group, mask=real, other=16).to(tl.float32)
        m = _expanded(tl.abs(q) * (1.0 / TOP), hi, k, INTERPRETED)
        m = tl.where(q < 0, -m, m)
        codes = tl.load(_tensor_pointer(pointers, which, 3, tl.uint8, ALIGNED) + at, mask=inside, other=0).to(tl.int32)
        hi = tl.load(_tensor_pointer(pointers, which, 6, tl.float32, ALIGNED) + group, mask=real, other=0.0)
        k = tl.load(_tensor_pointer(pointers, which, 7, tl.uint8, ALIGNED) + group, mask=real, other=16).to(tl.float32)
        size = ((codes + (127 << 4)) << 19).to(tl.float32, bitcast=True)
        v = _expanded(tl.where(codes > 0, size, 0.0) * (1.0 / TOP_T), hi, k, INTERPRETED)
    else:
        m = tl.load(_tensor_pointer(pointers, which, 2, tl.float32, ALIGNED) + at, mask=inside, other=0.0)
        v = tl.load(_tensor_pointer(pointers, which, 3, tl.float32, ALIGNED) + at, mask=inside, other=0.0)
    return m, v


@triton.jit
def _store_moments(
    m, v, random_bits, pointers, which, at, inside, group, real,
    MOMENTS: tl.constexpr, NOISE: tl.constexpr, TOP: tl.constexpr, REACH: tl.constexpr,
    TOP_T: tl.constexpr, REACH_T: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store both moments; `random_bits` holds 16 random bits for each."""
    if MOMENTS:
        size, hi, k = _compressed(tl.abs(m), TOP, REACH, INTERPRETED)
        if NOISE:
            random = (random_bits & 0xFFFF) << 4
            size = ((size.to(tl.int32, bitcast=True) + random) & -0x100000).to(tl.float32, bitcast=True)
            size = tl.minimum(size, TOP)
        codes = to_fp8(tl.where(m < 0, -size, size), tl.float8e4nv, True, INTERPRETED)
        tl.store(_tensor_pointer(pointers, which, 2, tl.float8e4nv, ALIGNED) + at, codes, mask=inside)
        tl.store(_tensor_pointer(pointers, which, 4, tl.float32, ALIGNED) + group, hi, mask=real)
        tl.store(_tensor_pointer(pointers, which, 5, tl.uint8, ALIGNED) + group, k.to(tl.uint8), mask=real)
        size, hi, k = _compressed(v, TOP_T, REACH_T, INTERPRETED)
        random = ((random_bits >> 16) & 0xFFFF) << 3 if NOISE else (1 << 18)
        codes = ((size.to(tl.int32, bitcast=True) + random) >> 19) - (127 << 4)
        codes = tl.where(size > 0, tl.minimum(tl.maximum(codes, 1), 255), 0)
        tl.store(_tensor_pointer(pointers, which, 3, tl.uint8, ALIGNED) + at, codes.to(tl.uint8), mask=inside)
        tl.store(_tensor_pointer(pointers, which, 6, tl.float32, ALIGNED) + group, hi, mask=real)
        tl.store(_tensor_pointer(pointers, which, 7, tl.uint8, ALIGNED) + group, k.to(tl.uint8), mask=real)
    else:
        tl.store(_tensor_pointer(pointers, which, 2, tl.float32, ALIGNED) + at, m, mask=inside)
        tl.store(_tensor_pointer(pointers, which, 3, tl.float32, ALIGNED) + at, v, mask=inside)


@triton.jit
def adamw_kernel(
    pointers, numbers, shapes, work, PARAM: tl.constexpr, GRAD: tl.constexpr, MOMENTS: tl.constexpr,
    MASTER: tl.constexpr, NOISE: tl.constexpr, TOP: tl.constexpr, REACH: tl.constexpr, TOP_T: tl.constexpr,
    REACH_T: tl.constexpr, PER: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Take one step. pointers [n,9] int64: param, grad, both moments, hi and k of both, master or remainder."""
    # numbers [n,7] float32: 1 − lr·λ, −lr/(1 − β₁ᵗ), 1/√(1 − β₂ᵗ), ε, 1 − β₁, β₂, factor of the gradient. shapes [n,4]
    # int64: rows, columns, groups per row, seed. work [programs,2] int32: parameter, first group.
    which = tl.load(work + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(work + 2 * tl.program_id(0) + 1).to(tl.int64)
    rows, columns = tl.load(shapes + 4 * which), tl.load(shapes + 4 * which + 1)
    across, seed = tl.load(shapes + 4 * which + 2), tl.load(shapes + 4 * which + 3)
    group = first + tl.arange(0, PER)
    real = group < rows * across
    index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if ALIGNED:
        at, inside = index, tl.broadcast_to(real[:, None], (PER, GROUP))
    else:
        column = (group % across)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        at = (group // across)[:, None] * columns + column
        inside = real[:, None] & (column < columns)
    param = _tensor_pointer(pointers, which, 0, PARAM, ALIGNED)
    grad = _tensor_pointer(pointers, which, 1, GRAD, ALIGNED)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers + 7 * which + 6)
    # Finite gradients saturate, so that their squares stay finite.
    g = tl.where(tl.abs(g) < float("inf"), tl.minimum(tl.maximum(g, -MAX_GRADIENT), MAX_GRADIENT), g)
    m, v = _load_moments(pointers, which, at, inside, group, real, MOMENTS, TOP, TOP_T, ALIGNED, INTERPRETED)
    m = m + tl.load(numbers + 7 * which + 4) * (g - m)
    beta2 = tl.load(numbers + 7 * which + 5)
    v = v * beta2 + g * g * (1 - beta2)
    # The master, or the parameter where that was written since the last step and the master is stale.
    value = tl.load(param + at, mask=inside, other=0.0)
    p = value.to(tl.float32)
    if MASTER == 2:
        master = _tensor_pointer(pointers, which, 8, tl.float32, ALIGNED)
        exact = tl.load(master + at, mask=inside, other=0.0)
        if PARAM == tl.bfloat16:
            rounded = (_to_bf16_bits(exact) << 16).to(tl.float32, bitcast=True)
        else:
            rounded = exact.to(PARAM).to(tl.float32)
        p = tl.where(rounded == p, exact, p)
    elif MASTER == 1:
        rest = _tensor_pointer(pointers, which, 8, tl.int16, ALIGNED)
        upper = value.to(tl.int16, bitcast=True).to(tl.int32)
        exact = ((upper << 16) + tl.load(rest + at, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
        p = tl.where((exact == exact) & (tl.abs(p) < float("inf")), exact, p)
    root = tl.sqrt(v) * tl.load(numbers + 7 * which + 2) + tl.load(numbers + 7 * which + 3)
    p = p * tl.load(numbers + 7 * which) + tl.load(numbers + 7 * which + 1) * (m / root)
    random_bits = _random(index, seed) if MOMENTS and NOISE else index
    _store_moments(
        m, v, random_bits, pointers, which, at, inside, group, real,
        MOMENTS, NOISE, TOP, REACH, TOP_T, REACH_T, ALIGNED, INTERPRETED,
    )  # fmt: skip
    if MASTER == 1:
        bits = p.to(tl.int32, bitcast=True)
        upper = tl.where(p == p, (bits + 0x8000) >> 16, NAN_BITS)
        tl.store(rest + at, tl.where(p == p, bits - (upper << 16), 0).to(tl.int16), mask=inside)
        tl.store(param + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        if MASTER == 2:
            tl.store(master + at, p, mask=inside)
        if PARAM == tl.bfloat16:
            if NOISE and MASTER == 0:
                random = _random(index, seed + 1) & 0xFFFF
                upper = tl.where(p == p, (p.to(tl.int32, bitcast=True) + random) >> 16, NAN_BITS)
            else:
                upper = _to_bf16_bits(p)
            tl.store(param + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        else:
            tl.store(param + at, p.to(PARAM), mask=inside)

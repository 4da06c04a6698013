"""Device code of promoted FP8 products on Hopper, in Gluon: partial sums are added while the next ones are multiplied.

The sums pass through a second wait, so that LLVM does not move additions behind the next product, which would copy
accumulators while products are under way. docs/kernels.md has the design.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.kernels.gemm.device import scaled, tile_at

SLOTS = gl.constexpr(4)
"""Tiles of operands in shared memory, and steps of the contraction between two waits for all products."""

# Renamed between Triton 3.6 and 3.9.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _load(a, b, a_tiles, b_tiles, full, empty, m, n, k, GROUP: gl.constexpr):
    """Load the tiles of every step, in the order in which `_multiply` reads them."""
    TILE_M: gl.constexpr = a_tiles.shape[1]
    TILE_N: gl.constexpr = b_tiles.shape[1]
    TILE_K: gl.constexpr = a_tiles.shape[2]
    tiles_m = gl.cdiv(m, TILE_M)
    tiles_n = gl.cdiv(n, TILE_N)
    rounds = gl.cdiv(k, TILE_K * SLOTS)
    phase = 1  # the slots are empty
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(index, tiles_m, tiles_n, GROUP)
        for round in range(rounds):
            for slot in gl.static_range(SLOTS):
                column = (round * SLOTS + slot) * TILE_K
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), (TILE_M + TILE_N) * TILE_K)
                _load_tile(a, [tile_m * TILE_M, column], full.index(slot), a_tiles.index(slot))
                _load_tile(b, [tile_n * TILE_N, column], full.index(slot), b_tiles.index(slot))
            phase ^= 1


@gluon.jit
def _product(a_tiles, b_tiles, full, SLOT: gl.constexpr, phase, part):
    """Begin the products of a slot, into the registers of `part`."""
    mbarrier.wait(full.index(SLOT), phase)
    right = b_tiles.index(SLOT).permute((1, 0))
    return warpgroup_mma(a_tiles.index(SLOT), right, part, use_acc=False, is_async=True)


@gluon.jit
def _scales(scale, first, step, rows, k, stride_r, stride_k, ROWS: gl.constexpr, BLOCK_ROWS: gl.constexpr,
            TILE_K: gl.constexpr, BLOCKED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Load block scales of a tile's rows at one step: a vector, or a scalar if one 128-row block contains the tile."""
    inside = step * TILE_K < k
    step_scale = scale + step * (TILE_K // 128) * stride_k
    if not BLOCKED:
        return 1.0
    elif BLOCK_ROWS == 1:
        row = first + gl.arange(0, ROWS, LAYOUT)
        return gl.load(step_scale + row * stride_r, mask=(row < rows) & inside, other=0.0)
    else:
        return gl.load(step_scale + (first // BLOCK_ROWS) * stride_r, mask=inside, other=0.0)


@gluon.jit
def _added(sums, part, s, t, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BLOCKED: gl.constexpr):
    LAYOUT: gl.constexpr = sums.type.layout
    if not BLOCKED:
        return sums + part
    elif A_ROWS == 1 and B_ROWS == 1:
        t = gl.convert_layout(t, gl.SliceLayout(0, LAYOUT))
        return gl.fma(part, s[:, None] * t[None, :], sums)
    elif A_ROWS == 1:
        return gl.fma(part, (s * t)[:, None], sums)
    else:
        return gl.fma(part, gl.convert_layout(s * t, gl.SliceLayout(0, LAYOUT))[None, :], sums)


@gluon.jit
def _multiply(
    a_tiles, b_tiles, full, empty, out, a_scale, b_scale, bias, m, n, k, a_stride_r, a_stride_k, b_stride_r, b_stride_k,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BLOCKED: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Multiply, promote, scale and store tile after tile."""
    TILE_M: gl.constexpr = a_tiles.shape[1]
    TILE_N: gl.constexpr = b_tiles.shape[1]
    TILE_K: gl.constexpr = a_tiles.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TILE_N, 32]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SUMS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tiles_m = gl.cdiv(m, TILE_M)
    tiles_n = gl.cdiv(n, TILE_N)
    rounds = gl.cdiv(k, TILE_K * SLOTS)
    phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(index, tiles_m, tiles_n, GROUP)
        first_m = tile_m * TILE_M
        first_n = tile_n * TILE_N
        sums = gl.zeros((TILE_M, TILE_N), gl.float32, SUMS)
        part = gl.zeros((TILE_M, TILE_N), gl.float32, SUMS)
        free = gl.zeros((TILE_M, TILE_N), gl.float32, SUMS)
        for round in range(rounds):
            step = round * SLOTS
            s = _scales(a_scale, first_m, step, m, k, a_stride_r, a_stride_k, TILE_M, A_ROWS, TILE_K, BLOCKED, ROW)
            t = _scales(b_scale, first_n, step, n, k, b_stride_r, b_stride_k, TILE_N, B_ROWS, TILE_K, BLOCKED, LINE)
            running = _product(a_tiles, b_tiles, full, 0, phase, part)
            for slot in gl.static_range(1, SLOTS):
                step += 1
                next_s = _scales(
                    a_scale, first_m, step, m, k, a_stride_r, a_stride_k, TILE_M, A_ROWS, TILE_K, BLOCKED, ROW
                )
                next_t = _scales(
                    b_scale, first_n, step, n, k, b_stride_r, b_stride_k, TILE_N, B_ROWS, TILE_K, BLOCKED, LINE
                )
                begun = _product(a_tiles, b_tiles, full, slot, phase, free)
                part = warpgroup_mma_wait(1, [running])
                mbarrier.arrive(empty.index(slot - 1))
                sums = _added(sums, part, s, t, A_ROWS, B_ROWS, BLOCKED)
                free, sums = warpgroup_mma_wait(1, [part, sums])  # added before the next product begins
                running, s, t = begun, next_s, next_t
            part = free
            free = warpgroup_mma_wait(0, [running])
            mbarrier.arrive(empty.index(SLOTS - 1))
            sums = _added(sums, free, s, t, A_ROWS, B_ROWS, BLOCKED)
            phase ^= 1
        row = first_m + gl.arange(0, TILE_M, ROW)
        column = first_n + gl.arange(0, TILE_N, COLUMN)
        if not BLOCKED:
            sums = scaled(sums, a_scale, b_scale, row, column, m, n, a_stride_r, b_stride_r, A_ROWS, B_ROWS)
        if BIAS:
            sums = sums + gl.load(bias + column, mask=column < n, other=0.0).to(gl.float32)[None, :]
        _store(out, sums.to(out.dtype.element_ty), first_m, first_n, m, n)


@gluon.jit
def _store(out, result, first_m, first_n, m, n):
    ROWS: gl.constexpr = result.shape[0]
    COLUMNS: gl.constexpr = result.shape[1]
    WIDTH: gl.constexpr = 128 // result.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = COLUMNS // WIDTH if COLUMNS // WIDTH < 32 else 32
    WIDE: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    row = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    column = first_n + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
    inside = (row < m)[:, None] & (column < n)[None, :]
    where = out + row.to(gl.int64)[:, None] * n + column[None, :]
    gl.store(where, gl.convert_layout(result, WIDE), mask=inside)


@gluon.jit
def promoted_kernel(
    a, b, out, a_scale, b_scale, bias, m, n, k, a_stride_r, a_stride_k, b_stride_r, b_stride_k,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BLOCKED: gl.constexpr, BIAS: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute tiles of out [m,n] = (A [m,k] · B [n,k]ᵀ) · scales + bias; arguments as of `product_kernel`."""
    a_tiles = gl.allocate_shared_memory(a.dtype, [SLOTS, TILE_M, TILE_K], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [SLOTS, TILE_N, TILE_K], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    a_tiles, b_tiles, full, empty, out, a_scale, b_scale, bias, m, n, k, a_stride_r, a_stride_k,
                    b_stride_r, b_stride_k, A_ROWS, B_ROWS, BLOCKED, BIAS, GROUP,
                ),
            ),
            (_load, (a, b, a_tiles, b_tiles, full, empty, m, n, k, GROUP)),
        ],
        [1],
        [24],
    )  # fmt: skip

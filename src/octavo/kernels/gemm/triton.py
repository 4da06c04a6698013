"""scaled_mm as one persistent Triton kernel: any sizes, all scale granularities except 1×32 (docs/kernels.md)."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.gemm.device import product_kernel
from octavo.kernels.gemm.operand_layout import ALIGNMENT, Operand, blocks_of, empty_product, oriented, packed
from octavo.kernels.launch import INTERPRETED, Launch, PreparedLaunch, compile_function, preparation, render
from octavo.kernels.registry import Case, Shape
from octavo.numerics.formats import E5M2
from octavo.numerics.spec import FULL, Granularity
from octavo.runtime.torch_compat import empty_strided_on
from octavo.tensor import ScaledTensor

# What a product by Triton does, prepared: take addresses, allocate, launch (`octavo.kernels.direct`).


class TritonProduct:
    """Products by one kernel, for operands and bias of equal shapes, strides, dtypes and device. Holds no tensor."""

    def __init__(
        self, left: Operand, right: Operand, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
        config: int | None, overlap: bool,
    ) -> None:  # fmt: skip
        (m, k), n, device = left.data.shape, right.data.shape[0], left.data.device
        target, blocked = target_for(device), left.blocks.columns == BLOCK
        fast = fast_accum and target.limited_accumulator and not blocked
        self._gluon = overlap and not INTERPRETED and overlaps(target, fast)
        available = configurations(target, fast, blocked_rows(left.blocks, right.blocks), out_dtype.itemsize)
        chosen = CONFIGS[config if config in available else estimated_fastest(available, m, n, target)]
        a_rows, b_rows = (NO_SCALE if operand.scale is None else operand.blocks.rows for operand in (left, right))
        self._launch = launch_of(chosen, target, a_rows, b_rows, blocked, bias is not None, fast, self._gluon)
        self._programs = min(chosen.tiles(m, n), target.multiprocessors if self._gluon else chosen.programs(target))
        self._tiles = [(rows, chosen.tile_k) for rows in (chosen.tile_m, chosen.tile_n)] if target.tma else None
        self._device, self._empty, self._out = device, empty_strided_on(device), ((m, n), (n, 1), out_dtype)
        self._transposed = layout[0] == "t", layout[1] == "n"
        self._scaled, self._biased = (left.scale is not None, right.scale is not None), bias is not None
        self._scalars = {"m": m, "n": n, "k": k + -k % ALIGNMENT}
        for name, operand in (("a", left), ("b", right)):
            r, c = (n, 1) if operand.scale is None else operand.scale.stride()
            self._scalars |= {f"{name}_stride_r": r, f"{name}_stride_k": c}
        dense = all(operand.data.is_contiguous() for operand in (left, right))
        self._as_they_are = dense and not k % ALIGNMENT and (bias is None or bias.is_contiguous())
        self._step: PreparedLaunch | None = None
        self.run: Callable[..., Tensor] = self._run

    def __call__(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return self.run(a, b, a_scale, b_scale, bias)

    def _run(self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        index = self._device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self._run(a, b, a_scale, b_scale, bias)
        left, right = (
            packed(x.t() if transposed else x, 1, ALIGNMENT)
            for x, transposed in zip((a, b), self._transposed, strict=True)
        )
        out = self._empty(*self._out)
        others = out if a_scale is None else a_scale, out if b_scale is None else b_scale
        tensors = left, right, out, *others, out if bias is None else bias.contiguous()
        if self._step is None:
            arguments = dict(zip(_TENSORS, tensors, strict=True)) | self._scalars
            for name, data, tile in zip("ab", (left, right), self._tiles or (), strict=False):
                arguments[name] = descriptor(data, tile, self._gluon)
            self._step = self._launch.prepared((self._programs,), arguments)
        elif self.run == self._run and self._as_they_are:  # a product that runs once, as that of an op, is not worth it
            self.run = self._generated(self._step) or self._run
        self._step(tensors)
        return out

    def _generated(self, step: PreparedLaunch) -> Callable[..., Tensor] | None:
        """Return `_run` for aligned operands read as they are, without branches; None if none was compiled."""
        constants: dict[str, Any] = {"general": self._run}
        launched = step.source(constants)
        if launched is None:
            return None
        otherwise = f"return general({', '.join(_PARAMETERS)})"
        read = [True, True, *self._scaled, self._biased]
        addresses = [name.lower() for name, present in zip(_PARAMETERS, read, strict=True) if present]
        lines = [
            *preparation(self._device.index, constants, otherwise),
            *(f"{name} = {name.upper()}.data_ptr()" for name in addresses),
            f"if ({' | '.join(addresses)}) & 15: {otherwise}",
            f"OUT = {render(self._empty, constants)}{render(self._out, constants)}",
            "out = OUT.data_ptr()",
            *(f"{name.lower()} = out" for name, present in zip(_PARAMETERS, read, strict=True) if not present),
        ]
        return compile_function(", ".join(_PARAMETERS), [*lines, launched, "return OUT"], constants)


def descriptor(data: Tensor, tile: tuple[int, int], gluon: bool = False) -> Any:
    """Return a TMA descriptor of a matrix in Triton's language or in Gluon."""
    sizes = list(data.shape), list(data.stride()), list(tile)
    if not gluon:
        return TensorDescriptor(data, *sizes)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(data, *sizes, tile_layout())


@lru_cache(maxsize=1)
def tile_layout() -> Any:
    """Return the layout of operands in shared memory, which the matrix units read: rows of 128 bytes, swizzled."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


_TENSORS = ("a", "b", "out", "a_scale", "b_scale", "bias")  # Arguments of the kernels that are tensors, in their order
_PARAMETERS = ("A", "B", "A_SCALE", "B_SCALE", "BIAS")


GROUP = 8  # Tile rows processed together, which share columns of B in L2

BLOCK = 128


class Config(NamedTuple):
    tile_m: int  # Rows of the output per tile
    tile_n: int  # Columns of the output per tile
    tile_k: int  # Contraction per step
    warps: int  # Warps per program
    stages: int  # Tiles of operands in flight
    flatten: bool  # Whether the pipeline continues from one tile to the next
    per_sm: int  # Programs that share a multiprocessor
    rate: float  # Expected fraction of peak for a large product; ranks configurations without measurements

    @property
    def promotes(self) -> bool:
        """Whether registers can hold a second accumulator, for sums promoted every step."""
        return self.tile_m * self.tile_n <= 64 * 32 * self.warps

    def tiles(self, m: int, n: int) -> int:
        return -(-m // self.tile_m) * -(-n // self.tile_n)

    def programs(self, target: "Target") -> int:
        """Return the largest number of programs in a launch; more tiles are shared between them."""
        return target.multiprocessors * self.per_sm

    def stages_within(self, shared: int) -> int:
        """Return how many stages fit into `shared` bytes of shared memory."""
        return max(1, min(self.stages, shared // ((self.tile_m + self.tile_n) * self.tile_k)))


CONFIGS = (
    Config(128, 128, 128, 8, 4, True, 1, 0.8),
    Config(128, 256, 128, 8, 3, True, 1, 1.0),
    Config(128, 256, 128, 8, 4, False, 1, 0.95),
    Config(128, 128, 128, 4, 3, False, 2, 0.9),
    Config(64, 128, 128, 4, 4, False, 2, 0.7),
    Config(64, 64, 128, 4, 4, False, 2, 0.45),
)


def unsupported_reason(case: Case) -> str | None:
    """Return why this backend cannot run a case, or None; `registry.triton_unsupported` checks the device."""
    if not supports_blocks(*blocks_of(case)):
        return f"this kernel does not support scales of {case[0]} by {case[1]}, layout {case[2]}"
    if all(text.startswith(E5M2.name) for text in case[:2]):
        return "FP8 matrix units do not multiply E5M2 by E5M2"
    return None


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
    config: int | None = None, overlap: bool = True,
) -> Tensor:  # fmt: skip
    """See `octavo.kernels.gemm.scaled_mm`; `config` and `overlap` as in `plan_of`."""
    plan = plan_of(a, b, layout, out_dtype, bias, fast_accum, config, overlap)
    if plan is None:
        left, right = oriented(a, b, layout)
        return empty_product(left, right, out_dtype, bias)
    return plan(a.data, b.data, a.scale, b.scale, bias)


def plan_of(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
    config: int | None = None, overlap: bool = True,
) -> TritonProduct | None:  # fmt: skip
    """Return what computes products of operands like these from their data, scales and bias; None for empty ones."""
    # `config` is an index into `CONFIGS`; None, or a configuration that does not support this product, selects one by
    # an estimate from the shape. `overlap`: promote sums while the next ones are computed, if the target `overlaps`.
    left, right = oriented(a, b, layout)
    if left.data.numel() == 0 or right.data.numel() == 0:
        return None
    if not supports_blocks(left.blocks, right.blocks):
        raise NotImplementedError(f"this kernel does not support scales of {a.spec} by {b.spec}, layout {layout}")
    return TritonProduct(left, right, layout, out_dtype, bias, fast_accum, config, overlap)


_OLDER_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)

NO_SCALE = -1  # `A_ROWS` and `B_ROWS` of an operand without scales


def supports_blocks(left: Granularity, right: Granularity) -> bool:
    """Whether the kernel supports a pair of scale blocks, oriented as [outside, contraction]."""
    if left.columns == right.columns == BLOCK:
        return (left.rows, right.rows) in ((1, 1), (1, BLOCK), (BLOCK, 1))
    return left.columns == right.columns == FULL and {left.rows, right.rows} <= {FULL, 1}


def blocked_rows(left: Granularity, right: Granularity) -> int:
    """Return how many operands have block scales that differ by row; 0 without block scales."""
    return [left.rows, right.rows].count(1) if left.columns == BLOCK else 0


class Target(NamedTuple):
    """Device properties that determine compilation and launch."""

    tma: bool  # Whether TMA loads the operands
    # Whether the matrix units have a shorter accumulator, which saves registers (Hopper). Elsewhere accumulators are
    # float32, and configurations with more than 64 per thread spill.
    limited_accumulator: bool
    shared: int  # Shared memory per program, in bytes
    multiprocessors: int  # Number of multiprocessors


def overlaps(target: Target, fast: bool) -> bool:
    """Whether promoted sums are added while the next ones are computed: on Hopper."""
    return not fast and target.limited_accumulator


def overlaps_in_training(device: torch.device, case: Case) -> bool:
    """Whether training runs a case of products with the kernel that promotes while it multiplies."""
    major, minor = torch.cuda.get_device_capability(device)
    return overlaps(target_of(10 * major + minor, 1), case[2] == "nt" and blocks_of(case)[0].columns != BLOCK)


@lru_cache(maxsize=32)
def target_for(device: torch.device) -> Target:
    """Return the target of a device; without a GPU, one for the interpreter."""
    if device.type != "cuda":
        # The interpreter: few programs, so that each walks several tiles.
        return target_of(90, 3)
    properties = torch.cuda.get_device_properties(device)
    return target_of(properties.major * 10 + properties.minor, properties.multi_processor_count)


def target_of(capability: int, multiprocessors: int) -> Target:
    """Return the target of a compute capability, such as 90."""
    # sm_120 has TMA but its matrix units read registers, as those of sm_89 do.
    datacenter = 90 <= capability < 120
    return Target(
        tma=datacenter, limited_accumulator=capability == 90, shared=(227 if datacenter else 99) * 1024,
        multiprocessors=multiprocessors,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def estimated_fastest(available: tuple[int, ...], m: int, n: int, target: Target, products: int = 1) -> int:
    """Estimate the fastest configuration for products [m,n]: the number of waves of tiles by tile size and rate."""

    def cost(index: int) -> float:
        config = CONFIGS[index]
        waves = -(-products * config.tiles(m, n) // target.multiprocessors)
        return waves * config.tile_m * config.tile_n / config.rate

    return min(available, key=cost)


@lru_cache(maxsize=64)
def configurations(target: Target, fast: bool, blocked: int, out_bytes: int) -> tuple[int, ...]:
    """Return the configurations whose registers and shared memory fit, for a kind of product."""

    def fits(config: Config) -> bool:
        if not (fast or config.promotes):
            return False
        if not target.tma:
            # Operands pass through registers, so with 1×128 scales on both sides the largest tile does not fit.
            return not (blocked and config.tile_m * config.tile_n > 64 * 128)
        if target.limited_accumulator and blocked:
            # Two partial sums leave few registers, and spill with scales by row on both sides, float32 and Triton 3.6.
            crowded = (blocked == 2) + (out_bytes == 4) + _OLDER_TRITON
            if config.tile_m * config.tile_n > 64 * (256, 256, 128, 64)[crowded]:
                return False
        # A flattened pipeline holds its buffers while the tile is rearranged for wide stores.
        rearranged = config.tile_m * config.tile_n * out_bytes if config.flatten else 0
        return config.stages * (config.tile_m + config.tile_n) * config.tile_k + rearranged <= target.shared

    return tuple(index for index, config in enumerate(CONFIGS) if fits(config))


def training_configurations(device: torch.device, case: Case) -> tuple[int, ...]:
    """Return the configurations for a case in training: bf16 output, fast accumulation in forward only."""
    return configurations(*_training_kind(target_for(device), case))


def _training_kind(target: Target, case: Case) -> tuple[Target, bool, int, int]:
    blocked = blocked_rows(*blocks_of(case))
    return target, case[2] == "nt" and target.limited_accumulator and not blocked, blocked, 2


def trials(device: torch.device, case: Case, config: int | None = None) -> list[tuple[int, Shape]]:
    """Return configurations, each with a shape m, n in which every program has two tiles or more."""
    # A small product has one tile per program, so it shows nothing about how a program goes from tile to tile.
    target = target_for(device)
    available = configurations(*_training_kind(target, case))
    if config is not None:
        picked = {config} & set(available)
    else:  # those that estimates pick for products of many tiles
        sizes = range(512, 16385, 512)
        picks = {(m, n): estimated_fastest(available, m, n, target) for m in sizes for n in sizes}
        picked = {i for shape, i in picks.items() if CONFIGS[i].tiles(*shape) > CONFIGS[i].programs(target)}
    sides = {i: math.isqrt(2 * CONFIGS[i].programs(target)) + 1 for i in sorted(picked)}  # side² tiles
    return [(i, (side * CONFIGS[i].tile_m - 7, side * CONFIGS[i].tile_n - 9)) for i, side in sides.items()]


@lru_cache(maxsize=1024)
def launch_of(
    config: Config, target: Target, a_rows: int, b_rows: int, blocked: bool, bias: bool, fast: bool, overlap: bool
) -> Launch:
    """Return the kernel in a configuration; `overlap` as in `plan_of`."""
    constants: dict[str, Any] = {
        "A_ROWS": a_rows, "B_ROWS": b_rows, "BLOCKED": blocked, "BIAS": bias, "TILE_M": config.tile_m,
        "TILE_N": config.tile_n, "TILE_K": config.tile_k, "GROUP": GROUP,
    }  # fmt: skip
    if overlap:
        from octavo.kernels.gemm.promoted_device import SLOTS, promoted_kernel

        return Launch(kernel=promoted_kernel, constants=constants, num_warps=config.warps, num_stages=SLOTS.value)
    constants |= {"FAST": fast, "FLATTEN": config.flatten and target.tma, "TMA": target.tma, "INTERPRETED": INTERPRETED}
    stages = config.stages_within(target.shared)
    return Launch(kernel=product_kernel, constants=constants, num_warps=config.warps, num_stages=stages)

"""The roofline of a linear layer: how long its products and quantizing passes take on a GPU. Predictions, all of it.

    product [m,k]·[k,n]   max( 2·m·n·k / (peak · eff), bytes / bandwidth, launch )
                          eff = efficiency · tiles / (tiles + multiprocessors / 2)
                          tiles = m·n / 128², times k / 512 where the output has fewer than there are multiprocessors
    quantizing pass       max( bytes / bandwidth, launch )
    in eager PyTorch      at least host time · operations, for a layer and for a step

Tiles are computed in waves, one on each multiprocessor, and on average half of the last wave is idle; a small output is
split along what it contracts. That is all of the dependence on shape here. It is the same for bf16 and FP8, so that at
small shapes the passes, which do not shrink as fast as the products, decide.

Forward, dgrad and wgrad are [M,K]·[K,N], [M,N]·[N,K], [N,M]·[M,K]. What quantizing moves, per element, beside scales
(`octavo.nn.linear` on a GPU; bf16 is read at 2 bytes, FP8 written at 1 per memory order):

    operand                       by tensor       by row (rowwise)     by block (blockwise, mxfp8)
    X, read by several linears    2 + 2 + 1 + 1   2 + 1 + 1            2 + 1 + 1      once for all of them
    W in forward                  2 + 2 + 1       2 + 1                2 + 1
    W again in backward           2 + 1           2 + 1                2 + 1          its scales are known
    G for dgrad and wgrad         2 + 2 + 1 + 1   2 + 2 + 1 + 1        2 + 1 + 1

The maximum of a whole tensor, or of columns, is a pass of its own that reads everything once more. A frozen W has no
wgrad, so X needs no second memory order; an input without gradient has no dgrad.

MX scales on a GPU whose matrix units do not know them are emulated: the products then run in bf16 at best. Nothing
here looks at a device or a tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import FULL, QuantSpec
from octavo.planner.devices import Gpu

TILE, SPLIT = 128, 512
"""Sides of an output tile, and the least of a contraction that is worth a multiprocessor of its own."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One call of a linear layer: X [M,K], W [N,K].

    Attributes:
        m: Tokens.
        k: in_features.
        n: out_features.
        dgrad: Whether X needs a gradient.
        wgrad: Whether W does.
        first: Whether this call is the first that reads its X, so that it quantizes it.
    """

    m: int
    k: int
    n: int
    dgrad: bool = True
    wgrad: bool = True
    first: bool = True

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """(m, n, k) of the products that it makes, k being what is contracted: forward first."""
        forward, dgrad, wgrad = (self.m, self.n, self.k), (self.m, self.k, self.n), (self.n, self.k, self.m)
        return (forward, *([dgrad] if self.dgrad else []), *([wgrad] if self.wgrad else []))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a linear layer, of forward and of backward, and operations that the host launches for it."""

    forward: float
    backward: float
    launches: int

    @property
    def total(self) -> float:
        """Seconds of the GPU."""
        return self.forward + self.backward

    def wall(self, gpu: Gpu, *, eager: bool) -> float:
        """Seconds of the GPU, or of the host where eager launches take longer than what they launch."""
        return max(self.total, self.launches * gpu.host_us * 1e-6) if eager else self.total


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Bytes of each pass that quantizes, of one linear: those before forward's product, and those in backward."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def product(gpu: Gpu, m: int, n: int, k: int, *, operand: int = 2, rate: float | None = None) -> float:
    """Seconds of [m,k]·[k,n] with a bf16 result.

    Args:
        gpu: Where.
        m: Rows of the result.
        n: Columns of the result.
        k: What is contracted.
        operand: Bytes per element of the operands.
        rate: FLOP/s of a large product; that of bf16 where None.
    """
    if not m * n * k:
        return 0.0
    if rate is None:
        rate = gpu.bf16_tflops * 1e12 * gpu.bf16_efficiency
    tiles = max(m / TILE, 1.0) * max(n / TILE, 1.0)
    if tiles < gpu.multiprocessors:
        tiles = min(gpu.multiprocessors, tiles * max(k / SPLIT, 1.0))
    compute = 2 * m * n * k / rate * (1 + gpu.multiprocessors / 2 / tiles)
    return max(compute, (operand * (m * k + k * n) + 2 * m * n) / gpu.bandwidth, gpu.launch_us * 1e-6)


def moving(gpu: Gpu, moved: float) -> float:
    """Seconds of a kernel that reads and writes so many bytes."""
    return max(moved / gpu.bandwidth, gpu.launch_us * 1e-6) if moved else 0.0


def fp8_rate(gpu: Gpu, recipe: Recipe) -> float | None:
    """FLOP/s of large FP8 products of a recipe; None where they are emulated in bf16."""
    if not gpu.fp8_tflops or (recipe.x.scale_rule == "e8m0" and not gpu.blocks_of_32):
        return None
    inside = recipe.x.granularity.columns != FULL
    return gpu.fp8_tflops * 1e12 * (gpu.block_efficiency if inside else gpu.fp8_efficiency)


def bf16_linear(gpu: Gpu, linear: Linear) -> Cost:
    """A linear layer in bf16: its products."""
    times = [product(gpu, *sizes) for sizes in linear.products]
    return Cost(forward=times[0], backward=sum(times[1:]), launches=len(times))


def fp8_linear(gpu: Gpu, linear: Linear, recipe: Recipe) -> Cost:
    """A linear layer in FP8, quantizing included, as Octavo runs it."""
    return cost(gpu, linear, passes(linear, recipe), fp8_rate(gpu, recipe), hp_wgrad=recipe.wgrad_x is None)


def cost(gpu: Gpu, linear: Linear, moved: Passes, rate: float | None, *, hp_wgrad: bool = False) -> Cost:
    """A linear layer whose quantizing passes are given.

    Args:
        gpu: Where.
        linear: Its sizes.
        moved: What quantizing moves; other libraries' tables can be given.
        rate: FLOP/s of large FP8 products; None runs them in bf16.
        hp_wgrad: Whether wgrad runs in bf16 all the same.
    """

    def one(sizes: tuple[int, int, int], exact: bool) -> float:
        return product(gpu, *sizes) if exact or rate is None else product(gpu, *sizes, operand=1, rate=rate)

    last = len(linear.products) - 1
    times = [one(sizes, hp_wgrad and linear.wgrad and i == last) for i, sizes in enumerate(linear.products)]
    return Cost(
        forward=times[0] + sum(moving(gpu, size) for size in moved.forward),
        backward=sum(times[1:]) + sum(moving(gpu, size) for size in moved.backward),
        launches=len(times) + len(moved.forward) + len(moved.backward),
    )


def passes(linear: Linear, recipe: Recipe) -> Passes:
    """What Octavo's quantizers move for one linear."""
    x, w, g = (linear.m, linear.k), (linear.n, linear.k), (linear.m, linear.n)
    if not math.prod((*x, linear.n)):
        return Passes(forward=(), backward=())
    keeps_x = linear.wgrad and recipe.wgrad_x is not None
    forward: list[float] = []
    if linear.first:
        forward += _quantizing(x, (recipe.x, recipe.wgrad_x) if keeps_x and recipe.wgrad_x else (recipe.x,))
    forward += _quantizing(w, (recipe.w,))
    backward: list[float] = []
    if linear.dgrad:
        backward += _quantizing(w, (recipe.dgrad_w,), given=recipe.dgrad_w == recipe.w)
    wanted = [recipe.dgrad_g] if linear.dgrad else []
    wanted += [recipe.wgrad_g] if linear.wgrad and recipe.wgrad_g is not None else []
    if wanted:
        backward += _quantizing(g, wanted)
    return Passes(forward=tuple(forward), backward=tuple(backward))


def _quantizing(shape: tuple[int, int], forms: Sequence[QuantSpec], *, given: bool = False) -> list[float]:
    """Bytes of the passes that make these forms of one matrix: a look for maxima where one is needed, and the cast."""
    elements = shape[0] * shape[1]
    looks = not given and any(spec.granularity.rows == FULL for spec in forms)  # by tensor or column: not held on chip
    scales = sum(
        math.prod(spec.granularity.scale_shape(shape)) * (1 if spec.scale_rule == "e8m0" else 4) for spec in set(forms)
    )
    cast = (2.0 + len(forms)) * elements + scales
    return [2.0 * elements, cast] if looks else [cast]

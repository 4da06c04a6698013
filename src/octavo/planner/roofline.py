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

Where products and passes were measured on the GPU (`Gpu.measured`), these times take the place of the formulas, and a
cost says how much of it was measured.

Products that PyTorch does not have on a GPU, by what its backend says of the compute capability (scales by block on
Blackwell and Ada), are those of Octavo's Triton kernel, at `triton_efficiency`: assumed, and not measured there.

MX scales on a GPU whose matrix units do not know them are emulated: the products then run in bf16 at best. Nothing
here looks at a device or a tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kernels.gemm import bf16_timing, cases_of
from octavo.kernels.gemm.torch_scaled import unsupported_by_capability
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import FULL, QuantSpec
from octavo.planner.devices import Gpu

Timed = tuple[float, bool]
"""Seconds, and whether they were measured."""

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
    def named_products(self) -> dict[str, tuple[int, int, int]]:
        """(m, n, k) of the products that it makes, by name, k being what is contracted: forward first."""
        forward, dgrad, wgrad = (self.m, self.n, self.k), (self.m, self.k, self.n), (self.n, self.k, self.m)
        found = {"forward": forward} | ({"dgrad": dgrad} if self.dgrad else {})
        return found | ({"wgrad": wgrad} if self.wgrad else {})

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """The same without their names."""
        return tuple(self.named_products.values())


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a linear layer, of forward and of backward, and operations that the host launches for it; and how many
    of the seconds were measured on such a GPU.
    """

    forward: float
    backward: float
    launches: int
    measured: float = 0.0

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
    share = gpu.block_efficiency if inside else gpu.fp8_efficiency
    if triton_alone(gpu, recipe) is not None:
        share = min(share, gpu.triton_efficiency)
    return gpu.fp8_tflops * 1e12 * share


def triton_alone(gpu: Gpu, recipe: Recipe) -> str | None:
    """Why products of a recipe are Triton's on this GPU, as the backend of PyTorch's own puts it; None where they are
    PyTorch's.
    """
    capability = divmod(gpu.capability, 10)
    return next(
        (
            why
            for case in cases_of(recipe).values()
            if gpu.capability and (why := unsupported_by_capability(capability, case))
        ),
        None,
    )


def bf16_linear(gpu: Gpu, linear: Linear) -> Cost:
    """A linear layer in bf16: its products."""
    timed = {
        name: _timed(gpu, bf16_timing.MATMUL, bf16_timing.CASES[name], sizes, product(gpu, *sizes))
        for name, sizes in linear.named_products.items()
    }
    return _cost(timed, [], [], launches=len(timed))


def fp8_linear(gpu: Gpu, linear: Linear, recipe: Recipe) -> Cost:
    """A linear layer in FP8, quantizing included, as Octavo runs it."""
    rate, cases = fp8_rate(gpu, recipe), cases_of(recipe)
    products = {}
    for name, sizes in linear.named_products.items():
        if name not in cases or rate is None:  # wgrad in high precision; or all of it emulated
            products[name] = _timed(gpu, bf16_timing.MATMUL, bf16_timing.CASES[name], sizes, product(gpu, *sizes))
        else:
            predicted = product(gpu, *sizes, operand=1, rate=rate)
            products[name] = _timed(gpu, "scaled_mm", cases[name], sizes, predicted)
    forward, backward = quantizing(gpu, linear, recipe)
    moved = passes(linear, recipe)
    launches = len(products) + len(moved.forward) + len(moved.backward)
    return _cost(products, forward, backward, launches=launches)


def quantizing(gpu: Gpu, linear: Linear, recipe: Recipe) -> tuple[list[Timed], list[Timed]]:
    """Times of what is quantized for a linear, in forward and in backward."""
    forward, backward = (
        [_timed(gpu, "quantize", q.case, q.shape, sum(moving(gpu, size) for size in q.bytes)) for q in found]
        for found in quantizations(linear, recipe)
    )
    return forward, backward


def _timed(gpu: Gpu, op: str, case: tuple[str, ...], shape: tuple[int, ...], predicted: float) -> Timed:
    found = None if gpu.measured is None else gpu.measured.seconds(op, case, shape)
    return (predicted, False) if found is None else (found, True)


def _cost(products: dict[str, Timed], forward: list[Timed], backward: list[Timed], *, launches: int) -> Cost:
    early = [products["forward"], *forward]
    late = [*(timed for name, timed in products.items() if name != "forward"), *backward]
    return Cost(
        forward=sum(seconds for seconds, _ in early),
        backward=sum(seconds for seconds, _ in late),
        launches=launches,
        measured=sum(seconds for seconds, known in (*early, *late) if known),
    )


def cost(gpu: Gpu, linear: Linear, moved: Passes, rate: float) -> Cost:
    """A linear layer in FP8 whose quantizing passes are given, as of another library; nothing of it measured.

    Args:
        gpu: Where.
        linear: Its sizes.
        moved: What quantizing moves.
        rate: FLOP/s of large FP8 products.
    """
    times = [product(gpu, *sizes, operand=1, rate=rate) for sizes in linear.products]
    return Cost(
        forward=times[0] + sum(moving(gpu, size) for size in moved.forward),
        backward=sum(times[1:]) + sum(moving(gpu, size) for size in moved.backward),
        launches=len(times) + len(moved.forward) + len(moved.backward),
    )


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """One matrix that is quantized: its case as calibration tables have it, its shape, bytes of each pass."""

    case: tuple[str, ...]
    shape: tuple[int, int]
    bytes: tuple[float, ...]


def passes(linear: Linear, recipe: Recipe) -> Passes:
    """What Octavo's quantizers move for one linear."""
    forward, backward = (
        tuple(size for what in found for size in what.bytes) for found in quantizations(linear, recipe)
    )
    return Passes(forward=forward, backward=backward)


def quantizations(linear: Linear, recipe: Recipe) -> tuple[list[Quantization], list[Quantization]]:
    """What Octavo quantizes for one linear, in forward and in backward."""
    x, w, g = (linear.m, linear.k), (linear.n, linear.k), (linear.m, linear.n)
    if not math.prod((*x, linear.n)):
        return [], []
    kept = recipe.wgrad_x if linear.wgrad else None
    forward = [_one(x, (recipe.x,) if kept is None else (recipe.x, kept))] if linear.first else []
    forward.append(_one(w, (recipe.w,)))
    backward = []
    if linear.dgrad:
        backward.append(_one(w, (recipe.dgrad_w,), again=True, given=recipe.dgrad_w == recipe.w))
    wanted = [recipe.dgrad_g] if linear.dgrad else []
    wanted += [recipe.wgrad_g] if linear.wgrad and recipe.wgrad_g is not None else []
    if wanted:
        backward.append(_one(g, wanted, alike=recipe.shares_g))
    return forward, backward


def _one(
    shape: tuple[int, int], forms: Sequence[QuantSpec], *, again: bool = False, given: bool = False, alike: bool = True
) -> Quantization:
    """One quantization: of one form in one memory order, of one in both (two that are `alike`), or of two forms."""
    both = len(forms) == 2 and forms[0] == forms[1] and alike
    texts = [forms[0].text] if both else [form.text for form in forms]
    order = "both" if both else "columns" if again else "rows"
    return Quantization(
        case=(*texts, order, "scale" if given else "nothing"),
        shape=shape,
        bytes=tuple(_quantizing(shape, forms, given=given)),
    )


def _quantizing(shape: tuple[int, int], forms: Sequence[QuantSpec], *, given: bool = False) -> list[float]:
    """Bytes of the passes that make these forms of one matrix: a look for maxima where one is needed, and the cast."""
    elements = shape[0] * shape[1]
    looks = not given and any(spec.granularity.rows == FULL for spec in forms)  # by tensor or column: not held on chip
    scales = sum(
        math.prod(spec.granularity.scale_shape(shape)) * (1 if spec.scale_rule == "e8m0" else 4) for spec in set(forms)
    )
    cast = (2.0 + len(forms)) * elements + scales
    return [2.0 * elements, cast] if looks else [cast]

"""The roofline of a linear layer: predicted times of its products and quantization passes on a GPU.

    product [m,k]·[k,n]   max( 2·m·n·k / (peak · eff), bytes / bandwidth, launch )
                          eff = efficiency · tiles / (tiles + multiprocessors / 2): half of the last wave is idle
                          tiles = m·n / 128², times k / 512 if the output has fewer tiles than the GPU multiprocessors
    quantization pass     max( bytes / bandwidth, launch )

Bytes that quantization moves per element, besides scales (bf16 is read at 2 bytes, FP8 written at 1 per memory order):

    operand                       by tensor       by row (rowwise)     by block (blockwise, mxfp8)
    X, read by several linears    2 + 2 + 1 + 1   2 + 1 + 1            2 + 1 + 1      once for all of them
    W in forward                  2 + 2 + 1       2 + 1                2 + 1
    W again in backward           2 + 1           2 + 1                2 + 1          with known scales
    G for dgrad and wgrad         2 + 2 + 1 + 1   2 + 2 + 1 + 1        2 + 1 + 1

The amax of a whole tensor, or of columns, is a pass of its own; a frozen W has no wgrad, so X needs one memory order.
Measured times (`Gpu.measured`) replace the formulas, and a cost reports its measured share.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from octavo.kernels.gemm import cases_of
from octavo.kernels.gemm.torch_scaled import unsupported_by_capability
from octavo.kernels.grouped import is_grouped
from octavo.kernels.timing import BF16_CASES, MATMUL
from octavo.numerics.recipe import RECIPES, Recipe
from octavo.numerics.spec import FULL, QuantSpec
from octavo.planner.devices import Gpu

# Host time of linear layers in eager mode (docs/host_time.md), as ratios to bf16 or as `octavo calibrate` measured.


RATIOS = {  # Host time of forward and backward of a linear × bf16's, from benchmarks/results/simulated/host.json
    "rowwise": 2.07, "tensorwise": 1.99, "rowwise_equalized": 2.29, "rowwise_hp_wgrad": 1.83, "blockwise": 3.08,
    "mxfp8": 3.54,
}  # fmt: skip

FUSED_OPERATIONS = 17
"""Host time of a fused norm or gate, forward and backward, over that of an operation of PyTorch: docs/host_time.md."""
HOST_OP, HOST_SHAPE = "host", (512, 512, 512)
"""Key of measurements in the calibration table; the case is the recipe's name, or "bf16". Of whole blocks of scales."""


def host_seconds(gpu: Gpu, recipe: Recipe | None, products: int) -> float:
    """Return the host's seconds for one call of a linear, forward and backward, in eager mode."""
    bf16 = _measured(gpu, "bf16")
    per_product = gpu.host_us * 1e-6 if bf16 is None else bf16 / 3
    if recipe is None:
        return products * per_product
    name = recipe.name if recipe.name in RATIOS else _most_similar(recipe)
    measured = _measured(gpu, recipe.name) or _measured(gpu, name)
    return products * (per_product * RATIOS[name] if measured is None else measured / 3)


def _most_similar(recipe: Recipe) -> str:
    """Return the name of the recipe in `RATIOS` whose host time comes nearest."""
    if recipe.equalization:
        base = replace(recipe, equalization=0)
        for other in RECIPES.values():
            if other.name in RATIOS and replace(other, name=base.name, note=base.note) == base:
                return other.name
    return "rowwise" if recipe.x.granularity.columns == FULL else "blockwise"


def _measured(gpu: Gpu, name: str) -> float | None:
    return None if gpu.measured is None else gpu.measured.seconds(HOST_OP, (name,), HOST_SHAPE)


Timed = tuple[float, bool]  # Seconds, and whether they were measured
SCALES_LAUNCHES = 41  # Kernels that compute channel scales from column maxima, about (`octavo.numerics.equalize`)
TILE, SPLIT = 128, 512  # Sides of an output tile, and the shortest contraction worth a multiprocessor of its own


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """One call of a linear layer: X [M,K], W [N,K]."""

    m: int  # Tokens
    k: int  # in_features
    n: int  # out_features
    dgrad: bool = True  # Whether X needs a gradient
    wgrad: bool = True  # Whether W needs a gradient
    first: bool = True  # Whether this call is the first to read its X and therefore quantizes it
    experts: int = 1  # Number of experts that share the tokens equally, each with a weight of its own

    @property
    def named_products(self) -> dict[str, tuple[int, int, int]]:
        """(m, n, k) of the call's products by name, forward first; k is the contracted dimension."""
        forward, dgrad, wgrad = (self.m, self.n, self.k), (self.m, self.k, self.n), (self.n, self.k, self.m)
        sizes = {"forward": forward} | ({"dgrad": dgrad} if self.dgrad else {})
        return sizes | ({"wgrad": wgrad} if self.wgrad else {})

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(self.named_products.values())


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Predicted seconds of a linear layer in forward and backward."""

    forward: float  # Seconds of forward
    backward: float  # Seconds of backward
    host: float  # Seconds of host time in eager mode
    measured: float = 0.0  # Seconds of the total that were measured on such a GPU

    @property
    def total(self) -> float:
        """GPU seconds."""
        return self.forward + self.backward

    def wall(self, gpu: Gpu, *, eager: bool) -> float:
        """Return the GPU seconds, or in eager mode the host's time if that is longer."""
        return max(self.total, self.host) if eager else self.total


def total(costs: Sequence[Cost]) -> Cost:
    return Cost(**{field.name: sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost)})


def product(
    gpu: Gpu, m: float, n: float, k: float, *, operand: int = 2, rate: float | None = None, groups: int = 1
) -> float:  # fmt: skip
    """Predict the seconds of [m,k]·[k,n] with a bf16 result."""
    if not m * n * k:
        return 0.0
    if rate is None:
        rate = gpu.bf16_tflops * 1e12 * gpu.bf16_efficiency
    tiles = groups * max(m / TILE, 1.0) * max(n / TILE, 1.0)
    if tiles < gpu.multiprocessors:
        tiles = min(gpu.multiprocessors, tiles * max(k / SPLIT, 1.0))
    compute = groups * 2 * m * n * k / rate * (1 + gpu.multiprocessors / 2 / tiles)
    moved = groups * (operand * (m * k + k * n) + 2 * m * n)
    return max(compute, moved / gpu.bandwidth, gpu.launch_us * 1e-6)


def memory_time(gpu: Gpu, moved: float) -> float:
    """Predict the seconds of a kernel that reads and writes this many bytes."""
    return max(moved / gpu.bandwidth, gpu.launch_us * 1e-6) if moved else 0.0


def fp8_rate(gpu: Gpu, recipe: Recipe, *, exact: bool = False) -> float | None:
    """Return the FLOP/s of large FP8 products, backward ones with `exact` accumulation; None if emulated in bf16."""
    if not gpu.fp8_tflops or (recipe.x.scale_rule == "e8m0" and not gpu.native_mx):
        return None
    scales = recipe.x.granularity
    efficiency = gpu.block_efficiency if scales.columns != FULL else gpu.fp8_efficiency
    if scales.columns == FULL and scales.rows != FULL:
        efficiency *= gpu.row_efficiency * (gpu.row_exact_efficiency if exact else 1.0)
    elif scales.columns == FULL and exact:
        efficiency *= gpu.exact_efficiency
    if triton_reason(gpu, recipe) is not None:
        efficiency = min(efficiency, gpu.triton_efficiency)
    return gpu.fp8_tflops * 1e12 * efficiency


def triton_reason(gpu: Gpu, recipe: Recipe) -> str | None:
    """Return why Triton computes products of this recipe on this GPU; None if PyTorch does."""
    capability = divmod(gpu.capability, 10)
    reasons = (unsupported_by_capability(capability, case) for case in cases_of(recipe).values() if gpu.capability)
    return next(filter(None, reasons), None)


def bf16_linear(gpu: Gpu, linear: LinearCall) -> Cost:
    products = _products(gpu, linear)
    return _sum_cost(products, [], [], host=host_seconds(gpu, None, len(products)))


def fp8_linear(gpu: Gpu, linear: LinearCall, recipe: Recipe) -> Cost:
    """Predict a linear layer in FP8 as Octavo runs it, quantization included."""
    if recipe.weight_only:
        return _weight_only_linear(gpu, linear)
    if linear.experts > 1 and not is_grouped(recipe):  # `octavo.nn.linear` for each
        each = fp8_linear(gpu, replace(linear, m=-(-linear.m // linear.experts), experts=1), recipe)
        return Cost(**{name: linear.experts * seconds for name, seconds in asdict(each).items()})
    products = _products(gpu, linear, recipe)
    return _sum_cost(products, *quantization_times(gpu, linear, recipe), host=host_seconds(gpu, recipe, len(products)))


def _products(gpu: Gpu, linear: LinearCall, recipe: Recipe | None = None) -> dict[str, Timed]:
    """Predict the products of a linear layer, or the grouped ones of experts, of which none was measured."""
    cases, products = {} if recipe is None else cases_of(recipe), {}
    each = replace(linear, m=linear.m / linear.experts) if linear.experts > 1 else linear  # type: ignore[arg-type]
    for name, sizes in each.named_products.items():
        # None: wgrad in high precision, or all products emulated.
        rate = fp8_rate(gpu, recipe, exact=name != "forward") if recipe is not None and name in cases else None
        predicted = product(gpu, *sizes, operand=2 if rate is None else 1, rate=rate, groups=linear.experts)
        op, case = (MATMUL, BF16_CASES[name]) if rate is None else ("scaled_mm", cases[name])
        products[name] = _timed(gpu, op, case, sizes, predicted) if linear.experts == 1 else (predicted, False)
    return products


def _weight_only_linear(gpu: Gpu, linear: LinearCall) -> Cost:
    """Predict a linear layer that dequantizes its weight, 1 byte read and 2 written per element, for each product."""
    each = replace(linear, m=-(-linear.m // linear.experts), experts=1)
    products, copy = bf16_linear(gpu, each), memory_time(gpu, 3.0 * linear.n * linear.k)
    return Cost(
        forward=linear.experts * (products.forward + copy),
        backward=linear.experts * (products.backward + copy * linear.dgrad),
        host=linear.experts * (products.host + (1 + linear.dgrad) * gpu.host_us * 1e-6),
        measured=linear.experts * products.measured,
    )


def quantization_times(gpu: Gpu, linear: LinearCall, recipe: Recipe) -> tuple[list[Timed], list[Timed]]:
    """Predict the times of a linear layer's quantizations, in forward and in backward; the share of channel scales."""
    forward, backward = (
        [_timed(gpu, "quantize", q.case, q.shape, q.seconds(gpu)) for q in phase]
        for phase in quantize_calls(linear, recipe)
    )
    if recipe.equalization and (linear.dgrad or linear.wgrad):
        # One measurement of column maxima, and the channel scales computed from them.
        refresh = memory_time(gpu, 2.0 * linear.n * linear.k / gpu.maxima_efficiency)
        if linear.first:
            refresh += memory_time(gpu, 2.0 * linear.m * linear.k / gpu.maxima_efficiency)
            refresh += SCALES_LAUNCHES * gpu.launch_us * 1e-6
        forward.append((refresh / recipe.equalization, False))
    return forward, backward


def _timed(gpu: Gpu, op: str, case: tuple[str, ...], shape: tuple[int, ...], predicted: float) -> Timed:
    measured = None if gpu.measured is None else gpu.measured.seconds(op, case, shape)
    return (predicted, False) if measured is None else (measured, True)


def _sum_cost(products: dict[str, Timed], forward: list[Timed], backward: list[Timed], *, host: float) -> Cost:
    early = [products["forward"], *forward]
    late = [*(timed for name, timed in products.items() if name != "forward"), *backward]
    return Cost(
        forward=sum(seconds for seconds, _ in early), backward=sum(seconds for seconds, _ in late), host=host,
        measured=sum(seconds for seconds, is_measured in (*early, *late) if is_measured),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantizeCall:
    case: tuple[str, ...]  # In calibration tables
    shape: tuple[int, int]
    bytes: tuple[float, ...]  # Of each pass
    column_maxima: float = 0.0  # Bytes of a pass that finds maxima of columns

    def seconds(self, gpu: Gpu) -> float:
        casts = sum(memory_time(gpu, size) for size in self.bytes)
        return casts + memory_time(gpu, self.column_maxima / gpu.maxima_efficiency)


def quantize_calls(linear: LinearCall, recipe: Recipe) -> tuple[list[QuantizeCall], list[QuantizeCall]]:
    """Return what Octavo quantizes for one linear layer, in forward and in backward."""
    x, w, g = (linear.m, linear.k), (linear.experts * linear.n, linear.k), (linear.m, linear.n)
    if not math.prod((*x, linear.n)):
        return [], []
    wgrad_x = recipe.wgrad_x if linear.wgrad else None
    forward = [_quantize_call(x, (recipe.x,) if wgrad_x is None else (recipe.x, wgrad_x))] if linear.first else []
    forward.append(_quantize_call(w, (recipe.w,)))
    backward = []
    if linear.dgrad:
        backward.append(_quantize_call(w, (recipe.dgrad_w,), columns=True, has_scale=recipe.dgrad_w == recipe.w))
    g_specs = [recipe.dgrad_g] if linear.dgrad else []
    g_specs += [recipe.wgrad_g] if linear.wgrad and recipe.wgrad_g is not None else []
    if g_specs:
        backward.append(_quantize_call(g, g_specs, shared=recipe.shared_grad_cast))
    return forward, backward


def _quantize_call(
    shape: tuple[int, int], specs: Sequence[QuantSpec], *, columns: bool = False, has_scale: bool = False,
    shared: bool = True,
) -> QuantizeCall:  # fmt: skip
    """Return one quantization: to one spec in one order, to one `shared` spec in both orders, or to two specs."""
    both = len(specs) == 2 and specs[0] == specs[1] and shared
    texts = [specs[0].text] if both else [spec.text for spec in specs]
    order = "both" if both else "columns" if columns else "rows"
    elements = shape[0] * shape[1]
    # Scales by tensor or column need an amax over more than one tile holds on chip: a pass of its own.
    amax = {spec.granularity.columns for spec in specs if spec.granularity.rows == FULL and not has_scale}
    scales = sum(
        math.prod(spec.granularity.scale_shape(shape)) * (1 if spec.scale_rule == "e8m0" else 4) for spec in set(specs)
    )
    cast = (2.0 + len(specs)) * elements + scales
    return QuantizeCall(
        case=(*texts, order, "scale" if has_scale else "nothing"), shape=shape,
        bytes=(2.0 * elements, cast) if amax == {FULL} else (cast,),
        column_maxima=2.0 * elements if amax - {FULL} else 0.0,
    )  # fmt: skip

"""The roofline of a linear layer: how long it can take at best, and where FP8 begins to pay.

    product [m,k]·[k,n]   max(2mnk / (peak · efficiency), bytes / (bandwidth · efficiency), launch)
    pass over a tensor    max(bytes / (bandwidth · efficiency), launch)

One linear layer of X [M,K] and W [N,K], forward and backward, is three products. FP8 adds the quantizing passes, whose
bytes per element are the table of `PASSES`. What the passes add is proportional to M·K + N·K + M·N, what FP8 saves to
M·N·K: that is why there is a size at which FP8 begins to pay.

This is a bound, to stand beside a measured time: every multiprocessor is busy until the end, whatever the shape. What a
linear layer is *predicted* to take, its last wave of tiles half idle, is `octavo.planner.roofline`. Rates and
efficiencies are those of its table, `octavo.planner.devices`, with their sources.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks import command, shapes
from benchmarks.shapes import Shape
from octavo.planner.devices import DEVICES as GPUS
from octavo.planner.devices import Gpu
from octavo.planner.host_time import RATIOS

DEVICES = {"H100": GPUS["h100"], "H200": GPUS["h200"], "B200": GPUS["b200"], "RTX 4090": GPUS["rtx4090"]}
"""By the word that identifies them in the name the driver gives."""
PASSES: dict[str, tuple[tuple[str, int], ...]] = {
    "tensorwise": (("x", 2), ("x", 4), ("w", 2), ("w", 3), ("w", 3), ("g", 2), ("g", 4)),
    "rowwise": (("x", 4), ("w", 3), ("w", 3), ("g", 2), ("g", 4)),
    "rowwise_hp_wgrad": (("x", 3), ("w", 3), ("w", 3), ("g", 3)),
    "amax given": (("x", 4), ("w", 3), ("w", 3), ("g", 4)),
}
"""Launches that quantize, in bytes per element of X [M,K], W [N,K] or G [M,N]: bf16 read, FP8 written.

By tensor, the maximum is one launch and one read more. By row the second read comes from L2. W is cast in forward, and
again in backward with the scales of forward. G by row and by column: both maxima in one launch, both casts in the next.
`amax given` is delayed scaling, the least that a quantizer can do.
"""


def product(gpu: Gpu, m: int, k: int, n: int, *, fp8: bool, by_row: bool = False, exact: bool = False) -> float:
    """Seconds of [m,k]·[k,n] with a bf16 result, operands of one byte per element or two."""
    share = gpu.fp8_efficiency * (gpu.row_efficiency if by_row else 1.0)
    if exact:
        share *= gpu.row_exact_efficiency if by_row else gpu.exact_efficiency
    tflops = gpu.fp8_tflops * share if fp8 else gpu.bf16_tflops * gpu.bf16_efficiency
    return max(2e-12 * m * n * k / tflops, moving(gpu, (1 if fp8 else 2) * (m * k + k * n) + 2 * m * n))


def moving(gpu: Gpu, moved: float) -> float:
    return max(moved / gpu.bandwidth, gpu.launch_us * 1e-6)


def linear(gpu: Gpu, shape: Shape, recipe: str = "bf16", *, eager: bool = False) -> float:
    """Seconds of a linear layer, forward and backward; `eager` counts the host's time where it is longer."""
    fp8, by_row, (m, k, n) = recipe != "bf16", recipe.startswith("rowwise"), shape
    kernels = [product(gpu, *sizes, fp8=fp8, by_row=by_row, exact=i > 0) for i, sizes in enumerate(products(shape))]
    elements = {"x": m * k, "w": n * k, "g": m * n}
    kernels += [moving(gpu, bytes_ * elements[operand]) for operand, bytes_ in PASSES.get(recipe, ())]
    host = gpu.host_us * 1e-6 * (3 * RATIOS[recipe] if recipe in RATIOS else len(kernels))
    return max(sum(kernels), host) if eager else sum(kernels)


def free_quantization(gpu: Gpu, shape: Shape) -> float:
    """Seconds of the three FP8 products alone, scales by tensor: the Amdahl limit of a linear layer."""
    return sum(product(gpu, *sizes, fp8=True, exact=i > 0) for i, sizes in enumerate(products(shape)))


def products(shape: Shape) -> tuple[Shape, ...]:
    """(m, k, n) of forward, dgrad and wgrad, k being what is contracted."""
    m, k, n = shape
    return (m, k, n), (m, n, k), (n, m, k)


def measured(name: str, ceilings: Mapping[str, Any]) -> Gpu:
    """The GPU of a driver's name (an H200 if unknown) with its measured ceilings in place of the data sheet's rates."""
    gpu = next((gpu for word, gpu in DEVICES.items() if word in name), DEVICES["H200"])
    exact = ceilings["fp8_exact_tflops"] / ceilings["fp8_tflops"]
    return replace(
        gpu, bf16_tflops=ceilings["bf16_tflops"], fp8_tflops=ceilings["fp8_tflops"], memory_tbs=ceilings["copy_tbs"],
        bf16_efficiency=1.0, fp8_efficiency=1.0, row_efficiency=1.0, exact_efficiency=exact,
        row_exact_efficiency=exact, memory_efficiency=1.0,
    )  # fmt: skip


def begins_to_pay(gpu: Gpu, recipe: str, *, eager: bool) -> int | None:
    """Smallest side, in steps of 64, from which on the recipe beats bf16 at M = K = N; None if none does."""
    sides = range(64, 16385, 64)
    loses = [s for s in sides if linear(gpu, (s,) * 3, recipe, eager=eager) >= linear(gpu, (s,) * 3, eager=eager)]
    last = max(loses, default=0)
    return None if last == sides[-1] else last + 64


def table(gpu: Gpu, recipe: str = "rowwise") -> list[dict[str, Any]]:
    rows = []
    for shape in shapes.parse(["targets", "cubes", "llama", "losing"]):
        bf16, fp8 = linear(gpu, shape), linear(gpu, shape, recipe)
        eager = linear(gpu, shape, eager=True) / linear(gpu, shape, recipe, eager=True)
        rows.append({
            "shape": shapes.label(shape), "bf16_ms": 1e3 * bf16, "fp8_ms": 1e3 * fp8, "speedup": bf16 / fp8,
            "speedup_eager": eager, "limit": bf16 / free_quantization(gpu, shape),
        })  # fmt: skip
    return rows


def main(arguments: list[str]) -> None:
    options = command("roofline", __doc__)
    options.add_argument("--device", choices=DEVICES, default="H200")
    options.add_argument("--recipe", choices=PASSES, default="rowwise")
    chosen = options.parse_args(arguments)
    gpu = DEVICES[chosen.device]
    print(f"predicted for {gpu.name}, {chosen.recipe}, forward and backward; nothing of this was measured")
    for row in table(gpu, chosen.recipe):
        print("{shape:<20} bf16 {bf16_ms:9.3f} ms  fp8 {fp8_ms:9.3f} ms  {speedup:5.2f} ×  eager {speedup_eager:5.2f} ×"
              "  at most {limit:5.2f} ×".format(**row))  # fmt: skip
    for eager in (False, True):
        side = begins_to_pay(gpu, chosen.recipe, eager=eager)
        print(f"FP8 begins to pay at M = K = N = {side} ({'eager' if eager else 'kernel time'})")

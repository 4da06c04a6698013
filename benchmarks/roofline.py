"""The roofline of a linear layer: how long it can take at best, and where FP8 begins to pay.

    product [m,k]·[k,n]   max(2mnk / (peak · efficiency), bytes / (bandwidth · efficiency), floor)
    pass over a tensor    max(bytes / (bandwidth · efficiency), floor)

One linear layer of X [M,K] and W [N,K], forward and backward, is three products. FP8 adds the quantizing passes, whose
bytes per element are the table of `PASSES`. What the passes add is proportional to M·K + N·K + M·N, what FP8 saves to
M·N·K: that is why there is a size at which FP8 begins to pay.

This is a bound, to stand beside a measured time: every multiprocessor is busy until the end, whatever the shape. What a
linear layer is *predicted* to take, its last wave of tiles half idle, is `octavo.planner.roofline`, by which
`octavo.plan` decides. Rates and efficiencies are those of its table, `octavo.planner.devices`, with their sources; the
efficiencies are 1 in a `Device` made from measured ceilings. Beside them the size of L2, which only the bounds of
`benchmarks.sass_bound` ask for: NVIDIA Hopper, Ada and Blackwell architecture white papers (50, 72 and 126 MB).
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import shapes
from benchmarks.shapes import Shape
from octavo.planner import devices
from octavo.planner.host_time import RATIOS


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a roofline needs to know of a GPU.

    Attributes:
        name: As the vendor writes it.
        bf16: Peak dense bf16 rate, float32 accumulation, FLOP/s.
        fp8: Peak dense FP8 rate, FLOP/s.
        bandwidth: Of device memory, bytes/s.
        l2: Bytes of L2.
        multiprocessors: Their number.
        floor: Seconds that the smallest kernel takes, launch included, when launches queue up.
        eager: Seconds of host time per launched op in eager PyTorch; the GPU waits for it where its work is shorter.
        bf16_efficiency: Share of the peak that large bf16 products reach.
        fp8_efficiency: Share of the peak that large FP8 products reach with scales by tensor.
        row_efficiency: Share of that rate that they reach with scales by row.
        exact_efficiency: Share of it that backward's, which accumulate exactly, reach with scales by tensor.
        row_exact_efficiency: The same with scales by row.
        memory_efficiency: Share of the bandwidth that large copies reach.
    """

    name: str
    bf16: float
    fp8: float
    bandwidth: float
    l2: float
    multiprocessors: int
    floor: float
    eager: float
    bf16_efficiency: float
    fp8_efficiency: float
    row_efficiency: float
    exact_efficiency: float
    row_exact_efficiency: float
    memory_efficiency: float

    def product(self, m: int, k: int, n: int, *, fp8: bool, by_row: bool = False, exact: bool = False) -> float:
        """Seconds of [m,k]·[k,n] with a bf16 result, operands of one byte per element or two."""
        share = self.fp8_efficiency * (self.row_efficiency if by_row else 1.0)
        if exact:
            share *= self.row_exact_efficiency if by_row else self.exact_efficiency
        rate = self.fp8 * share if fp8 else self.bf16 * self.bf16_efficiency
        moved = (1 if fp8 else 2) * (m * k + k * n) + 2 * m * n
        return max(2 * m * n * k / rate, moved / (self.bandwidth * self.memory_efficiency), self.floor)

    def moving(self, moved: float) -> float:
        """Seconds of a kernel that reads and writes so many bytes in all."""
        return max(moved / (self.bandwidth * self.memory_efficiency), self.floor)

    def linear(self, shape: Shape, recipe: str = "bf16", *, eager: bool = False) -> float:
        """Seconds of a linear layer, forward and backward, quantization included.

        Args:
            shape: (M, K, N).
            recipe: `"bf16"` or a key of `PASSES`.
            eager: Count the host's time (`octavo.planner.host_time`): the larger of host and GPU time then holds.
        """
        fp8 = recipe != "bf16"
        by_row = recipe.startswith("rowwise")
        kernels = [
            self.product(*sizes, fp8=fp8, by_row=by_row, exact=backward)
            for backward, sizes in enumerate(products(shape))
        ]
        if fp8:
            kernels += [self.moving(moved) for moved in passes(shape, recipe)]
        host = self.eager * (len(products(shape)) * RATIOS[recipe] if recipe in RATIOS else len(kernels))
        return max(sum(kernels), host) if eager else sum(kernels)

    def free_quantization(self, shape: Shape) -> float:
        """Seconds of the three FP8 products alone, scales by tensor: the Amdahl limit of a linear layer."""
        return sum(self.product(*sizes, fp8=True, exact=backward) for backward, sizes in enumerate(products(shape)))

    def measured(self, ceilings: Mapping[str, Any]) -> "Device":
        """This device with what was measured on it (`benchmarks.ceilings`) in place of the data sheet's rates."""
        exact = ceilings["fp8_exact_tflops"] / ceilings["fp8_tflops"]
        return replace(
            self,
            bf16=1e12 * ceilings["bf16_tflops"], fp8=1e12 * ceilings["fp8_tflops"],
            bandwidth=1e12 * ceilings["copy_tbs"], bf16_efficiency=1.0, fp8_efficiency=1.0, row_efficiency=1.0,
            exact_efficiency=exact, row_exact_efficiency=exact, memory_efficiency=1.0,
        )  # fmt: skip


def _of(name: str, l2: float) -> Device:
    gpu = devices.DEVICES[name]
    return Device(
        name=gpu.name, bf16=gpu.bf16_tflops * 1e12, fp8=gpu.fp8_tflops * 1e12, bandwidth=gpu.memory_tbs * 1e12, l2=l2,
        multiprocessors=gpu.multiprocessors, floor=gpu.launch_us * 1e-6, eager=gpu.host_us * 1e-6,
        bf16_efficiency=gpu.bf16_efficiency, fp8_efficiency=gpu.fp8_efficiency, row_efficiency=gpu.row_efficiency,
        exact_efficiency=gpu.exact_efficiency, row_exact_efficiency=gpu.row_exact_efficiency,
        memory_efficiency=gpu.memory_efficiency,
    )  # fmt: skip


DEVICES: dict[str, Device] = {
    "H100": _of("h100", 50e6),
    "H200": _of("h200", 50e6),
    "B200": _of("b200", 126e6),
    "RTX 4090": _of("rtx4090", 72e6),
}
"""By the word that identifies them in the name the driver gives."""

PASSES: dict[str, tuple[tuple[str, float], ...]] = {
    "tensorwise": (
        ("x", 2.0), ("x", 2 + 1 + 1), ("w", 2.0), ("w", 2 + 1), ("w", 2 + 1), ("g", 2.0), ("g", 2 + 1 + 1),
    ),
    "rowwise": (("x", 2 + 1 + 1), ("w", 2 + 1), ("w", 2 + 1), ("g", 2.0), ("g", 2 + 1 + 1)),
    "rowwise_hp_wgrad": (("x", 2 + 1), ("w", 2 + 1), ("w", 2 + 1), ("g", 2 + 1)),
    "amax given": (("x", 2 + 1 + 1), ("w", 2 + 1), ("w", 2 + 1), ("g", 2 + 1 + 1)),
}  # fmt: skip
"""Launches that quantize, in bytes per element of X [M,K], W [N,K] or G [M,N]: bf16 read, FP8 written.

By tensor, the maximum is one launch and one read more. By row the second read comes from L2. W is cast in forward, and
again in backward with the scales of forward. G by row and by column: both maxima in one launch, both casts in the next.
`amax given` is delayed scaling, the least that a quantizer can do.
"""


def products(shape: Shape) -> tuple[tuple[int, int, int], ...]:
    """(m, k, n) of forward, dgrad and wgrad, k being what is contracted."""
    m, k, n = shape
    return (m, k, n), (m, n, k), (n, m, k)


def passes(shape: Shape, recipe: str) -> list[float]:
    """Bytes of each launch that quantizes."""
    m, k, n = shape
    elements = {"x": m * k, "w": n * k, "g": m * n}
    return [per_element * elements[operand] for operand, per_element in PASSES[recipe]]


def named(name: str) -> Device | None:
    """The device whose word is in a driver's name such as "NVIDIA H200"; None for one that is not in the table."""
    return next((device for word, device in DEVICES.items() if word in name), None)


def begins_to_pay(device: Device, recipe: str, *, eager: bool) -> int | None:
    """Smallest side, in steps of 64, from which the recipe beats bf16 at M = K = N; None if none does."""
    wins = [
        device.linear((side,) * 3, recipe, eager=eager) < device.linear((side,) * 3, eager=eager)
        for side in range(64, 16385, 64)
    ]
    if not wins[-1]:
        return None
    return 64 * (1 + max((i + 1 for i, win in enumerate(wins) if not win), default=0))


def table(device: Device, recipe: str = "rowwise") -> list[dict[str, Any]]:
    """Predicted milliseconds and speed-ups over every named shape."""
    rows = []
    for shape in shapes.parse(["targets", "cubes", "llama", "losing"]):
        bf16, fp8 = device.linear(shape), device.linear(shape, recipe)
        rows.append(
            {
                "shape": shapes.label(shape),
                "bf16_ms": 1e3 * bf16,
                "fp8_ms": 1e3 * fp8,
                "limit_ms": 1e3 * device.free_quantization(shape),
                "speedup": bf16 / fp8,
                "speedup_eager": device.linear(shape, eager=True) / device.linear(shape, recipe, eager=True),
            }
        )
    return rows


def main(arguments: list[str]) -> None:
    """Print the predicted table of a device."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--device", choices=DEVICES, default="H200")
    options.add_argument("--recipe", choices=PASSES, default="rowwise")
    chosen = options.parse_args(arguments)
    device = DEVICES[chosen.device]
    print(f"predicted for {device.name}, {chosen.recipe}, forward and backward; nothing of this was measured")
    for row in table(device, chosen.recipe):
        print(
            f"{row['shape']:<20} bf16 {row['bf16_ms']:9.3f} ms  fp8 {row['fp8_ms']:9.3f} ms  {row['speedup']:5.2f} ×  "
            f"eager {row['speedup_eager']:5.2f} ×  at most {row['bf16_ms'] / row['limit_ms']:5.2f} ×"
        )
    for eager in (False, True):
        side = begins_to_pay(device, chosen.recipe, eager=eager)
        print(f"FP8 begins to pay at M = K = N = {side} ({'eager' if eager else 'kernel time'})")

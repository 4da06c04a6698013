"""Host time of linear layers in eager mode (docs/host_time.md), as ratios to bf16 or as `octavo calibrate` measured."""

import time
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from octavo.kernels import calibration
from octavo.kernels.calibration import Entry
from octavo.nn.linear_subclasses import fp8_class
from octavo.numerics.recipe import RECIPES, Recipe
from octavo.numerics.spec import FULL
from octavo.planner.devices import Gpu
from octavo.runtime.terminal import stdout

RATIOS = {  # Host time of forward and backward of a linear × bf16's, from benchmarks/results/simulated/host.json
    "rowwise": 2.07, "tensorwise": 1.99, "rowwise_equalized": 2.29, "rowwise_hp_wgrad": 1.83, "blockwise": 3.08,
    "mxfp8": 3.54,
}  # fmt: skip

FUSED_OPERATIONS = 17
"""Host time of a fused norm or gate, forward and backward, over that of an operation of PyTorch: docs/host_time.md."""
OP, SHAPE = "host", (512, 512, 512)
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
    return None if gpu.measured is None else gpu.measured.seconds(OP, (name,), SHAPE)


def measure(device: torch.device, recipes: Iterable[Recipe], seconds: float = 0.3) -> list[Entry]:
    """Time forward and backward of a linear too small for the GPU to matter, in bf16 and with each recipe."""
    x = torch.randn(SHAPE[:2], device=device, dtype=torch.bfloat16).requires_grad_()
    layers: dict[str, nn.Module] = {"bf16": nn.Linear(*SHAPE[:2], bias=False, device=device, dtype=x.dtype)}
    for recipe in recipes:
        layer = fp8_class(nn.Linear, recipe)(*SHAPE[:2], bias=False, device=device, dtype=x.dtype)
        layer.recipe = recipe
        layers[recipe.name] = layer
    return [
        Entry(op=OP, case=(name,), shape=SHAPE, backend="eager", config=None, microseconds=_fastest(layer, x, seconds))
        for name, layer in layers.items()
    ]


def _fastest(layer: nn.Module, x: torch.Tensor, seconds: float, steps: int = 20) -> float:
    """Return the µs of the fastest of some groups of steps."""
    fastest, end = float("inf"), time.perf_counter() + seconds
    while fastest == float("inf") or time.perf_counter() < end:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        for _ in range(steps):
            layer(x * 1).backward(x)
        fastest = min(fastest, 1e6 * (time.perf_counter() - start) / steps)
        x.grad = None
    return fastest


def calibrate_host(device: torch.device) -> None:
    """Measure all recipes on a GPU, print the times and add them to its calibration table."""
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    entries = measure(device, RECIPES.values())
    calibration.save(device, entries)
    times = ", ".join(f"{entry.case[0]} {entry.microseconds:.0f}" for entry in entries)
    stdout().print(f"host time of a linear, forward and backward, µs: {times}", highlight=False, soft_wrap=True)

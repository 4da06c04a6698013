"""`octavo calibrate`: measure the products and quantizations of linears, show who won and by how much, keep it. And
their products in bf16, so that the planner knows what to weigh them against.
"""

import torch
from rich.box import ROUNDED
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo.kernels import calibration
from octavo.kernels.gemm import plain
from octavo.kernels.gemm.measure import SHAPES, Task, measure, tasks
from octavo.kernels.timing import Measured, Result, time_on_gpu
from octavo.numerics.recipe import RECIPES, get_recipe
from octavo.runtime.terminal import stdout


def calibrate(device: torch.device, recipe: str, shapes: list[str]) -> None:
    """Measure on a GPU and write its calibration table.

    Args:
        device: The GPU.
        recipe: Name of the recipe whose products are measured, or `"all"`.
        shapes: Linears as `"M,K,N"`: tokens, in_features, out_features; those of Llama models where empty.

    Raises:
        ValueError: For a recipe or shape that is none, and where there is nothing to measure.
        OSError: Where the table cannot be written; said before anything is measured.
    """
    recipes = list(RECIPES.values()) if recipe == "all" else [get_recipe(recipe)]
    sizes = [_sizes(text) for text in shapes] or list(SHAPES)
    if device.type != "cuda":
        raise ValueError(
            f"there is nothing to calibrate on device type {device.type!r}: FP8 products have one backend there. "
            "Run this on a machine with a GPU"
        )
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    calibration.prepare(device)
    # What recipes have in common is measured once.
    from octavo.kernels.quantize import measure as quantizers  # imports Triton

    todo: dict[object, Measured] = {(what.case, what.shape): what for what in plain.products(sizes)}
    for r in recipes:
        wanted: list[Measured] = [*tasks(r, sizes), *quantizers.quantizations(r, sizes)]
        for what in wanted:
            todo.setdefault((what.case, what.shape), what)
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress, torch.cuda.device(device):
        for what in progress.track(list(todo.values()), description="measuring"):
            if isinstance(what, plain.Plain):
                results.append(plain.measure(what, device, time_on_gpu))
            elif isinstance(what, Task):
                results.append(measure(what, device, time_on_gpu))
            elif isinstance(what, quantizers.Quantization):
                results.append(quantizers.measure(what, device, time_on_gpu))
    console = stdout()
    console.print(table(results))
    entries = [result.entry for result in results if result.entry is not None]
    if not entries:
        raise ValueError("no backend serves these products on this GPU; `octavo doctor` says why")
    written = f"{len(entries)} choices kept in {calibration.save(device, entries)}"
    console.print(written, markup=False, highlight=False, soft_wrap=True)


def table(results: list[Result]) -> Table:
    """Which candidate won, at what rate, and how far behind the next one was."""
    shown = Table(box=ROUNDED, border_style="dim", header_style="bold")
    for heading in ("what", "m, n, k or rows, columns", "fastest", "µs", "rate", "next", "slower by"):
        shown.add_column(heading, justify="right" if heading in ("µs", "rate", "slower by") else "left")
    for result in results:
        sizes = ", ".join(map(str, result.task.shape))
        if result.entry is None:
            reasons = "; ".join(sorted(set(result.left_out.values())))
            shown.add_row(result.task.name, sizes, "reference", "", "", f"nothing else serves: {reasons}", "")
            continue
        (first, time), *rest = result.times.items()
        behind = (rest[0][0], f"{100 * (rest[0][1] / time - 1):.0f} %") if rest else ("", "")
        shown.add_row(result.task.name, sizes, first, f"{time:.1f}", result.task.rate(time), *behind)
    return shown


def _sizes(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--shapes takes M,K,N: tokens, in_features, out_features, as 8192,4096,14336; got {text!r}")
    tokens, inner, outer = (int(part) for part in parts)
    return tokens, inner, outer

"""`octavo calibrate`: time products and quantizations of linears, and save the fastest choices."""

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo.kernels import calibration
from octavo.kernels.timing import SHAPES, TimingResult, TimingTask, bf16_gemms, fp8_gemms, time_on_gpu
from octavo.numerics.recipe import RECIPES, get_recipe
from octavo.runtime import terminal


def calibrate(device: torch.device, recipe: str, shapes: list[str]) -> None:
    """Time products and quantizations on a GPU and write its calibration table."""
    recipes = list(RECIPES.values()) if recipe == "all" else [get_recipe(recipe)]
    sizes = [_sizes(text) for text in shapes] or list(SHAPES)
    if device.type != "cuda":
        raise ValueError(f"nothing to calibrate on device type {device.type!r}: run this on a machine with a GPU")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    calibration.make_folder(device)
    # Recipes share products; each is measured once.
    from octavo.kernels.quantize import quantize_timing  # imports Triton

    todo: dict[object, TimingTask] = {(task.case, task.shape): task for task in bf16_gemms(sizes)}
    for r in recipes:
        recipe_tasks: list[TimingTask] = [*fp8_gemms(r, sizes), *quantize_timing.quantizations(r, sizes)]
        for task in recipe_tasks:
            todo.setdefault((task.case, task.shape), task)
    with Progress(console=Console(stderr=True), transient=True) as progress, torch.cuda.device(device):
        tasks = progress.track(list(todo.values()), description="measuring")
        results = [task.timed(device, time_on_gpu) for task in tasks]
    console = terminal.stdout()
    console.print(table(results))
    entries = [result.entry for result in results if result.entry is not None]
    if not entries:
        raise ValueError("no backend supports these products on this GPU; `octavo doctor` shows why")
    written = f"{len(entries)} choices saved in {calibration.save(device, entries)}"
    console.print(written, markup=False, highlight=False, soft_wrap=True)


def table(results: list[TimingResult]) -> Table:
    """Build a table of the candidate with the shortest wait, its times and rate, and its lead over the next one."""
    headings = ("task", "m, n, k or rows, columns", "fastest", "µs", "host µs", "rate", "next", "slower by")
    shown = terminal.table(*headings, right=("µs", "host µs", "rate", "slower by"))
    for result in results:
        sizes = ", ".join(map(str, result.task.shape))
        if result.entry is None:
            reasons = "; ".join(sorted(set(result.skipped.values())))
            shown.add_row(result.task.name, sizes, "reference", *[""] * 3, f"no other backend available: {reasons}", "")
            continue
        (first, time), *rest = result.times.items()
        behind = (rest[0][0], f"{100 * (rest[0][1].wait / time.wait - 1):.0f} %") if rest else ("", "")
        figures = f"{time.kernel:.1f}", f"{time.host:.1f}", result.task.rate(time.kernel)
        shown.add_row(result.task.name, sizes, first, *figures, *behind)
    return shown


def _sizes(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--shapes takes M,K,N (tokens, in_features, out_features) as 8192,4096,14336; got {text!r}")
    tokens, inner, outer = (int(part) for part in parts)
    return tokens, inner, outer

"""What `octavo doctor` and `octavo calibrate` examine and print: imported when they run, since it loads torch.

`doctor`: device, versions and the backend of each op; with `--deep`, all kernels beside the reference. `calibrate`:
times of products and quantizations of linears, and the fastest choices, which it saves.
"""

import json
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from octavo._version import __version__
from octavo.cli.app import print_plain
from octavo.kernels import calibration, probe_cache
from octavo.kernels.calibration import Entry
from octavo.kernels.conformance.cases import checks, unavailable_reason
from octavo.kernels.conformance.mismatches import GPU, INTERPRETER, CaseResult, compare
from octavo.kernels.gemm import accelerated
from octavo.kernels.registry import status
from octavo.kernels.timing import SHAPES, TimingResult, TimingTask, bf16_gemms, fp8_gemms, time_candidates, time_on_gpu
from octavo.nn.linear_subclasses import fp8_class
from octavo.numerics.recipe import RECIPES, Recipe, get_recipe
from octavo.planner.roofline import HOST_OP, HOST_SHAPE
from octavo.runtime.terminal import stdout, table


def doctor(device: torch.device, *, as_json: bool) -> None:
    """Probe every backend of every op on a device and print the results."""
    status_report = _examine(device)
    if as_json:
        print(json.dumps(status_report, indent=2))
        return
    console = stdout()
    facts = Table.grid(padding=(0, 2))
    for name, value in {"device": status_report["device"], **status_report["gpu"], **status_report["versions"]}.items():
        facts.add_row(f"[bold]{name}[/bold]", str(value))
    console.print(facts)
    shown = table("op", "case", "runs on", "why not the others")
    for row in _merged(status_report["ops"]):
        shown.add_row(*row)
    console.print(shown)
    console.print(status_report["summary"], style="bold", markup=False, highlight=False)


def _examine(device: torch.device) -> dict[str, Any]:
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB", "cuda": torch.version.cuda,
            "passed probes": str(probe_cache.path(device) or "not stored"),
        }  # fmt: skip
        probe_cache.forget(device)  # every probe runs
    native = [recipe.name for recipe in RECIPES.values() if accelerated(recipe, device)]
    return {
        "device": str(device),
        "gpu": gpu,
        "versions": {
            "octavo": __version__,
            "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
            **{package: _version(package) for package in ("torch", "triton", "transformers")},
        },
        "ops": [asdict(row) for row in status(device)],
        "native_recipes": native,
        "summary": _summary(device.type, native, len(RECIPES)),
        "calibration": calibration.summary(device),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"no package {package!r} is installed"


def _summary(kind: str, native: list[str], recipes: int) -> str:
    if kind == "cpu":
        return "On this CPU FP8 is emulated: FP8's numbers and memory savings, no speed-up."
    if not native:
        return "This device has no FP8 products: FP8 is emulated, with exact numbers and no speed-up."
    if len(native) == recipes:
        return "The products of every recipe run on this device's FP8 matrix units."
    rest = "The other recipes are emulated: exact, no speed-up."
    return f"On this device's FP8 matrix units: {', '.join(native)}. {rest}"


def _merged(ops: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return table rows: op, cases with equal results, chosen backend, why the others do not run."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for label, rows in groupby(ops, key=lambda row: row["op"]):
        backends = list(rows)
        op, _, case = label.partition(" ")
        chosen = next(row["backend"] for row in backends if row["chosen"])
        reasons = "\n".join(
            f"{row['backend']}: {row['reason'] or 'available, but slower'}"
            for row in backends
            if row["backend"] != chosen
        )
        groups.setdefault((op, chosen, reasons), []).append(case)
    alone = {op for op, *_ in groups if sum(key[0] == op for key in groups) == 1}
    return [
        (op, f"all {len(cases)}" if op in alone else "\n".join(cases), chosen, reasons or "no other backend")
        for (op, chosen, reasons), cases in groups.items()
    ]


def doctor_deep(device: torch.device, *, as_json: bool, seconds: float, seed: int, only: str) -> bool:
    """Compare with a progress bar on stderr, print a row per case, and return whether all outputs agree."""
    if (reason := unavailable_reason(device)) is not None:
        raise ValueError(f"doctor --deep: {reason}")
    budget = GPU if device.type == "cuda" else INTERPRETER
    selected = checks(device, only)
    kinds = f"{sum(len(check.configs[: budget.configs]) for check in selected)} configurations of {len(selected)} cases"
    with Progress(console=Console(stderr=True), transient=True) as progress:
        first = progress.add_task(f"compiling and comparing {kinds}", total=len(selected))
        more = progress.add_task(f"new inputs for {seconds:g} s", total=seconds, start=False, visible=False)
        begin = progress.get_time()

        def advance(round_: int) -> None:
            if round_ == 0:
                progress.advance(first)
            else:
                progress.update(more, completed=progress.get_time() - begin, visible=True)

        outcomes = compare(selected, device, seconds=seconds, seed=seed, budget=budget, after=advance)
    if as_json:
        print(json.dumps({"device": str(device), "seed": seed, "outcomes": [asdict(o) for o in outcomes]}, indent=2))
    else:
        _show_deep(stdout(), device, seed, outcomes)
    return not any(outcome.mismatches for outcome in outcomes)


def _show_deep(console: Console, device: torch.device, seed: int, outcomes: list[CaseResult]) -> None:
    shown = table("op", "case", "runs in each configuration")
    for (op, case), group in groupby(outcomes, key=lambda outcome: (outcome.op, outcome.case)):
        cells = [
            f"[red]{o.config}: {o.mismatches} of {o.runs} differ[/red]" if o.mismatches else f"{o.config}: {o.runs} ok"
            for o in group
        ]
        shown.add_row(op, case, "  ".join(cells))
    console.print(shown)
    bad = [outcome for outcome in outcomes if outcome.mismatches]
    for o in bad:
        print_plain(console, f"{o.op} {o.case}, configuration {o.config}: {o.first}")
    runs = sum(outcome.runs for outcome in outcomes)
    differ = f"{len(bad)} of {len(outcomes)} configurations differ from the reference"
    verdict = differ if bad else "all bytes are equal"
    console.print(f"{runs} runs on {device}, seed {seed}: {verdict}.", style="bold", markup=False, highlight=False)


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
        results = [time_candidates(task, task.candidates(device), time_on_gpu) for task in tasks]
    console = stdout()
    console.print(_choices(results))
    entries = [result.entry for result in results if result.entry is not None]
    if not entries:
        raise ValueError("no backend supports these products on this GPU; `octavo doctor` shows why")
    print_plain(console, f"{len(entries)} choices saved in {calibration.save(device, entries)}")
    _calibrate_host(device)


def measure_host(device: torch.device, recipes: Iterable[Recipe], seconds: float = 0.3) -> list[Entry]:
    """Time forward and backward of a linear too small for the GPU to matter, in bf16 and with each recipe."""
    x = torch.randn(HOST_SHAPE[:2], device=device, dtype=torch.bfloat16).requires_grad_()
    layers: dict[str, nn.Module] = {"bf16": nn.Linear(*HOST_SHAPE[:2], bias=False, device=device, dtype=x.dtype)}
    for recipe in recipes:
        layer = fp8_class(nn.Linear)(*HOST_SHAPE[:2], bias=False, device=device, dtype=x.dtype)
        layer.recipe = recipe
        layers[recipe.name] = layer
    times = ((name, _fastest(layer, x, seconds)) for name, layer in layers.items())
    eager = partial(Entry, op=HOST_OP, shape=HOST_SHAPE, backend="eager", config=None)
    return [eager(case=(name,), microseconds=microseconds) for name, microseconds in times]


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


def _calibrate_host(device: torch.device) -> None:
    """Measure all recipes on a GPU, print the times and add them to its calibration table."""
    entries = measure_host(device, RECIPES.values())
    calibration.save(device, entries)
    times = ", ".join(f"{entry.case[0]} {entry.microseconds:.0f}" for entry in entries)
    print_plain(stdout(), f"host time of a linear, forward and backward, µs: {times}")


def _choices(results: list[TimingResult]) -> Table:
    """Build a table of the candidate with the shortest wait, its times and rate, and its lead over the next one."""
    headings = ("task", "m, n, k or rows, columns", "fastest", "µs", "host µs", "rate", "next", "slower by")
    shown = table(*headings, right=("µs", "host µs", "rate", "slower by"))
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

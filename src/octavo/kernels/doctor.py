"""`octavo doctor`: device, versions and the backend of each op; with `--deep`, all kernels beside the reference."""

import json
import platform
from dataclasses import asdict
from importlib import metadata
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo._version import __version__
from octavo.kernels import calibration, probe_cache
from octavo.kernels.conformance.cases import checks, unavailable_reason
from octavo.kernels.conformance.mismatches import GPU, INTERPRETER, CaseResult, compare
from octavo.kernels.gemm import accelerated
from octavo.kernels.registry import status
from octavo.numerics.recipe import RECIPES
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
    return f"On this device's FP8 matrix units: {', '.join(native)}. The others are emulated: exact, no speed-up."


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
        text = f"{o.op} {o.case}, configuration {o.config}: {o.first}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    runs = sum(outcome.runs for outcome in outcomes)
    differ = f"{len(bad)} of {len(outcomes)} configurations differ from the reference"
    verdict = differ if bad else "all bytes are equal"
    console.print(f"{runs} runs on {device}, seed {seed}: {verdict}.", style="bold", markup=False, highlight=False)

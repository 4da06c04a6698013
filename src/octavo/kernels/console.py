"""What `octavo doctor` shows: the device, the versions, and what serves each op."""

import json
import platform
from dataclasses import asdict
from importlib import metadata
from itertools import groupby
from typing import Any

import torch
from rich.box import ROUNDED
from rich.table import Table

from octavo._version import __version__
from octavo.kernels import calibration
from octavo.kernels.gemm import accelerated
from octavo.kernels.registry import status
from octavo.numerics.recipe import RECIPES
from octavo.runtime.terminal import stdout


def doctor(device: torch.device, *, as_json: bool) -> None:
    """Try every backend of every op on a device, and print what serves it."""
    found = _examine(device)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = stdout()
    facts = Table.grid(padding=(0, 2))
    for name, value in {"device": found["device"], **found["gpu"], **found["versions"]}.items():
        facts.add_row(f"[bold]{name}[/bold]", str(value))
    console.print(facts)
    table = Table(box=ROUNDED, border_style="dim", header_style="bold")
    for heading in ("op", "case", "runs on", "why not the others"):
        table.add_column(heading)
    for op, cases, chosen, refusals in _merged(found["ops"]):
        table.add_row(op, cases, chosen, refusals)
    console.print(table)
    console.print(found["summary"], style="bold", markup=False, highlight=False)


def _examine(device: torch.device) -> dict[str, Any]:
    """Everything `octavo doctor` shows, ready for JSON."""
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "cuda": torch.version.cuda,
        }
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
        return "On this CPU FP8 runs exactly, but emulated: right numbers and FP8's memory, no speed-up."
    if not native:
        return "This device serves no FP8 product: FP8 runs exactly, but emulated, with no speed-up."
    if len(native) == recipes:
        return "Every recipe's products run on this device's FP8 matrix units."
    return (
        f"On this device's FP8 matrix units: {', '.join(native)}. The other recipes are emulated: exact, no speed-up."
    )


def _merged(ops: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Rows of the table: op, the cases served alike, the chosen backend, and why the others do not serve."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for label, rows in groupby(ops, key=lambda row: row["op"]):
        backends = list(rows)
        op, _, case = label.partition(" ")
        chosen = next(row["backend"] for row in backends if row["chosen"])
        refusals = "\n".join(
            f"{row['backend']}: {row['reason'] or 'serves too, but is slower'}"
            for row in backends
            if row["backend"] != chosen
        )
        groups.setdefault((op, chosen, refusals), []).append(case)
    alone = {op for op, *_ in groups if sum(key[0] == op for key in groups) == 1}
    return [
        (op, f"all {len(cases)}" if op in alone else "\n".join(cases), chosen, refusals or "there is no other")
        for (op, chosen, refusals), cases in groups.items()
    ]

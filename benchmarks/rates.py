"""What the planner knows of an H100, from its result files: src/octavo/planner/h100.json. Needs no GPU.

Shares of the data sheet's rates hold for every shape: those of products are the geometric mean over the products that
were measured alone, which leaves linear layers, a decoder layer and training steps to test predictions with
(docs/planner.md). The times of those products are kept in the form of `octavo calibrate`, by kind of scale and layout.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks import kernels as gemm
from benchmarks.environment import RESULTS, write_text
from octavo.kernels.calibration import FORMAT, Entry
from octavo.kernels.gemm.product_timing import BF16_CASES, MATMUL
from octavo.planner.devices import DEVICES
from octavo.planner.roofline import product

Row = dict[str, Any]
OUT = Path(__file__).parent.parent / "src" / "octavo" / "planner" / "h100.json"
FOLDER, COMMIT = RESULTS / "nvidia-h100-80gb-hbm3", "5b87414"
COLUMN_MAXIMA_TBS = (1.75, 1.32)  # Read from a profiler on that card: docs/performance.md
BACKEND = "torch_scaled"  # What an H100 without a calibration of its own runs


def content(folder: Path = FOLDER) -> dict[str, Any]:
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    kernels = next(file for file in files if file["benchmark"] == "kernels")
    rows = [row for row in kernels["rows"] if row["stage"] == "product" and "kernel_ms" in row]
    of = kernels["environment"]
    shares = _shares(rows, [file["ceilings"]["copy_tbs"] for file in files if "ceilings" in file])
    versions = {name: of[name] for name in ("octavo", "torch", "triton", "cuda")}
    source = f"measured on {of['device']} (torch {of['torch']}, commit {COMMIT}): " + ", ".join(
        f"{name.removesuffix('_efficiency')} {share:.2f}" for name, share in shares.items()
    )
    return {
        "format": FORMAT, "device": of["device"], "versions": versions, "written": of["date"],
        "gpu": {**shares, "efficiency_from": source}, "entries": [asdict(entry) for entry in _entries(rows)],
    }  # fmt: skip


def text() -> str:
    head = content()
    entries = ",\n  ".join(json.dumps(entry) for entry in head.pop("entries"))
    facts = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    return f'{{\n{facts} "entries": [\n  {entries}\n ]\n}}\n'


def _shares(rows: Sequence[Row], copies_tbs: Sequence[float]) -> dict[str, float]:
    """Fields of the planner's `Gpu`, to three digits."""
    gpu, fast, exact = DEVICES["h100"], *gemm.REFERENCES
    by_tensor = _rate(rows, ("reference", fast), ("tensorwise forward", BACKEND))
    by_row = _rate(rows, ("rowwise forward", BACKEND))
    copies = _mean(copies_tbs)
    shares = {
        "bf16_efficiency": _rate(rows, ("reference", "bf16")) / gpu.bf16_tflops,
        "fp8_efficiency": by_tensor / gpu.fp8_tflops,
        "row_efficiency": min(1.0, by_row / by_tensor),
        "exact_efficiency": _rate(rows, ("reference", exact)) / _rate(rows, ("reference", fast)),
        "row_exact_efficiency": _rate(rows, ("rowwise dgrad", BACKEND), ("rowwise wgrad", BACKEND)) / by_row,
        "memory_efficiency": copies / gpu.memory_tbs,
        "maxima_efficiency": _mean(COLUMN_MAXIMA_TBS) / copies,
    }
    return {name: round(share, 3) for name, share in shares.items()}


def _rate(rows: Sequence[Row], *of: tuple[str, str]) -> float:
    """TFLOP/s of products so large that no wave of tiles is half idle, by case and arm."""
    gpu, rates = DEVICES["h100"], []
    for row in rows:
        if (row["case"], row["arm"]) in of:
            m, k, n = _sizes(row)
            seconds_at_1_tflops = product(gpu, m, n, k, rate=1e12)
            rates.append(1e3 * seconds_at_1_tflops / row["kernel_ms"])
    return _mean(rates)


def _entries(rows: Sequence[Row]) -> Iterable[Entry]:
    """Times of products, in µs of the GPU."""
    for row in rows:
        is_bf16 = row["arm"] == "bf16"
        if is_bf16 or row["arm"] == BACKEND:
            m, k, n = _sizes(row)
            yield Entry(
                op=MATMUL if is_bf16 else "scaled_mm",
                case=BF16_CASES["forward"] if is_bf16 else gemm.CASES[row["case"]],
                shape=(m, n, k), backend="torch" if is_bf16 else BACKEND, config=None,
                microseconds=round(1e3 * row["kernel_ms"], 2),
            )  # fmt: skip


def _sizes(row: Row) -> tuple[int, int, int]:
    m, k, n = map(int, row["shape"].split("×"))
    return m, k, n


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def main(arguments: list[str]) -> None:
    command("rates", __doc__).parse_args(arguments)
    write_text(OUT, text())
    print(f"written to {OUT}; what follows from it: python -m benchmarks predictions, configs, performance")

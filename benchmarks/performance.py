"""docs/performance.md and its images, a pure function of the result files; text between tables is written by hand."""

import collections
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, targets
from benchmarks.environment import RESULTS, write_text
from benchmarks.figures import COLOURS, Figure, overview, save, speedups
from benchmarks.pages import fill, table
from benchmarks.step import PARTS
from benchmarks.targets import Files, Row

DOCUMENT = Path(__file__).parent.parent / "docs" / "performance.md"
IMAGES = "images"
SPEEDUPS = ("speedup", "wall_speedup")
TIMES = ("kernel ms", "wall ms", "kernel, × bf16", "wall, × bf16")
NOT_DEVICES = ("cpu", "ptx", "sass", "simulated")
PROVENANCE = """{date}, driver {driver}, torch {torch}, Triton {triton}, torchao {torchao}, Python {python}. Each
command first measured the card's own ceilings, which its percentages refer to: copies (read and written), and 8192³
products in bf16 and in FP8 by cuBLAS, one scale per tensor, fast and exact accumulation.

"""
TARGETS = """### Targets

Set for an H200, whose memory is 1.4 times as fast as an H100's. Kernel time; of the measured shapes
the worst.

"""
KERNELS = """### Kernels

`python -m benchmarks kernels`; `torch_scaled` is PyTorch's product, cuBLAS here, `triton` Octavo's own,
`triton_plain` its kernel without Gluon. *Forward* accumulates fast, *dgrad* and *wgrad* exactly.

"""
STEPS = """### A training step

`python -m benchmarks step`: steps of `octavo train` on random tokens, in turns with bf16's in one process.
Wall time is without the profiler, kernel time by part with it. *Rest* also holds casts that Inductor fuses with what is
around them.

"""


def devices(results: Path) -> dict[str, Files]:
    folders = (folder for folder in sorted(results.iterdir()) if folder.name not in NOT_DEVICES)
    files = {each.name: {p.stem: json.loads(p.read_text()) for p in sorted(each.glob("*.json"))} for each in folders}
    return {name: of_device for name, of_device in files.items() if of_device}


def document(results: Path) -> str:
    measured = "\n".join(_device(name, files) for name, files in devices(results).items())
    cpu = json.loads((results / "cpu" / "linear.json").read_text())
    return fill(DOCUMENT.read_text("utf-8"), {"devices": measured, "cpu": _cpu(cpu)})


def _device(name: str, files: Files) -> str:
    title = next(iter(files.values())).get("environment", {}).get("device", name)
    sections: dict[str, Callable[[str, list[Row]], str]] = {
        "linear": _linear, "layer": _layers, "kernels": _kernels, "train": _train, "step": _steps,
    }  # fmt: skip
    made = [section(name, files[benchmark]["rows"]) for benchmark, section in sections.items() if benchmark in files]
    targets_table = TARGETS + table(("target", "required", "reached", ""), targets.table(files))
    return "\n".join([f"## {title}\n", _provenance(files), targets_table, *made, _losses(files)])


def _provenance(files: Files) -> str:
    rows = []
    for content in files.values():
        arguments = " ".join(content.get("arguments", [])).partition("--out")[0].split()
        numbers = _cells(content.get("ceilings", {}), "copy_tbs", "bf16_tflops", "fp8_tflops", "fp8_exact_tflops")
        ended = "whole" if content.get("stopped", "done") == "done" and "running" not in content else "out of time"
        command = f"`{' '.join([content.get('command', 'make gpu'), *arguments])}`"
        command = "`train` ([no longer there](log.md))" if content.get("benchmark") == "train" else command
        rows.append((command, *numbers, ended))
    known = collections.defaultdict(lambda: "unknown", next(iter(files.values())).get("environment", {}))
    columns = "command, copy TB/s, bf16 TFLOP/s, FP8 fast, FP8 exact, ended".split(", ")
    return PROVENANCE.format_map(known) + table(columns, rows)


def _linear(name: str, rows: list[Row]) -> str:
    rows = _timed(rows)
    text = ["### A linear layer, forward and backward\n", "`python -m benchmarks linear`\n"]
    if any(row["arm"] in COLOURS for row in rows):
        text.append(f"![speed-ups]({IMAGES}/linear-{name}.svg)\n")
    columns = ("shape", "arm", *TIMES, "TFLOP/s", "peak MiB", "Amdahl ms")
    fields = ("kernel_ms", "wall_ms", *SPEEDUPS, "tflops", "peak_mib", "amdahl_ms")
    made = [(r["shape"], f"{_arm(r)}, {r['mode']}", *_cells(r, *fields)) for r in rows if r["arm"] != "products"]
    return "\n".join([*text, table(columns, made)])


def _layers(name: str, rows: list[Row]) -> str:
    columns = ("layer", "arm", *TIMES, "peak MiB", "saved B/token", "Amdahl ms")
    fields = ("kernel_ms", "wall_ms", *SPEEDUPS, "peak_mib", "saved_bytes_per_token", "amdahl_ms")
    rows = [row for row in _timed(rows) if not row["arm"].startswith("products")]
    made = [(row["shape"], f"{row['arm']}, {row['mode']}", *_cells(row, *fields)) for row in rows]
    of_bf16 = (row for row in rows if row["arm"] == "bf16" and "linear_share" in row)
    shares = [f"{row['shape']}, {row['mode']}: {100 * row['linear_share']:.0f} %" for row in of_bf16]
    note = f"Share of the linear layers' products in the bf16 layer's time: {'; '.join(shares)}.\n" if shares else ""
    head = "### A decoder layer, forward and backward\n\n`python -m benchmarks layer`\n"
    return "\n".join([head, note, table(columns, made)])


def _kernels(name: str, rows: list[Row]) -> str:
    rows, text = _timed(rows), [KERNELS.removesuffix("\n")]
    moving = [row for row in rows if row["stage"] in ("quantize", "fused")]
    fields = ("kernel_ms", "bytes_per_element", "tbs", "percent")
    made = [(f"{r['case']}, {r['arm']}", r["shape"], *_cells(r, *fields)) for r in moving]
    if made:
        text.append(table(("kernel", "matrix", "ms", "bytes per element", "TB/s", "% of copy"), made))
    fields = ("kernel_ms", "wall_ms", "tflops", "percent", "of_cublas")
    made = [(r["shape"], f"{r['case']}, {r['arm']}".removeprefix("reference, "), *_cells(r, *fields))
            for r in rows if r["stage"] == "product"]  # fmt: skip
    columns = ("kernel ms", "wall ms", "TFLOP/s", "% of ceiling", "rate over cuBLAS by tensor")
    return "\n".join([*text, table(("M×K×N", "product, backend", *columns), made)])


def _train(name: str, rows: list[Row]) -> str:
    fields, timed = ("wall_ms", "tokens_per_s", "peak_mib"), (row for row in rows if row.get("tokens_per_s"))
    made = [(f"{r['stage']}, {r['shape']}", f"{r['arm']}, {r['mode']}", *_cells(r, *fields)) for r in timed]
    columns = ("loop", "arm", "step ms", "tokens/s", "peak MiB")
    return "### Training\n\nThe benchmark `train`, which is [no longer there](log.md).\n\n" + table(columns, made)


def _steps(name: str, rows: list[Row]) -> str:
    made = []
    for row in (row for row in rows if row.get("wall_ms")):
        spread = "–" if row["arm"] == "bf16" else "{:.3f}–{:.3f}".format(*row["wall_speedup_range"])
        parts = (f"{row['parts'][part]['ms']:.1f}" for part in PARTS)
        whole = f"{row['wall_ms']:.1f}", f"{row['tokens_per_s']:,.0f}", spread, f"{row['kernel_ms']:.1f}"
        made.append((row["shape"], f"{row['arm']}, {row['mode']}", *whole, *parts))
    return STEPS + table(("model", "arm", "wall ms", "tokens/s", "× bf16", "kernel ms", *PARTS), made)


def _losses(files: Files) -> str:
    """Everything of Octavo's that is slower than bf16, in kernel time or in wall time, and what failed."""
    slower = [
        (row.get("shape"), f"{row['arm']}, {row['mode']}", *(f"{row[k]:.3f}" if k in row else None for k in SPEEDUPS))
        for name in ("linear", "layer")
        for row in files.get(name, {"rows": []})["rows"]
        if row["arm"].startswith("octavo") and min(row.get(key, 1.0) for key in SPEEDUPS) < 1.0
    ]
    failed = []
    for name, content in files.items():
        for row in (row for row in content.get("rows", []) if "error" in row):
            what = " ".join(str(row[key]) for key in ("stage", "shape", "case", "arm", "mode") if key in row)
            last = str(row["error"]).strip().splitlines()[-1][:120]
            failed.append((name, what, last.replace("|", "\\|")))
    lost = table(("shape", "arm", *TIMES[2:]), slower) if slower else "Nothing measured was slower than bf16.\n"
    lost += "\nWhat failed:\n\n" + table(("benchmark", "what", "error"), failed) if failed else ""
    return "### Where it loses\n\n" + lost


def _cpu(content: Mapping[str, Any]) -> str:
    cells = [(r["shape"], _arm(r), f"{r['wall_ms']:.1f}", f"{1 / r['wall_speedup']:.2f}") for r in content["rows"]]
    about = "{cpu_threads} threads of: {device}; torch {torch}, {date}.\n\n".format(**content["environment"])
    return about + table(("M×K×N", "arm", "ms", "time over bf16"), cells)


def _arm(row: Row) -> str:
    return str(row["arm"]).replace("given tensorwise", "delayed-scaling bound")


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("kernel_ms")]


def _cells(row: Mapping[str, Any], *fields: str) -> list[str | None]:
    """Three significant digits, or as many as there are before the point."""
    values = (row.get(field) for field in fields)
    return [None if v is None else f"{v:.0f}" if abs(v) >= 100 else f"{v:#.3g}" for v in values]


def pictures(results: Path) -> dict[str, Figure]:
    images = {}
    for name, files in devices(results).items():
        rows = files["linear"]["rows"] if "linear" in files else []
        if any(row["arm"] in COLOURS for row in _timed(rows)):
            images[f"linear-{name}.svg"] = speedups(rows)
    return images


def main(arguments: list[str]) -> None:
    options = command("performance", __doc__)
    options.add_argument("--out", type=Path, default=DOCUMENT, help="the document; plots go to images/ beside it")
    out = options.parse_args(arguments).out
    write_text(out, document(RESULTS))
    for name, content in pictures(RESULTS).items():
        save(content, out.parent / IMAGES / name)
    write_text(out.parent / IMAGES / "overview.svg", overview(DOCUMENT.parent / IMAGES))
    print(f"written to {out}")

"""docs/performance.md and its appendix docs/machine-code.md from the result files: pure functions of them, tested.

Measured on GPUs first, where there are results; then what is predicted from machine code and from the roofline,
labelled as such; then the CPU. A figure stands with its command, and arms that lose stand with those that win. What no
result file holds, such as figures read from a profiler, is the `notes.md` of a device's folder.
"""

import argparse
import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots, roofline, shapes, targets
from benchmarks.environment import RESULTS, write_text
from benchmarks.figures import Figure, overview, save
from benchmarks.pages import fill, table

Row = dict[str, Any]
Files = Mapping[str, Mapping[str, Any]]
ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
APPENDIX = "machine-code.md"
IMAGES = "images"
SPEEDUPS = ("speedup", "wall_speedup")
TIMES = ("kernel ms", "wall ms", "kernel, × bf16", "wall, × bf16")
NOT_DEVICES = ("cpu", "ptx", "sass", "simulated")
MATRIX, PRODUCT = "16384×4096", "8192×8192×8192"
"""What times are predicted for from machine code."""
PROVENANCE = """{date}, driver {driver}, torch {torch}, Triton {triton}, torchao {torchao}, Python {python}. Each
command first measured the card's own ceilings, which its percentages refer to: copies (read and written), and 8192³
products in bf16 and in FP8 by cuBLAS, one scale per tensor, fast and exact accumulation.

"""
BACKENDS = """`torch_scaled` is PyTorch's product, cuBLAS here, `triton` Octavo's own,
`triton_plain` its kernel without Gluon. *Forward* accumulates fast, *dgrad* and *wgrad* exactly.
"""
TARGETS = """### Targets

Set for an H200, whose memory is 1.4 times as fast as an H100's. Kernel time; of the measured shapes
the worst.

"""
STEPS = """`python -m benchmarks step`: steps of `octavo train` on random tokens, in turns with bf16's in one process.
Wall time is without the profiler, kernel time by part with it. *Rest* also holds casts that Inductor fuses with what is
around them.

"""
COMPILE = """### Quantizing under `torch.compile`

`python -m benchmarks compile`: `octavo` traces casts and products as PyTorch operations, which Inductor fuses; `opaque`
keeps Octavo's ops.

"""


def load(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Result files of a device, by benchmark."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def document(results: Path) -> str:
    """docs/performance.md with its tables anew."""
    devices = []
    for folder in sorted(results.iterdir()):
        if folder.name not in NOT_DEVICES and (files := load(folder)):
            notes = folder / "notes.md"
            devices.append(_device(folder.name, files, notes.read_text("utf-8") if notes.exists() else ""))
    parts = {"devices": "\n".join(devices), "roofline": _roofline(), "cpu": _cpu(load(results / "cpu"))}
    return fill(DOCUMENT.read_text("utf-8"), parts)


def appendix(results: Path) -> str:
    """docs/machine-code.md with its tables anew."""
    return fill((DOCUMENT.parent / APPENDIX).read_text("utf-8"), {"kernels": _machine_code(load(results / "sass"))})


def _device(name: str, files: Files, notes: str) -> str:
    any_file = next(iter(files.values()))
    title = any_file.get("environment", {}).get("device", name)
    parts = [f"## {title}\n", _provenance(files), _targets(files)]
    if "linear" in files:
        parts.append(_linear(name, files["linear"]))
    if "layer" in files:
        parts.append(_layers(files["layer"]))
    if "kernels" in files:
        parts.append(_kernels(name, files["kernels"]))
    if "compile" in files:
        parts.append(_compile(files["compile"]))
    if "train" in files:
        parts.append(_train(files["train"]))
    if "step" in files:
        parts.append(_steps(files["step"]))
    return "\n".join([*parts, _losses(files), *([notes] if notes else [])])


def _provenance(files: Files) -> str:
    rows = []
    for content in files.values():
        given = content.get("arguments", [])
        given = given[: given.index("--out")] if "--out" in given else given
        limits = content.get("ceilings", {})
        cells = _cells(limits, ("copy_tbs", "bf16_tflops", "fp8_tflops", "fp8_exact_tflops"))
        ended = "whole" if content.get("stopped", "done") == "done" and "running" not in content else "out of time"
        rows.append((f"`{' '.join([content.get('command', 'make gpu'), *given])}`", *cells, ended))
    known = collections.defaultdict(lambda: "unknown", next(iter(files.values())).get("environment", {}))
    columns = ("command", "copy TB/s", "bf16 TFLOP/s", "FP8 fast", "FP8 exact", "ended")
    return PROVENANCE.format_map(known) + table(columns, rows)


def _targets(files: Files) -> str:
    return TARGETS + table(("target", "required", "reached", ""), targets.table(files))


def _linear(name: str, content: Mapping[str, Any]) -> str:
    rows = _timed(content)
    plots_of = [row for row in rows if row["arm"] in plots.COLOURS]
    text = ["### A linear layer, forward and backward\n", "`python -m benchmarks linear`\n"]
    if plots_of:
        text.append(f"![speed-ups]({IMAGES}/linear-{name}.svg)\n")
    for mode in ("eager", "compiled"):
        if side := begins_to_pay(rows, mode):
            text.append(f"`rowwise` begins to pay, {mode}, at M = K = N = {side}, of the cubes that were measured.\n")
    columns = ("shape", "arm", *TIMES, "TFLOP/s", "peak MiB", "roofline ms", "Amdahl ms")
    fields = ("kernel_ms", "wall_ms", *SPEEDUPS, "tflops", "peak_mib", "roofline_ms", "amdahl_ms")
    made = [(r["shape"], f"{_arm(r)}, {r['mode']}", *_cells(r, fields)) for r in rows if r["arm"] != "products"]
    return "\n".join([*text, table(columns, made)])


def begins_to_pay(rows: Sequence[Row], mode: str, arm: str = "octavo rowwise") -> int | None:
    """Smallest measured cube from which on an arm beats bf16; None where it does not, or was not measured."""
    cubes = sorted({row["m"] for row in rows if row.get("m") == row.get("k") == row.get("n") and row.get("m")})
    paying = None
    for side in reversed(cubes):
        key = {"m": side, "k": side, "n": side, "arm": arm, "mode": mode}
        row = next((r for r in rows if key.items() <= r.items()), None)
        if row is None or row.get("speedup", 0.0) <= 1.0:
            break
        paying = side
    return paying


def _layers(content: Mapping[str, Any]) -> str:
    columns = ("layer", "arm", *TIMES, "peak MiB", "saved B/token", "Amdahl ms")
    fields = ("kernel_ms", "wall_ms", *SPEEDUPS, "peak_mib", "saved_bytes_per_token", "amdahl_ms")
    rows = [row for row in _timed(content) if not row["arm"].startswith("products")]
    made = [(row["shape"], f"{row['arm']}, {row['mode']}", *_cells(row, fields)) for row in rows]
    shares = [
        f"{row['shape']}, {row['mode']}: {100 * row['linear_share']:.0f} %"
        for row in rows
        if row["arm"] == "bf16" and "linear_share" in row
    ]
    note = f"Share of the linear layers' products in the bf16 layer's time: {'; '.join(shares)}.\n" if shares else ""
    return "\n".join(
        ["### A decoder layer, forward and backward\n", "`python -m benchmarks layer`\n", note, table(columns, made)]
    )


def _kernels(name: str, content: Mapping[str, Any]) -> str:
    rows = _timed(content)
    text = ["### Kernels\n", "`python -m benchmarks kernels`; " + BACKENDS]
    moving = [row for row in rows if row["stage"] in ("quantize", "fused")]
    if any(row["stage"] == "quantize" for row in moving):
        text.append(f"![bandwidths]({IMAGES}/quantize-{name}.svg)\n")
    fields = ("kernel_ms", "bytes_per_element", "tbs", "percent")
    made = [(f"{r['case']}, {r['arm']}", r["shape"], *_cells(r, fields)) for r in moving]
    if made:
        text.append(table(("kernel", "matrix", "ms", "bytes per element", "TB/s", "% of copy"), made))
    products = [row for row in rows if row["stage"] == "product"]
    fields = ("kernel_ms", "wall_ms", "tflops", "percent", "of_cublas")
    made = [(r["shape"], f"{r['case']}, {r['arm']}".removeprefix("reference, "), *_cells(r, fields)) for r in products]
    columns = ("kernel ms", "wall ms", "TFLOP/s", "% of ceiling", "rate over cuBLAS by tensor")
    text.append(table(("M×K×N", "product, backend", *columns), made))
    return "\n".join(text)


def _compile(content: Mapping[str, Any]) -> str:
    fields = ("kernel_ms", "wall_ms", "speedup", "peak_mib")
    made = [(row["shape"], row["arm"], *_cells(row, fields)) for row in _timed(content)]
    return COMPILE + table(("where", "arm, compiled", "kernel ms", "wall ms", "× bf16", "peak MiB"), made)


def _train(content: Mapping[str, Any]) -> str:
    rows = [row for row in content["rows"] if row.get("tokens_per_s")]
    fields = ("wall_ms", "tokens_per_s", "peak_mib")
    made = [(f"{r['stage']}, {r['shape']}", f"{r['arm']}, {r['mode']}", *_cells(r, fields)) for r in rows]
    return "### Training\n\n`python -m benchmarks train`\n\n" + table(
        ("loop", "arm", "step ms", "tokens/s", "peak MiB"), made
    )


def _steps(content: Mapping[str, Any]) -> str:
    """Training steps taken apart: wall time beside bf16's, kernel time by part."""
    made = []
    for row in (row for row in content["rows"] if row.get("wall_ms")):
        spread = "–" if row["arm"] == "bf16" else "{:.3f}–{:.3f}".format(*row["wall_speedup_range"])
        parts = (f"{row['parts'][part]['ms']:.1f}" for part in _STEP_PARTS)
        whole = f"{row['wall_ms']:.1f}", f"{row['tokens_per_s']:,.0f}", spread, f"{row['kernel_ms']:.1f}"
        made.append((row["shape"], f"{row['arm']}, {row['mode']}", *whole, *parts))
    return f"### A training step\n\n{STEPS}" + table(
        ("model", "arm", "wall ms", "tokens/s", "× bf16", "kernel ms", *_STEP_PARTS), made
    )


_STEP_PARTS = ("products", "quantizers", "attention", "head", "rest", "accumulation", "clipping", "optimizer")


def _losses(files: Files) -> str:
    """Everything of Octavo's that is slower than bf16, in kernel time or in wall time, and what failed."""
    slower = [
        (row.get("shape"), f"{row['arm']}, {row['mode']}", *(f"{row[k]:.3f}" if k in row else None for k in SPEEDUPS))
        for name in ("linear", "layer")
        for row in files.get(name, {"rows": []})["rows"]
        if row["arm"].startswith("octavo") and min(row.get(key, 1.0) for key in SPEEDUPS) < 1.0
    ]
    failed = [
        (name, " ".join(str(row[key]) for key in ("stage", "shape", "case", "arm", "mode") if key in row), _last(row))
        for name, content in files.items()
        for row in content.get("rows", [])
        if "error" in row
    ]
    text = ["### Where it loses\n"]
    columns = ("shape", "arm", *TIMES[2:])
    text.append(table(columns, slower) if slower else "Nothing measured was slower than bf16.\n")
    if failed:
        text.append("What failed:\n\n" + table(("benchmark", "what", "error"), failed))
    return "\n".join(text)


def _last(row: Row) -> str:
    return str(row["error"]).strip().splitlines()[-1][:120].replace("|", "\\|")


def _machine_code(files: Files) -> str:
    """What Triton's compiler makes of the default configurations for Hopper, and the times that follow."""
    versions = {key: rows for key, rows in files.get("sm_90", {}).items() if key[0].isdigit()}
    if not versions:
        return ""
    from benchmarks import sass
    from benchmarks.sass_bound import DEVICES

    version = max(versions, key=lambda text: tuple(map(int, text.split(".")[:2])))
    good = [row for row in versions[version] if "error" not in row]
    passes: dict[tuple[str, str], list[Row]] = {
        (row["op"], row["case"]): [] for row in good if not row["matrix"] and row["config"] == 0
    }
    products: dict[tuple[str, str], list[Row]] = {(row["op"], row["case"]): [] for row in good if row["matrix"]}
    for row in good:
        if row["matrix"]:
            products[row["op"], row["case"]].append(row)
        elif row["config"] == 0:
            passes[row["op"], row["case"]].append(row)
    made = [
        (
            f"{op} {case}",
            " + ".join(str(row["reg"]) for row in rows),
            sum(row["stack"] + row["local"] for row in rows),
            " + ".join(f"{row['bytes']:.3g}" for row in rows),
            " + ".join(row["bound"] for row in rows),
            *(f"{sum(sass.predicted(row, device)[MATRIX] for row in rows):.0f}" for device in DEVICES),
        )
        for (op, case), rows in passes.items()
    ]
    names = [f"{device.name} µs" for device in DEVICES]
    text = f"Triton {version}.\n\n" + table(
        ("kernels of an op", "registers", "spilled bytes", "B/el.", "bound", *names), made
    )
    made = []
    for (op, case), rows in products.items():
        best = min(rows, key=lambda row: sass.predicted(row, DEVICES[-1])[PRODUCT])
        microseconds = (f"{sass.predicted(best, device)[PRODUCT]:.0f}" for device in DEVICES)
        step = best["step"]
        made.append(
            (
                f"{op} {case}", best["shape"], best["reg"], best["stack"] + best["local"], step["per_4_qgmma"],
                " ".join(map(str, step["pending"])), *microseconds,
            )
        )  # fmt: skip
    heads = ("product", "best tile", "registers", "spilled bytes", "instr.", "waits", *names)
    return text + "\n" + table(heads, made)


def _roofline() -> str:
    made, sides = [], []
    tables = {name: {row["shape"]: row for row in roofline.table(roofline.DEVICES[name])} for name in ("H100", "H200")}
    for shape in shapes.parse(["targets", "cubes", "llama", "losing"]):
        label = shapes.label(shape)
        h100, h200 = (tables[name][label] for name in ("H100", "H200"))
        numbers = (*(each[key] for each in (h100, h200) for key in ("speedup", "speedup_eager")), h200["limit"])
        made.append((label, f"{h200['bf16_ms']:.3f}", f"{h200['fp8_ms']:.3f}", *(f"{n:.2f}" for n in numbers)))
    for device in roofline.DEVICES.values():
        smallest_sides = [roofline.begins_to_pay(device, "rowwise", eager=eager) for eager in (False, True)]
        sides.append((device.name, *smallest_sides))
    columns = ("H200 bf16 ms", "H200 FP8 ms", "H100 kernel", "H100 eager", "H200 kernel", "H200 eager", "at most")
    pays = table(("device", "kernel time", "eager"), sides)
    smallest = "Smallest cube M = K = N from which FP8 pays, predicted:\n\n"
    return f"{_out_of_reach()}\n\n{smallest}{pays}\n{table(('M×K×N', *columns), made)}"


def _out_of_reach() -> str:
    """Name the targets of a linear layer over bf16 that the roofline of their GPU does not reach."""
    device, missed = roofline.DEVICES["H200"], []
    for shape, target in zip(shapes.TARGETS, targets.TARGETS, strict=False):
        speedup = roofline.linear(device, shape) / roofline.linear(device, shape, "rowwise")
        if speedup < target.goal:
            missed.append(f"{speedup:.2f} × at {shapes.label(shape)} is below the target of {target.goal:g} ×")
    return f"**Out of reach as predicted, on an H200: {'; '.join(missed)}.**" if missed else ""


def _cpu(files: Files) -> str:
    if "linear" not in files:
        return ""
    content = files["linear"]
    cells = [
        (row["shape"], _arm(row), f"{row['wall_ms']:.1f}", f"{1 / row['wall_speedup']:.2f}") for row in content["rows"]
    ]
    about = "{cpu_threads} threads of: {device}; torch {torch}, {date}.\n\n".format(**content["environment"])
    return about + table(("M×K×N", "arm", "ms", "time over bf16"), cells)


def _arm(row: Row) -> str:
    """The name of an arm in tables."""
    return str(row["arm"]).replace("given tensorwise", "delayed-scaling bound")


def _timed(content: Mapping[str, Any]) -> list[Row]:
    return [row for row in content["rows"] if row.get("kernel_ms")]


def _cells(row: Mapping[str, Any], fields: Sequence[str]) -> list[str | None]:
    """Three significant digits, or as many as there are before the point."""
    values = (row.get(field) for field in fields)
    return [None if v is None else f"{v:.0f}" if abs(v) >= 100 else f"{v:#.3g}" for v in values]


def pictures(results: Path) -> dict[str, Figure]:
    """The plots that the document shows, by file name."""
    images = {"predicted.svg": plots.predicted()}
    for path in sorted(results.iterdir()):
        if path.name in NOT_DEVICES:
            continue
        files = load(path)
        if any(row["arm"] in plots.COLOURS for row in _timed(files.get("linear", {"rows": []}))):
            images[f"linear-{path.name}.svg"] = plots.speedups(files["linear"]["rows"])
        if any(row["stage"] == "quantize" for row in _timed(files.get("kernels", {"rows": []}))):
            images[f"quantize-{path.name}.svg"] = plots.bandwidths(files["kernels"]["rows"])
    return images


def main(arguments: list[str]) -> None:
    """Write the documents, their plots, and README's picture."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks performance", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    options.add_argument("--out", type=Path, default=DOCUMENT, help="the document; plots go to images/ beside it")
    out = options.parse_args(arguments).out
    write_text(out, document(RESULTS))
    write_text(out.parent / APPENDIX, appendix(RESULTS))
    for name, content in pictures(RESULTS).items():
        save(content, out.parent / IMAGES / name)
    write_text(out.parent / IMAGES / "overview.svg", overview(DOCUMENT.parent / IMAGES))
    print(f"written to {out}")

"""Predictions beside what an H100 measured: the planner's error for each row of its result files, in docs/planner.md.

Shares of the data sheet's rates come from the products alone (`benchmarks.rates`), so that linear layers, a decoder
layer and steps test a prediction. The earlier one is with the shares before anything was measured, and the formulas
of today. Kernel time; steps by the clock. No prediction uses a measured time in place of a formula.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import rates
from benchmarks.pages import table
from octavo.numerics.recipe import RECIPES
from octavo.planner.devices import DEVICES, Gpu
from octavo.planner.roofline import LinearCall, bf16_linear, fp8_linear, fp8_rate, product
from octavo.planner.step import StepConfig, linear_costs, step_time

NOW = replace(DEVICES["h100"], measured=None)
BEFORE = replace(
    NOW, bf16_efficiency=0.80, fp8_efficiency=0.70, row_efficiency=0.95, exact_efficiency=1.0, row_exact_efficiency=1.0,
    memory_efficiency=0.90, maxima_efficiency=1.0,
)  # fmt: skip
LOGGED = {"bf16": 135_700, "octavo rowwise": 151_500}
"""Tokens/s of `octavo train` at 0.42 B parameters, read from logs: `notes.md` beside the result files."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured time, and the predictions of it, in milliseconds."""

    kind: str
    where: str
    arm: str
    measured: float
    before: float
    now: float

    def error(self, predicted: float) -> float:
        """By how much a prediction is too long, as a share."""
        return predicted / self.measured - 1


def comparisons() -> list[Comparison]:
    """Every measured row that the planner predicts."""
    files = {path.stem: json.loads(path.read_text())["rows"] for path in rates.FOLDER.glob("*.json")}
    return [*_products(files["kernels"]), *_linears(files["linear"]), *_layers(files["layer"]), *_steps(files["train"])]


def _compare(kind: str, where: str, arm: str, measured: float, predict: Any) -> Comparison:
    before, now = 1e3 * predict(BEFORE), 1e3 * predict(NOW)
    return Comparison(kind=kind, where=where, arm=arm, measured=measured, before=before, now=now)


def _products(rows: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    for row in rows:
        if row["arm"] not in ("bf16", rates.BACKEND):
            continue
        m, k, n = map(int, row["shape"].split("×"))
        recipe, _, name = row["case"].partition(" ")

        def predict(gpu: Gpu, recipe: str = recipe, name: str = name, sizes: Any = (m, n, k)) -> float:
            if recipe == "reference":
                return product(gpu, *sizes)
            rate = fp8_rate(gpu, RECIPES[recipe], exact=name != "forward")
            return product(gpu, *sizes, operand=1, rate=rate)

        label = "bf16" if recipe == "reference" else row["case"]
        yield _compare("product", row["shape"], label, row["kernel_ms"], predict)


def _linears(rows: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    for row in rows:
        recipe = row["arm"].removeprefix("octavo ")
        if recipe != "bf16" and recipe not in RECIPES:
            continue
        call = LinearCall(m=row["m"], k=row["k"], n=row["n"])

        def predict(gpu: Gpu, recipe: str = recipe, call: LinearCall = call) -> float:
            return (bf16_linear(gpu, call) if recipe == "bf16" else fp8_linear(gpu, call, RECIPES[recipe])).total

        yield _compare("linear", f"{row['shape']}, {row['mode']}", recipe, row["kernel_ms"], predict)


def _layers(rows: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """A layer of Llama 3 8B: what a model of two has beyond a model of one."""
    for row in rows:
        if row["arm"] in ("bf16", "octavo rowwise"):

            def predict(gpu: Gpu, arm: str = row["arm"], tokens: int = row["tokens"]) -> float:
                shape = (4096, 14336, 8, 32000, 1, tokens)
                two, one = (step(gpu, arm, layers, *shape, eager=False, optimizer=False) for layers in (2, 1))
                return two - one

            arm = row["arm"].removeprefix("octavo ")
            yield _compare("layer", f"{row['shape']}, compiled", arm, row["kernel_ms"], predict)


def _steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """Steps of `octavo train`: of the result file, and of logs."""
    wide, small = (4096, 14336, 8, 32000, 8, 2048), (2048, 5632, 8, 8192, 32, 1024)
    runs = [
        (row["arm"], row["shape"], row["mode"], 4, wide, row["wall_ms"])
        for row in rows
        if row["stage"] == "octavo train"
    ]
    runs += [(arm, "0.42 B", "eager", 8, small, 1e3 * 32 * 1024 / tokens_per_s) for arm, tokens_per_s in LOGGED.items()]
    for arm, what, mode, layers, shape, milliseconds in runs:

        def predict(gpu: Gpu, arm: str = arm, mode: str = mode, layers: int = layers, shape: Any = shape) -> float:
            return step(gpu, arm, layers, *shape, eager=mode == "eager")

        yield _compare("step", f"{what}, {mode}", arm.removeprefix("octavo "), milliseconds, predict)


def step(
    gpu: Gpu, arm: str, layers: int, hidden: int, intermediate: int, kv_heads: int, vocabulary: int, batch: int,
    sequence: int, *, eager: bool = True, optimizer: bool = True,
) -> float:  # fmt: skip
    """Predicted seconds of a step of a Llama whose vocabulary head is in bf16."""
    from benchmarks.predictions import llama

    traced = llama(hidden, intermediate, layers, kv_heads, vocabulary, batch, sequence)
    recipe = None if arm == "bf16" else RECIPES[arm.removeprefix("octavo ")]
    recipes = {name: None if name == "lm_head" else recipe for name in traced.calls}
    costs = linear_costs(gpu, traced, recipes)
    time = step_time(gpu, traced, costs, StepConfig(eager=eager), batch * sequence)
    return time.seconds - (0.0 if optimizer else time.optimizer)


def tables() -> dict[str, str]:
    """Tables of docs/planner.md: mean and worst errors, every row, and the GPUs."""
    rows = comparisons()
    summary = []
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        cells = []
        for errors in ([r.error(r.before) for r in of_kind], [r.error(r.now) for r in of_kind]):
            cells += [f"{sum(map(abs, errors)) / len(errors):.1%}", f"{max(errors, key=abs):+.1%}"]
        summary.append((f"{kind}s", len(of_kind), *cells))
    bf16 = {(row.kind, row.where): row for row in rows if row.arm == "bf16"}
    each = []
    for row in rows:
        numbers = [_number(row.measured)]
        for predicted in (row.before, row.now):
            numbers += [_number(predicted), f"{row.error(predicted):+.1%}"]
        base = None if row.arm == "bf16" else bf16.get((row.kind, row.where))
        gains = (None, None) if base is None else (base.measured / row.measured, base.now / row.now)
        each.append((row.kind, row.where, row.arm, *numbers, *(gain and f"{gain:.2f}" for gain in gains)))
    heads = ("", "rows", "mean error before", "worst", "mean error now", "worst")
    columns = ("", "where", "", "measured ms", "before", "error", "now", "error", "× bf16, measured", "now")
    return {"errors": table(heads, summary), "rows": table(columns, each, "lllr"), "gpus": _gpus()}


def _gpus() -> str:
    made = []
    for name, gpu in DEVICES.items():
        rates = f"{gpu.bf16_tflops:g}, {gpu.fp8_tflops:g}" if gpu.fp8_tflops else f"{gpu.bf16_tflops:g}, none"
        by_row = gpu.fp8_efficiency * gpu.row_efficiency * gpu.row_exact_efficiency
        of_fp8 = (gpu.fp8_efficiency, gpu.fp8_efficiency * gpu.exact_efficiency, by_row)
        shares = f"{gpu.bf16_efficiency:.0%}; {', '.join(f'{share:.0%}' for share in of_fp8)}"
        copies = f"{gpu.memory_efficiency:.0%}, {gpu.memory_efficiency * gpu.maxima_efficiency:.0%}"
        memory = f"{gpu.memory_tbs:g} TB/s, {gpu.memory_gib:g} GB"
        made.append(
            (f"`{name}`", rates, shares, memory, copies, f"{gpu.link_gbs:g}", gpu.rates_from, gpu.efficiency_from)
        )
    heads = ("`--gpu`", "bf16, FP8 TFLOP/s", "reached", "memory", "reached", "links GB/s", "rates from", "shares")
    return table(heads, made, "lrrrrrl")


def _number(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"

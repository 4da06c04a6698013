"""configs/<model>.toml and docs/configurations.md: for every model of `experiments/models.toml` and 1 to 512 GPUs the
fastest step that fits, as planned in FP8 and in bf16. Dense models take a minute each, those with many experts ten.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter

from benchmarks import command
from benchmarks.environment import RESULTS, environment, read_json, write_json, write_text
from benchmarks.pages import fill, table
from octavo.experiments.fit_layout import Search, planned_steps
from octavo.experiments.ready_models import PlannedStep, ReadyModel, ready_models, render
from octavo.planner.devices import find_gpu

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "configurations.md"
FILE = RESULTS / "simulated" / "configs.json"
KEPT = TypeAdapter(dict[str, list[PlannedStep]])
GPU, COUNTS = "h100", (1, 8, 64, 512)


def steps_of(model: ReadyModel) -> list[PlannedStep]:
    steps = []
    for gpus in COUNTS:
        progress = partial(print, f"{model.name}:", flush=True)
        search = Search(model=model, gpu=GPU, gpus=gpus, progress=progress)
        fit = search.fit()
        steps += [PlannedStep(precision="FP8", gpus=gpus)] if fit is None else planned_steps(fit, search)
    return steps


def read() -> dict[str, list[PlannedStep]]:
    return KEPT.validate_python(read_json(FILE).get("rows", {}))


def configuration(model: ReadyModel, steps: list[PlannedStep]) -> str:
    written = next(s.layout for s in steps if (s.precision, s.gpus) == ("FP8", model.gpus))
    assert written is not None, f"{model.name} does not fit on {model.gpus} GPUs"
    return render(model, written, steps, f"configs/{model.name}.toml", (GPU, find_gpu(GPU).name))


COLUMNS = "model|GPUs|tokens/s|of bf16||GiB a GPU|of bf16|most|of bf16|checkpointing|of bf16".split("|")


def document(kept: dict[str, list[PlannedStep]]) -> str:
    rows = [row for name, steps in kept.items() for row in _rows(ready_models()[name], steps)]
    return fill(DOCUMENT.read_text("utf-8"), {"steps": table(COLUMNS, rows, "l" + 8 * "r" + "l")})


def _rows(model: ReadyModel, steps: list[PlannedStep]) -> Iterator[tuple[str, ...]]:
    bf16 = {step.gpus: step for step in steps if step.precision == "bf16"}
    title = f"[{model.title}](https://github.com/octavo-fp8/octavo/blob/main/configs/{model.name}.toml)"
    for step in steps:
        if step.precision != "FP8" or step.layout is None:
            continue
        other = bf16[step.gpus]
        speed, gain, *memory = "does not fit", "", "–", "–", "–"
        if other.layout is not None:
            speed, *memory = _cells(other)
            gain = f"{step.tokens_per_second / other.tokens_per_second:.2f} ×"
        own, *own_memory = _cells(step)
        pairs = (cell for pair in zip(own_memory, memory, strict=True) for cell in pair)
        yield title, str(step.gpus), own, speed, gain, *pairs
        title = ""


def _cells(step: PlannedStep) -> tuple[str, ...]:
    checkpointing = step.layout.checkpointing if step.layout else ""
    return f"{step.tokens_per_second:,.0f}", f"{step.peak / 2**30:.1f}", str(step.largest), checkpointing


def main(arguments: list[str]) -> None:
    parser = command("configs", __doc__)
    parser.add_argument("--models", nargs="+", choices=list(ready_models()), default=list(ready_models()))
    parser.add_argument("--document", action="store_true", help="write the files from the kept steps, and plan nothing")
    options = parser.parse_args(arguments)
    for name in () if options.document else options.models:
        planned = {name: steps_of(ready_models()[name])}
        rows = KEPT.dump_python(read() | planned)
        in_order = {key: rows[key] for key in ready_models() if key in rows}
        write_json(FILE, environment(torch.device("cpu")) | {"rows": in_order})
    for name, steps in read().items():
        write_text(ROOT / "configs" / f"{name}.toml", configuration(ready_models()[name], steps))
    write_text(DOCUMENT, document(read()))
    print(f"written: configs/*.toml and {DOCUMENT.name}")

"""fit_layout: choose micro-batches, checkpointing and copies of a model so that a step fits and takes the least time.

A search over `octavo.train.run_plan.plan_configured`, which predicts the time and memory of a step.
"""

import shlex
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.experiments.ready_models import PlannedStep, ReadyModel, StepLayout, render
from octavo.planner.devices import Gpu, find_gpu
from octavo.planner.forecast import PlannedRun
from octavo.planner.memory_plan import gib
from octavo.planner.prediction import OnSubject
from octavo.planner.step import CHECKPOINTING, GPUS_PER_MACHINE, StepTime
from octavo.train.config.run_config import ConfigError, parse_config
from octavo.train.run_plan import at_level, plan_configured, plan_progress

MARGIN = 0.1  # Share of a GPU's memory left free: for the allocator, and for what a prediction leaves out
MAX_EXPOSED_SHARE = 0.02  # Share of a step up to which communication and waiting for the host count as hidden
MOST_GPUS = 4096  # Largest number to suggest


@dataclass(frozen=True, kw_only=True)
class Fit:
    layout: StepLayout
    gpu: Gpu
    run: PlannedRun

    @property
    def limit(self) -> int:
        return int((1 - MARGIN) * self.gpu.usable)

    @property
    def step(self) -> PlannedStep:
        own, usable = self.run, self.gpu.usable
        return PlannedStep(
            precision="FP8" if own.plan.converted else "bf16", gpus=self.layout.gpus, layout=self.layout,
            seconds=own.time.seconds, tokens_per_second=own.time.tokens_per_second, peak=own.memory.peak,
            largest=own.memory.largest_batch(usable),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Search:
    model: ReadyModel
    gpu: str
    gpus: int
    level: str | None = None
    progress: OnSubject = lambda subject: None

    def fit(self) -> Fit | None:
        """The fastest layout that fits; None if not even one sequence with full checkpointing does."""
        # For each kind of checkpointing the most sequences. None is taken if that fits and hides communication and host
        # time, as more recomputation then only costs.
        least, *others, most = CHECKPOINTING
        fits = [fit for fit in [self._largest_that_fits(least)] if fit is not None]
        if not fits or _exposed(fits[0].run.time) > MAX_EXPOSED_SHARE:
            if (smallest := self._largest_that_fits(most)) is None:
                return None
            for checkpointing in others:
                if not fits or _exposed(fits[-1].run.time) > MAX_EXPOSED_SHARE:
                    fits += [fit for fit in [self._largest_that_fits(checkpointing)] if fit is not None]
            fits.append(smallest)
        # On several machines, if communication is not hidden, one copy of the model on each machine is tried as well.
        best, machines = _fastest(fits), self.gpus // GPUS_PER_MACHINE
        exposed = best.run.time.communication > MAX_EXPOSED_SHARE * best.run.time.seconds
        if machines > 1 and self.gpus % GPUS_PER_MACHINE == 0 and exposed:
            copies = self._largest_that_fits(best.layout.checkpointing, machines)
            best = best if copies is None else _fastest([best, copies])
        return replace(best, layout=replace(best.layout, reasons=_reasons(self.model, best, fits)))

    def plan(self, layout: StepLayout) -> Fit:
        text = render(self.model, layout, [], f"{self.model.name}.toml", (self.gpu, ""))
        config = parse_config(tomllib.loads(text))
        if self.level is not None:
            config = at_level(config, self.level, {})
        run = plan_configured(config, gpu=self.gpu, gpus=layout.gpus)
        return Fit(layout=layout, gpu=find_gpu(self.gpu), run=run)

    def layout(self, sequences: int, checkpointing: str, dp_replicate: int = 1) -> StepLayout:
        """A layout whose batch is near that of the model, with at least one sequence for each GPU."""
        return StepLayout(
            gpus=self.gpus, sequences=sequences, checkpointing=checkpointing, dp_replicate=dp_replicate,
            micro_batches=max(1, round(self.model.batch / (self.gpus * sequences))),
        )  # fmt: skip

    def _largest_that_fits(self, checkpointing: str, dp_replicate: int = 1) -> Fit | None:
        """Fit the largest power of two of sequences in one forward; None if not even one fits."""
        name = f"{self.level or 'fp8'} on {self.gpus} GPU{'s' * (self.gpus > 1)}, checkpointing {checkpointing}"
        if dp_replicate > 1:
            name += f", {dp_replicate} copies of the model"
        self.progress(f"{name}, 1 sequence at a time")
        fit = self.plan(self.layout(1, checkpointing, dp_replicate))
        most = fit.run.memory.largest_batch(fit.limit)
        sequences = min(_power_of_two(most), _power_of_two(max(1, self.model.batch // self.gpus)))
        if sequences <= 1:
            return fit if most else None
        self.progress(f"{name}, {sequences} sequences at a time")
        return self.plan(self.layout(sequences, checkpointing, dp_replicate))


def fit_layout(search: Search) -> Fit:
    gpu = find_gpu(search.gpu)
    if not gpu.fp8_tflops:
        raise ValueError(f"--gpu {search.gpu}: {gpu.name} has no FP8 products, and ready configurations are in FP8")
    if (fit := search.fit()) is None:
        raise ConfigError(_too_large(search))
    return fit


def planned_steps(fit: Fit, search: Search) -> list[PlannedStep]:
    """The step of a fit, beside the fastest one at level bf16."""
    bf16 = replace(search, level="bf16").fit()
    return [fit.step, PlannedStep(precision="bf16", gpus=search.gpus) if bf16 is None else bf16.step]


def write_configuration(model: ReadyModel, gpu: str, gpus: int, path: Path) -> PlannedStep:
    """Write the configuration of a model, with the fastest layout that fits; return its predicted step."""
    with plan_progress() as progress:
        search = Search(model=model, gpu=gpu, gpus=gpus, progress=progress)
        fit = fit_layout(search)
        steps = planned_steps(fit, search)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = render(model, fit.layout, steps, shlex.quote(str(path)), (shlex.quote(gpu), fit.gpu.name))
    path.write_text(text, encoding="utf-8")
    return fit.step


def _power_of_two(most: int) -> int:
    """The largest power of two that is not above a number; 0 for 0."""
    return 1 << (most.bit_length() - 1) if most else 0


def _exposed(time: StepTime) -> float:
    """Share of a step in which the GPU waits for communication or the host."""
    return (time.communication + time.waiting) / time.seconds


def _fastest(fits: list[Fit]) -> Fit:
    return max(fits, key=lambda fit: fit.run.time.tokens_per_second)


def _reasons(model: ReadyModel, best: Fit, fits: list[Fit]) -> dict[str, str]:
    layout, kinds = best.layout, list(CHECKPOINTING)
    where = "on the GPU" if layout.gpus == 1 else f"on each of {layout.gpus} GPUs"
    plural = "sequence" if layout.sequences == 1 else "sequences"
    most = best.run.memory.largest_batch(best.limit)
    limit = "as many as leave a tenth of the memory free"
    if layout.sequences * layout.gpus == model.batch:
        limit = "all of the batch"
    elif most > layout.sequences:
        limit = f"{most} leave a tenth of the memory free, too"
    tried = {fit.layout.checkpointing: fit for fit in fits}
    slower = [
        f'a step with "{kind}" takes {best.run.time.tokens_per_second / fit.run.time.tokens_per_second:.2f}× as long'
        for kind, fit in tried.items()
        if kind != layout.checkpointing
    ]
    too_large = [f'"{kind}"' for kind in kinds[: kinds.index(layout.checkpointing)] if kind not in tried]
    does_not_fit = [f"{' and '.join(too_large)} would not fit"] if too_large else []
    checkpointing = "; ".join([*does_not_fit, *slower]) or "fits, and recomputes nothing"
    copies = "one copy of the model on all GPUs"
    if layout.gpus == 1:
        copies = "a single process: for several, the number of copies of the model"
    elif layout.dp_replicate > 1:
        copies = f"a copy on each machine of {GPUS_PER_MACHINE}: less communication between machines"
    return {
        "micro_batches": f"{layout.sequences} {plural} at a time {where}; {limit}",
        "checkpointing": checkpointing,
        "dp_replicate": copies,
    }


def _too_large(search: Search) -> str:
    model, smallest = search.model, search.plan(search.layout(1, "full"))
    sequence = f"one sequence of {model.sequence} tokens with full checkpointing"
    memory = f"{gib(smallest.run.memory.peak)} on each, and {gib(smallest.limit)} leave a tenth of the memory free"
    text = f"{model.title} does not fit on {search.gpus} × {smallest.gpu.name}: {sequence} needs {memory}"
    more = 2 * search.gpus
    while more <= MOST_GPUS:
        search.progress(f"fp8 on {more} GPUs, checkpointing full, 1 sequence at a time")
        larger = replace(search, gpus=more)
        fit = larger.plan(larger.layout(1, "full"))
        if fit.run.memory.peak <= fit.limit:
            return f"{text}; it fits on {more}: set --gpus {more}"
        more *= 2
    return f"{text}, nor on up to {MOST_GPUS}: it needs GPUs with more memory, or tensor or expert parallelism"

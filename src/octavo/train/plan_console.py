"""`octavo plan`: print the predicted time and memory of a run."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from octavo.numerics.names import nearest
from octavo.planner.tables import compare_memory, forecast_text, plan_notes
from octavo.planner.timeline import ALLOCATION_GRANULARITY
from octavo.runtime.terminal import width
from octavo.train.config.run_config import TrainConfig, load_config
from octavo.train.config.shrink import change_of
from octavo.train.run_plan import OnSubject, plan_arms, plan_step


def console(
    path: Path, overrides: Sequence[str], *, memory: bool, gpu: str | None, gpus: int, calibration: Path | None,
    device: str, limit: float | None, layers: bool, as_json: bool, shrink: bool = False,
) -> None:  # fmt: skip
    """Print the output of `octavo plan`. Raises ValueError for wrong options; `limit`: GiB, None for an 80 GB GPU."""
    if not memory and gpu is None:
        raise ValueError("nothing to plan: give octavo plan --memory CONFIG, or octavo plan CONFIG --gpu h100")
    if calibration is not None and gpu is None:
        raise ValueError("--calibration needs --gpu, the GPU that was measured: octavo plan CONFIG --gpu h100")
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"--limit is the memory of the device in GiB, above 0; got {limit:g}")
    for option, is_set in (("--limit", limit is not None), ("--layers", layers)):
        if is_set and not memory:
            raise ValueError(f"{option} is for --memory: octavo plan --memory CONFIG")
    if memory and gpu is not None and as_json:
        raise ValueError("--json is for one of them at a time: --memory, or --gpu")
    config = load_config(path, overrides, change=change_of(shrink, _note))
    if gpu is not None:
        with plan_progress() as progress:
            step = plan_step(config, gpu=gpu, gpus=gpus, calibration=calibration, progress=progress)
        if as_json:
            print(step.to_json())
        else:
            print(forecast_text(step, width()))
    if memory:
        _show_memory(config, device=device, limit=limit or 79.0, layers=layers, as_json=as_json)


def _show_memory(config: TrainConfig, *, device: str, limit: float, layers: bool, as_json: bool) -> None:
    if device not in ALLOCATION_GRANULARITY:
        raise ValueError(
            f"device is {' or '.join(ALLOCATION_GRANULARITY)}; got {device!r}{nearest(device, ALLOCATION_GRANULARITY)}"
        )
    limit_bytes, fitting = int(limit * 2**30), []
    with plan_progress() as progress:
        plans = plan_arms(config, device=device, progress=progress)
        for plan in () if as_json else plans:
            progress(f"the largest batch of {plan.label}")
            fitting.append(plan.largest_batch(limit_bytes))
    if as_json:
        print(json.dumps([json.loads(plan.to_json()) for plan in plans], indent=1))
        return
    if layers:
        print(plans[0])
    table = compare_memory(plans, baseline="bf16", fitting=fitting, limit_bytes=limit_bytes)
    print("\n".join([*table.lines(), *plan_notes(plans)]))


def _note(text: str) -> None:
    Console(stderr=True).print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def plan_progress() -> Iterator[OnSubject]:
    """Report progress on stderr: one changing line in a terminal, else one line per subject."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda subject: console.print(f"planning {subject} …", markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("planning") as status:
        yield lambda subject: status.update(f"planning {subject}")

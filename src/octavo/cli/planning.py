"""`octavo doctor | plan | calibrate`: backends of this machine, cost of a run, fastest kernels."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.app import app
from octavo.cli.options import EXAMPLES, AsJson, Config, Overrides, Shrink, flag, path_option

if TYPE_CHECKING:
    import torch


@app.command(epilog=EXAMPLES["doctor"])
def doctor(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; auto takes a GPU where there is one.")] = "auto",
    as_json: AsJson = False,
    deep: Annotated[bool, flag("--deep", "Compare all Triton kernels with the reference instead.")] = False,
    seconds: Annotated[
        float, typer.Option(help="With --deep: seconds to continue with new inputs, after every kernel ran once.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="With --deep: random seed of the inputs.")] = 0,
    only: Annotated[
        str, typer.Option(help="With --deep: only kernels whose op and case contain this text, as e4m3/row.")
    ] = "",
) -> None:
    """Show the device, the versions, and the backend of each op.

    Runs every backend on a tiny input on this device and compares it with the
    reference; lists the reason if a backend does not serve an op.

    With --deep, every Triton kernel runs in every configuration on many random
    inputs and is compared with the reference byte for byte. Exit code 1 if any
    differs.
    """
    from octavo.cli import kernels as checkup

    if deep:
        equal = checkup.doctor_deep(_device(device), as_json=as_json, seconds=seconds, seed=seed, only=only)
        raise typer.Exit(0 if equal else 1)
    checkup.doctor(_device(device), as_json=as_json)


@app.command(epilog=EXAMPLES["plan"])
def plan(
    config: Config,
    overrides: Overrides = None,
    memory: Annotated[bool, flag("--memory", "Plan the memory of a training step.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="GPU to predict for, as h100, or a TOML file; this machine needs no GPU.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="With --gpu: how many there are in all.")] = 1,
    calibration: Annotated[
        Path | None, path_option("With --gpu: JSON table that octavo calibrate wrote on this GPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="What to plan for, cuda or cpu; it need not be here.")] = "cuda",
    limit: Annotated[
        float | None,
        typer.Option(help="With --memory: device memory in GiB that limits the largest batch; default: 79."),
    ] = None,
    layers: Annotated[
        bool, flag("--layers", "With --memory: also the bytes that each kind of layer saves for backward.")
    ] = False,
    as_json: AsJson = False,
    shrink: Shrink = False,
) -> None:
    """Predict time and memory of a run.

    With --memory: predict the peak memory of a step, split into parameters,
    gradients, optimizer states, activations and temporaries, for the
    configuration, for plain bf16 and for each precision level. The step runs on
    fake tensors, which allocate nothing.

    With --gpu: predict the speed-up of each linear layer, and time, tokens/s,
    MFU and memory of a step, compared with bf16; whether the step fits, and the
    largest batch that fits. Predictions use the GPU's data sheet, and times of
    octavo calibrate if --calibration is set or the GPU is in this machine.
    """
    from octavo.train.run_plan import console as run

    run(
        config, overrides or [], memory=memory, gpu=gpu, gpus=gpus, calibration=calibration, device=device,
        limit=limit, layers=layers, as_json=as_json, shrink=shrink,
    )  # fmt: skip


@app.command(epilog=EXAMPLES["calibrate"])
def calibrate(
    shapes: Annotated[
        list[str] | None,
        typer.Option(metavar="M,K,N", help="Tokens, in_features, out_features of a linear; may be repeated."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="Recipe whose GEMMs are measured, or all.")] = "rowwise",
    device: Annotated[str, typer.Option(help="cuda or cuda:1; auto takes the first GPU.")] = "auto",
) -> None:
    """Measure and save which kernels are fastest.

    Times the three products of each linear on every backend that serves them,
    in every configuration, and the host time of a linear per recipe. Saves the
    fastest in the cache folder, for this device and these versions: the one that
    a caller waits for least, for the GPU or for the host. Every later run on this
    machine uses them, and octavo plan predicts with them.
    """
    from octavo.cli.kernels import calibrate as run

    run(_device(device), recipe, shapes or [])


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):  # not meta, which computes nothing
        raise ValueError(f"device is auto, cpu, cuda or cuda:<number>; got {name!r}")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a PyTorch without CUDA
        problem = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {problem}. Give auto, cpu, cuda or cuda:<number>") from None
    return torch.device(name)

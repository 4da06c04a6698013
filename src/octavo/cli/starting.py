"""`octavo init`: write the configuration of a model, fitted to the GPUs at hand."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.app import app, in_home, print_plain, user_errors
from octavo.cli.examples import EXAMPLES
from octavo.runtime.terminal import stdout


def _complete_model(incomplete: str) -> list[str]:
    from octavo.experiments.ready_models import ready_models

    return [name for name in ready_models() if name.startswith(incomplete)]


@app.command(epilog=EXAMPLES["init"])
def init(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Name of a model in --list.", show_default=False, autocompletion=_complete_model)
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU to train on, as h100, or a TOML file that describes one.")] = "h100",
    gpus: Annotated[int, typer.Option(help="How many there are in all.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write; default: <model>.toml.", show_default=False, callback=in_home
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    list_models: Annotated[bool, typer.Option("--list", help="List the models, and write nothing.")] = False,
) -> None:
    """Write a commented configuration that fits your GPUs.

    Predicts steps of the model's training, in FP8 and in bf16, and chooses
    micro-batches, activation checkpointing and copies of the model so that a
    step fits with a tenth of the memory to spare and takes the least time. The
    file has the reasons and the predicted figures. Needs no GPU; takes seconds,
    or minutes for a model with many experts.
    """
    with user_errors(context):
        from octavo.experiments.ready_models import ready_model, ready_models

        if list_models:
            width = max(map(len, ready_models()))
            for name, ready in ready_models().items():
                print(f"{name:<{width}}  {ready.title}: {ready.about}")
            return
        if model is None:
            raise ValueError(
                f"say which model, as octavo init --model {next(iter(ready_models()))}; octavo init --list shows all"
            )
        ready = ready_model(model)
        path = out or Path(f"{model}.toml")
        if path.is_dir() or (path.exists() and not force):
            problem = "is a folder: give the name of a file" if path.is_dir() else "exists: add --force to overwrite it"
            raise ValueError(f"{path} {problem}, or give another with --out")
        from octavo.experiments.fit_layout import write_configuration

        step = write_configuration(ready, gpu, gpus, path)
        print_plain(
            stdout(),
            f"written: {path}, {step.tokens_per_second:,.0f} tokens/s and {step.peak / 2**30:.1f} GiB a GPU predicted\n"
            f"to try it on a CPU: octavo train {path} --shrink",
        )

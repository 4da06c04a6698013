"""The command line: `octavo train | export | demo | doctor | plan | calibrate`.

A mistake of the user (a wrong key, a missing file, data that cannot be used) is one message on stderr and exit code 2;
`--traceback` shows where it was raised. Code 1 is a run that failed: a loss that is not finite. A run that was told to
stop has saved and is a success, 0. Results go to stdout, progress and messages to stderr.

Torch and the trainer are imported inside the commands, so that help, and a mistake on the command line, come at once.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from octavo._version import __version__
from octavo.numerics.names import nearest

if TYPE_CHECKING:
    import torch

    from octavo.train.report import ReportFiles

app = typer.Typer(
    name="octavo",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXAMPLES = {
    "octavo": """
[bold]Examples[/bold]

  [dim]# BF16 against FP8 on a small model; a few minutes on a CPU[/dim]
  octavo demo
  [dim]# one run, into runs/<its name>; any setting can be given after the file[/dim]
  octavo train configs/demo.toml precision.level=O1 precision.recipe=mxfp8
  [dim]# what runs here, on which backend, and why not on another[/dim]
  octavo doctor
  [dim]# the memory that a run will take, by category[/dim]
  octavo plan --memory configs/llama2-7b-80gb.toml
  [dim]# on a GPU: measure which kernels are fastest, for all later runs[/dim]
  octavo calibrate
""",
    "train": """
[bold]Examples[/bold]

  octavo train configs/demo.toml
  octavo train configs/demo.toml run.steps=50 optim.lr=1e-3 --out runs/short
  octavo train configs/demo.toml --out runs/short --resume
  octavo train configs/demo.toml precision.level=O1 precision.recipe=mxfp8
  octavo train configs/demo.toml data.source='corpus/*.txt'
  [dim]# eight GPUs: FSDP2, weights and gradients in FP8 on the wire[/dim]
  torchrun --nproc-per-node 8 -m octavo train configs/demo.toml precision.level=O1 parallel.fp8_comm=on
""",
    "export": """
[bold]Examples[/bold]

  octavo export runs/demo/checkpoints/step-000200 exported
  [dim]# then: AutoModelForCausalLM.from_pretrained("exported")[/dim]
""",
    "demo": """
[bold]Examples[/bold]

  octavo demo
  octavo demo --steps 50 --recipe mxfp8 --out runs/mxfp8
  [dim]# stored activations and optimizer states in FP8 as well[/dim]
  octavo demo --level O1+act+opt
  octavo demo --seed 1 optim.lr=1e-3
""",
    "doctor": """
[bold]Examples[/bold]

  octavo doctor
  octavo doctor --device cpu
  octavo doctor --json > doctor.json
  [dim]# every Triton kernel in every configuration against the reference, byte for byte[/dim]
  octavo doctor --deep
  octavo doctor --deep --seconds 600 --only e4m3/row
""",
    "plan": """
[bold]Examples[/bold]

  [dim]# memory of a training step by category, beside bf16 and each precision level; no GPU, no data, no weights[/dim]
  octavo plan --memory configs/llama2-7b-80gb.toml
  octavo plan --memory configs/demo.toml precision.level=O1 optim.batch=64 --limit 24
  octavo plan --memory configs/demo.toml --layers
  octavo plan --memory configs/demo.toml --json > plan.json
  [dim]# predicted speed, linear by linear, beside bf16; or gpu.toml, which describes another one[/dim]
  octavo plan configs/llama2-7b-80gb.toml --gpu h100 --gpus 8
""",
    "calibrate": """
[bold]Examples[/bold]

  [dim]# the products of Llama-sized linears; a minute or two on one GPU[/dim]
  octavo calibrate
  [dim]# own linears: tokens, in_features, out_features[/dim]
  octavo calibrate --shapes 8192,3072,9216 --shapes 8192,9216,3072 --recipe blockwise
""",
}

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings to change, as optim.lr=1e-3.", show_default=False),
]


def main() -> None:
    """Entry point of the `octavo` command."""
    app()


@contextmanager
def _user_errors(context: typer.Context) -> Iterator[None]:
    """Turn a mistake of the user into one message and exit code 2."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if context.obj["traceback"]:
            raise
        if _is_first_rank() or type(error).__name__ != "SharedError":  # which the first rank tells
            _show_error(_message(error))
        raise typer.Exit(2) from None


def _is_first_rank() -> bool:
    """Whether this is the process that talks, of those that torchrun started; true for one by itself."""
    return os.environ.get("RANK", "0") == "0"


def _show_error(message: str) -> None:
    console = Console(stderr=True)
    console.print("[bold red]error:[/bold red] ", end="")
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}. What `octavo train` and `octavo demo` need comes with: pip install 'octavo[train]'"
    return str(error)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True, epilog=EXAMPLES["octavo"])
def _octavo(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Train PyTorch models in FP8, and see what it did to loss, speed and memory."""
    context.obj = {"traceback": traceback}
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog=EXAMPLES["train"])
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's configuration.", show_default=False)],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; default: run.out of the config, or runs/<run.name>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
) -> None:
    """Train one model as a TOML file says.

    Writes metrics.jsonl, TensorBoard events, checkpoints and a report
    (report.html, loss.png) into the output folder. A folder that holds another
    run is never overwritten. SIGTERM and Ctrl-C save before they stop.
    """
    with _user_errors(context):
        from octavo.train import LostRankError, NonFiniteError, RunResult, load_config, run
        from octavo.train.console import Bars, summary_table
        from octavo.train.report import write_report

        settings = load_config(config, overrides or [])
        folder = out or Path(settings.run.out or Path("runs") / settings.run.name)
        failure = None
        with Bars(Console(stderr=True)) if _is_first_rank() else nullcontext() as bars:
            try:
                result = run(settings, out=folder, resume=resume, progress=bars)
            except NonFiniteError as error:
                failure = error
            except LostRankError as error:
                _show_error(str(error))
                raise typer.Exit(1) from None
        if not _is_first_rank():
            raise typer.Exit(0 if failure is None else 1)
        if failure is not None:
            result = RunResult.read(folder)
        console = Console()
        console.print(summary_table([result]))
        _show_files(console, folder, write_report([folder], folder))
        if result.stopped == "sigterm":
            _say(console, f"Stopped and saved after {result.steps} steps. To go on, the same command with --resume.")
        if failure is not None:
            _show_error(str(failure))
            raise typer.Exit(1)


@app.command(epilog=EXAMPLES["export"])
def export(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder step-NNNNNN.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is new, or empty.", show_default=False)],
) -> None:
    """Write the weights of a checkpoint as Transformers reads them.

    Of one process or of many: shards are put together.
    """
    with _user_errors(context):
        from octavo.train.export import export as write

        _say(Console(), f"written: {write(checkpoint, out)}")


@app.command(epilog=EXAMPLES["demo"])
def demo(
    context: typer.Context,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; default: runs/demo, or the next that is free.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each arm.")] = None,
    level: Annotated[str, typer.Option(help="Precision level of the second arm.")] = "O1",
    recipe: Annotated[str | None, typer.Option(help="FP8 recipe of the second arm.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data order, the same in both arms.")] = None,
) -> None:
    """Train a small Llama in BF16 and in FP8, and compare.

    Same seed, same data, same order. The corpus is the source code of Python's
    standard library, so nothing is downloaded. Prints a verdict computed from
    the two runs, and writes report.html, loss.png and verdict.json.
    """
    given = {"run.steps": steps, "precision.recipe": recipe, "run.device": device, "run.seed": seed}
    with _user_errors(context):
        from octavo.train.console import Bars, summary_table, verdict_text
        from octavo.train.demo import demo_configs, free_folder, run_demo
        from octavo.train.report import verdict

        settings = [f"{key}={value}" for key, value in given.items() if value is not None]
        configs = demo_configs([*(overrides or []), *settings], level)
        folder = out or free_folder(Path("runs/demo"))
        with Bars(Console(stderr=True)) as bars:
            result = run_demo(configs, folder, bars)
        console = Console()
        console.print(summary_table(result.arms))
        if result.files is None:
            _say(console, "Stopped before both arms were trained: there is no verdict.")
            _say(console, f"To finish the arm that was stopped:\n  {result.go_on}")
            return
        console.print(verdict_text(verdict(*result.arms)))
        _show_files(console, folder, result.files)
        if any(arm.stopped == "non-finite" for arm in result.arms):
            raise typer.Exit(1)


def _show_files(console: Console, folder: Path, files: "ReportFiles") -> None:
    _say(console, f"\nreport   {files.html}\nplot     {files.png}")
    if files.verdict:
        _say(console, f"verdict  {files.verdict}")
    _say(console, f"all      {folder}  (tensorboard --logdir {folder})")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command(epilog=EXAMPLES["doctor"])
def doctor(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; auto takes a GPU where there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare all Triton kernels with the reference instead.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="With --deep: go on with new inputs for so long, once each has run.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="With --deep: what the inputs are drawn from.")] = 0,
    only: Annotated[str, typer.Option(help="With --deep: only where 'op case' contains this.")] = "",
) -> None:
    """Show the device, the versions, and what serves each op here.

    Every backend is tried on a tiny input, on this device, and compared with
    the reference; one that does not serve an op is listed with the reason.

    With --deep, every Triton kernel runs in every configuration on many random
    inputs and is compared with the reference byte for byte. Exit code 1 if any
    differs.
    """
    with _user_errors(context):
        if deep:
            from octavo.kernels.deep.console import doctor as doctor_deep

            equal = doctor_deep(_device(device), as_json=as_json, seconds=seconds, seed=seed, only=only)
            raise typer.Exit(0 if equal else 1)
        from octavo.kernels.console import doctor as examine

        examine(_device(device), as_json=as_json)


@app.command(epilog=EXAMPLES["plan"])
def plan(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's configuration.", show_default=False)],
    overrides: Overrides = None,
    memory: Annotated[bool, typer.Option("--memory", help="Plan the memory of a training step.")] = False,
    gpu: Annotated[str | None, typer.Option(help="Plan the speed of a step on this GPU; none has to be here.")] = None,
    gpus: Annotated[int, typer.Option(help="With --gpu: how many share the model.")] = 1,
    device: Annotated[str, typer.Option(help="What to plan for, cuda or cpu; it need not be here.")] = "cuda",
    limit: Annotated[float, typer.Option(help="Memory of the device in GiB, for the largest batch.")] = 79.0,
    layers: Annotated[bool, typer.Option("--layers", help="Also what each kind of layer keeps for backward.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict what a run takes, before it is run.

    With --memory: parameters, gradients, optimizer states, activations and
    temporaries at the worst moment of a step, found by taking the step on
    tensors without storage, for the configuration and for what it could be.

    With --gpu: which linear layers gain from FP8 and how much, the time of a
    step, tokens/s and MFU, beside bf16, from the GPU's data sheet.
    """
    with _user_errors(context):
        from octavo.train.plan import console as run

        run(
            config, overrides or [], memory=memory, gpu=gpu, gpus=gpus, device=device, limit=limit, layers=layers,
            as_json=as_json,
        )  # fmt: skip


@app.command(epilog=EXAMPLES["calibrate"])
def calibrate(
    context: typer.Context,
    shapes: Annotated[
        list[str] | None,
        typer.Option(metavar="M,K,N", help="Tokens, in_features, out_features of a linear; may be repeated."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="Whose products to measure; all takes every recipe.")] = "rowwise",
    device: Annotated[str, typer.Option(help="cuda or cuda:1; auto takes the first GPU.")] = "auto",
) -> None:
    """Measure which kernels are fastest on this GPU, and remember it.

    Times the three products of each linear on every backend that serves them,
    in every configuration. What won is kept in the cache folder, for this
    device and these versions, and every later run here uses it.
    """
    with _user_errors(context):
        from octavo.kernels.gemm.console import calibrate as run

        run(_device(device), recipe, shapes or [])


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(
            f"device is auto, cpu, cuda or cuda:<number>; got {name!r}{nearest(name, ('auto', 'cpu', 'cuda'))}"
        )
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a PyTorch without CUDA
        raise ValueError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}. Give cpu, cuda or auto"
        ) from None
    return device

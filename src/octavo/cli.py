"""The command line: `octavo train | demo | doctor | calibrate`.

A mistake of the user (a wrong key, a missing file, data that cannot be used) is one message on stderr and exit code 2;
`--traceback` shows where it was raised. Code 1 is a run that failed: a loss that is not finite. A run that was told to
stop has saved and is a success, 0. Results go to stdout, progress and messages to stderr.

Torch and the trainer are imported inside the commands, so that help, and a mistake on the command line, come at once.
"""

import json
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

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
""",
    "demo": """
[bold]Examples[/bold]

  octavo demo
  octavo demo --steps 50 --recipe mxfp8 --out runs/mxfp8
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
        _show_error(_message(error))
        raise typer.Exit(2) from None


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
        from octavo.train import NonFiniteError, RunResult, load_config, run
        from octavo.train.console import Bars, summary_table
        from octavo.train.report import write_report

        settings = load_config(config, overrides or [])
        folder = out or Path(settings.run.out or Path("runs") / settings.run.name)
        failure = None
        with Bars(Console(stderr=True)) as bars:
            try:
                result = run(settings, out=folder, resume=resume, progress=bars)
            except NonFiniteError as error:
                failure, result = error, RunResult.read(folder)
        console = Console()
        console.print(summary_table([result]))
        _show_files(console, folder, write_report([folder], folder))
        if result.stopped == "sigterm":
            _say(console, f"Stopped and saved after {result.steps} steps. To go on, the same command with --resume.")
        if failure is not None:
            _show_error(str(failure))
            raise typer.Exit(1)


@app.command(epilog=EXAMPLES["demo"])
def demo(
    context: typer.Context,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; default: runs/demo, or the next that is free.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each arm.")] = None,
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
        configs = demo_configs([*(overrides or []), *settings])
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
        found = _examine(device)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console()
    facts = Table.grid(padding=(0, 2))
    for name, value in {"device": found["device"], **found["gpu"], **found["versions"]}.items():
        facts.add_row(f"[bold]{name}[/bold]", str(value))
    console.print(facts)
    table = Table(box=ROUNDED, border_style="dim", header_style="bold")
    for heading in ("op", "case", "runs on", "why not the others"):
        table.add_column(heading)
    for op, cases, chosen, refusals in _merged(found["ops"]):
        table.add_row(op, cases, chosen, refusals)
    console.print(table)
    console.print(found["summary"], style="bold", markup=False, highlight=False)
    console.print(found["calibration"], markup=False, highlight=False)


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


def _examine(name: str) -> dict[str, Any]:
    """Everything `octavo doctor` shows, ready for JSON."""
    import torch

    from octavo.kernels import calibration
    from octavo.kernels.gemm import accelerated
    from octavo.kernels.registry import status
    from octavo.numerics.recipe import RECIPES

    device = _device(name)
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "cuda": torch.version.cuda,
        }
    native = [recipe.name for recipe in RECIPES.values() if accelerated(recipe, device)]
    return {
        "device": str(device),
        "gpu": gpu,
        "versions": {
            "octavo": __version__,
            "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
            **{package: _version(package) for package in ("torch", "triton", "transformers")},
        },
        "ops": [asdict(row) for row in status(device)],
        "native_recipes": native,
        "summary": _summary(device.type, native, len(RECIPES)),
        "calibration": calibration.summary(device),
    }


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


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"no package {package!r} is installed"


def _summary(kind: str, native: list[str], recipes: int) -> str:
    if kind == "cpu":
        return "On this CPU FP8 runs exactly, but emulated: right numbers and FP8's memory, no speed-up."
    if not native:
        return "This device serves no FP8 product: FP8 runs exactly, but emulated, with no speed-up."
    if len(native) == recipes:
        return "Every recipe's products run on this device's FP8 matrix units."
    return (
        f"On this device's FP8 matrix units: {', '.join(native)}. The other recipes are emulated: exact, no speed-up."
    )


def _merged(ops: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Rows of the table: op, the cases served alike, the chosen backend, and why the others do not serve."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for label, rows in groupby(ops, key=lambda row: row["op"]):
        backends = list(rows)
        op, _, case = label.partition(" ")
        chosen = next(row["backend"] for row in backends if row["chosen"])
        refusals = "\n".join(
            f"{row['backend']}: {row['reason'] or 'serves too, but is slower'}"
            for row in backends
            if row["backend"] != chosen
        )
        groups.setdefault((op, chosen, refusals), []).append(case)
    alone = {op for op, *_ in groups if sum(key[0] == op for key in groups) == 1}
    return [
        (op, f"all {len(cases)}" if op in alone else "\n".join(cases), chosen, refusals or "there is no other")
        for (op, chosen, refusals), cases in groups.items()
    ]

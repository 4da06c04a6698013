"""`octavo init | train | export | demo | watch`: configure, train, export and watch models."""

import signal
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.app import app, is_first_rank, print_plain, print_verdict, show_error
from octavo.cli.options import EXAMPLES, Config, Overrides, Shrink, flag, option, path_argument, path_option
from octavo.runtime.terminal import stderr, stdout

if TYPE_CHECKING:
    from rich.console import Console


def _complete_model(incomplete: str) -> list[str]:
    from octavo.experiments.ready_models import ready_models

    return [name for name in ready_models() if name.startswith(incomplete)]


@app.command(epilog=EXAMPLES["init"])
def init(
    model: Annotated[str | None, option("Name of a model in --list.", autocompletion=_complete_model)] = None,
    gpu: Annotated[str, typer.Option(help="GPU to train on, as h100, or a TOML file that describes one.")] = "h100",
    gpus: Annotated[int, typer.Option(min=1, help="How many there are in all.")] = 1,
    out: Annotated[Path | None, path_option("File to write; default: <model>.toml.", "FILE")] = None,
    force: Annotated[bool, flag("--force", "Overwrite an existing file.")] = False,
    list_models: Annotated[bool, flag("--list", "List the models, and write nothing.")] = False,
) -> None:
    """Write a commented configuration that fits your GPUs.

    Predicts steps of the model's training, in FP8 and in bf16, and chooses
    micro-batches, activation checkpointing and copies of the model so that a
    step fits with a tenth of the memory to spare and takes the least time. The
    file has the reasons and the predicted figures. Needs no GPU; takes seconds,
    or minutes for a model with many experts.
    """
    from octavo.experiments.ready_models import ready_model, ready_models

    if list_models:
        width = max(map(len, ready_models()))
        for name, ready in ready_models().items():
            print(f"{name:<{width}}  {ready.title}: {ready.about}")
        return
    if model is None:
        example = next(iter(ready_models()))
        raise ValueError(f"say which model, as octavo init --model {example}; octavo init --list shows all")
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


@app.command(epilog=EXAMPLES["train"])
def train(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, path_option("Output folder; default: run.out of the config, or runs/<run.name>.")
    ] = None,
    resume: Annotated[bool, flag("--resume", "Go on from the newest checkpoint in the folder.")] = False,
    best_effort: Annotated[
        bool, flag("--best-effort", "With --resume: from the newest checkpoint that is not damaged.")
    ] = False,
    shrink: Shrink = False,
    dry_run: Annotated[bool, flag("--dry-run", "Make all checks, take one step, and keep nothing of it.")] = False,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Train one model, configured by a TOML file.

    Writes metrics.jsonl, TensorBoard events, checkpoints and a report
    (report.html) into the output folder. A folder that holds another run is
    never overwritten. SIGTERM and Ctrl-C save before they stop. With
    run.restarts=N a run that crashes resumes by itself, up to N times.
    """
    from octavo.cli import STARTUP
    from octavo.experiments.progress_bars import ProgressBars, summary_table
    from octavo.experiments.run_report import write_report
    from octavo.numerics.suggestions import counted_noun
    from octavo.train import LostRankError, NonFiniteError, RunResult, load_config, run
    from octavo.train.config.shrink import change_of

    STARTUP.lap("imports")
    if best_effort and not resume:
        raise ValueError("--best-effort is for --resume: give both, or neither")
    notes: list[str] = []
    settings = load_config(config, overrides or [], notes.append, change_of(shrink, notes.append))
    folder = (out or Path(settings.run.out or Path("runs") / settings.run.name)).expanduser()
    if settings.run.restarts and not supervised and not dry_run:
        raise typer.Exit(_supervised(folder, resume=resume, restarts=settings.run.restarts))
    failure = None
    with ProgressBars(stderr(), notes=notes) if is_first_rank() else nullcontext() as bars:
        try:
            result = run(
                settings, out=folder, resume=resume, progress=bars, startup=STARTUP, dry_run=dry_run,
                best_effort=best_effort,
            )  # fmt: skip
        except NonFiniteError as error:
            failure = error
        except LostRankError as error:
            show_error(str(error))
            raise typer.Exit(1) from None
    if dry_run and failure is None and is_first_rank():
        text = f"The run can start: its first step took {result.wall_s:.1f} s"
        print_plain(stdout(), f"{text if result.steps else 'Stopped before its first step'}. Nothing was kept.")
    elif not dry_run and is_first_rank():
        result = result if failure is None else RunResult.read(folder)
        console = stdout()
        console.print(summary_table([result]))
        _show_files(console, write_report([folder], folder))
        if end := ENDS.get(result.stopped):
            print_plain(console, end.format(counted_noun(result.steps, "step")))
    if failure is not None:
        if dry_run or is_first_rank():
            show_error(str(failure))
        raise typer.Exit(1)


ENDS = {  # The last line of output by `RunResult.stopped`, with the number of steps
    "early": "Ended early after {} (eval.patience).",
    "sigterm": "Stopped and saved after {}. To go on, the same command with --resume.",
}


def _supervised(folder: Path, *, resume: bool, restarts: int) -> int:
    """Run this command in a process of its own, and again after a crash. Returns its exit code."""
    from octavo.train.config.run_config import ConfigError
    from octavo.train.ranks import under_torchrun
    from octavo.train.signals import supervise

    if under_torchrun():
        problem = f"run.restarts = {restarts} is for octavo train without torchrun"
        raise ConfigError(f"{problem}: leave it out, and give torchrun --max-restarts {restarts}")
    words = [word for word in sys.argv[1:] if word != "--"]  # after which no option could be added
    command = [sys.executable, "-m", "octavo", *words, "--supervised"]
    return supervise(command, folder, resume=resume, restarts=restarts, note=partial(print_plain, stderr()))


@app.command(epilog=EXAMPLES["export"])
def export(
    checkpoint: Annotated[Path, path_argument("CHECKPOINT", "A folder step-NNNNNN.")],
    out: Annotated[Path, path_argument("OUT", "A folder that is new, or empty.")],
    to: Annotated[
        str, typer.Option(help="bf16, or the FP8 layout of the recipe: fp8-row, fp8-block or mxfp8.")
    ] = "bf16",
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one file of weights.")] = "50GB",
    merge: Annotated[bool, flag("--merge", "The base of [lora] with its adapters added to it.")] = False,
    ema: Annotated[bool, flag("--ema", "The averaged weights of optim.ema instead.")] = False,
) -> None:
    """Write the weights of a checkpoint as Transformers, vLLM and SGLang read them.

    Checkpoints of one process and sharded checkpoints of several both work.
    --to bf16 writes the parameters in their own type. The others write the FP8
    values that training multiplied by: fp8-row (compressed-tensors) for recipe
    rowwise, fp8-block (DeepSeek-V3's layout) for blockwise, mxfp8 for mxfp8;
    heads, norms and embeddings keep their type.
    """
    from octavo.train.checkpoint.export import export as write
    from octavo.train.signals import exit_on

    with exit_on(signal.SIGTERM):
        exported = write(checkpoint, out, to, max_shard_size, ema=ema, merge=merge)
    print_plain(stdout(), str(exported))


@app.command(epilog=EXAMPLES["demo"])
def demo(
    overrides: Overrides = None,
    out: Annotated[Path | None, path_option("Output folder; default: runs/demo, or the next that is free.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each arm; default: 100.")] = None,
    level: Annotated[str, typer.Option(help="Precision level of the second arm.")] = "fp8+activations+optimizer",
    recipe: Annotated[str | None, typer.Option(help="FP8 recipe of the second arm.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data order, the same in both arms.")] = None,
) -> None:
    """Train a small Llama in BF16 and in FP8, and compare.

    The second run has products, stored activations and optimizer states in FP8;
    same seed, same data, same order. The corpus is the source code of Python's
    standard library, so nothing is downloaded. Prints a verdict computed from
    the two runs, and writes report.html and verdict.json. On a CPU
    the speed is the planner's prediction for Llama 3 8B on H100s.
    """
    options = {"run.steps": steps, "precision.recipe": recipe, "run.device": device, "run.seed": seed}
    from octavo.experiments.demo import demo_configs, free_folder, run_demo
    from octavo.experiments.progress_bars import ProgressBars, summary_table

    settings = [f"{key}={value}" for key, value in options.items() if value is not None]
    configs = demo_configs([*(overrides or []), *settings], level)
    folder = out or free_folder(Path("runs/demo"))
    with ProgressBars(stderr()) as bars:
        result = run_demo(configs, folder, bars)
    console = stdout()
    console.print(summary_table(result.arms))
    if (pair := result.verdict) is None:
        print_plain(console, "Stopped before both arms were trained: there is no verdict.")
        print_plain(console, f"To finish the arm that was stopped:\n  {result.go_on}")
        return
    print_verdict(console, pair.sentence, pair.status, () if pair.held_out_sentence else pair.notes)
    if pair.held_out_sentence:
        print_verdict(console, pair.held_out_sentence, pair.held_out_status, pair.notes)
    _show_files(console, folder / "report.html")
    if any(arm.stopped == "non-finite" for arm in result.arms):
        raise typer.Exit(1)


def _show_files(console: "Console", page: Path) -> None:
    print_plain(console, f"\nreport   {page}")
    if (verdict := page.with_name("verdict.json")).exists():
        print_plain(console, f"verdict  {verdict}")
    print_plain(console, f"all      {page.parent}  (tensorboard --logdir {page.parent})")


@app.command(epilog=EXAMPLES["watch"])
def watch(
    run: Annotated[Path, path_argument("RUN", "A run's output folder.")],
    port: Annotated[int | None, option("Port; default: the first free one from 8421 on.", min=0, max=65535)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; by default this machine alone.")] = "127.0.0.1",
    open_browser: Annotated[bool, flag("--open", "Open the page in a browser.")] = False,
) -> None:
    """Show a run in the browser while it trains.

    The page is the report as it is now, below remaining time, speed, MFU, and
    memory beside its prediction. It follows the files of a run that has not
    begun, goes on, was killed or has ended. Ctrl-C ends it; the run does not
    notice.
    """
    from octavo.experiments.live_page import LivePage, LiveServer, run_folder

    folder = run_folder(run)
    with LiveServer(LivePage(folder), host=host, port=port) as server:
        print_plain(stdout(), f"{folder} is shown at {server.url}  (Ctrl-C ends it)")
        if open_browser:
            import webbrowser

            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()

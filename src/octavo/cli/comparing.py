"""`octavo compare`: arms against a baseline, on several seeds."""

import json
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.app import app, is_first_rank, print_plain, print_verdict, show_error
from octavo.cli.exit_codes import verdict
from octavo.cli.options import EXAMPLES, Overrides, Shrink, flag, option, path_argument, path_option
from octavo.runtime.terminal import stderr, stdout

if TYPE_CHECKING:
    from octavo.experiments.compare_verdict import Comparison
    from octavo.inspect.compare import LossComparison


@app.command(epilog=EXAMPLES["compare"])
def compare(
    config: Annotated[Path | None, path_argument("CONFIG", "Configuration of all runs.")] = None,
    overrides: Overrides = None,
    arm: Annotated[
        list[str] | None,
        option("An arm, as rowwise:precision.level=fp8. The first is the baseline.", "NAME:SETTINGS"),
    ] = None,
    seeds: Annotated[
        str | None,
        option("Number of seeds, starting at run.seed, or a list such as 1,2,5; at least two; default: 3.", "N|LIST"),
    ] = None,
    out: Annotated[Path | None, path_option("Folder of all runs; default: runs/compare-<run.name>.")] = None,
    losses: Annotated[Path | None, path_option("Judge the losses in a JSON file, and train nothing.", "FILE")] = None,
    margin: Annotated[
        float | None, option("Largest loss gap that passes, compared with its upper bound.", "PERCENT")
    ] = None,
    confidence: Annotated[float, typer.Option(metavar="PERCENT", help="Joint confidence of all verdicts.")] = 95.0,
    max_seeds: Annotated[int | None, option("Planned maximum of seeds, up to 40; default: 40.", "N")] = None,
    as_json: Annotated[bool, flag("--json", "The verdicts as JSON.")] = False,
    shrink: Shrink = False,
) -> None:
    """Test on several seeds whether losses differ.

    Runs of one seed share initial weights, data and order; an arm adds its
    SETTINGS to CONFIG and the settings after it. Verdicts use the gaps within
    seeds, and include the detectable gap. Finished runs are not repeated; after
    a stop, the same command continues, and you can add seeds until the verdict
    is conclusive.

    Exit code: 0 no arm is worse; 1 one is; 2 a user error; 3 inconclusive, too
    few seeds; 4 stopped before the end. Other codes: 70 Octavo failed, 130
    Ctrl-C, 141 the output was closed before the verdict.
    """  # fmt: skip
    if losses is not None:
        if config is not None or arm or seeds is not None or out is not None:
            raise ValueError("--losses reads finished losses: leave out CONFIG, --arm, --seeds and --out")
        _compare_losses_file(losses, margin, confidence / 100, max_seeds, as_json)
        return
    if config is None:
        raise ValueError("there is nothing to compare: give CONFIG and two --arm, or --losses FILE")
    _train(config, overrides or [], arm or [], seeds or "3", out, margin, confidence, max_seeds, as_json, shrink)


def _compare_losses_file(
    path: Path, margin: float | None, confidence: float, max_seeds: int | None, as_json: bool
) -> None:
    """Print a verdict for each object of a file of losses; exit with the worst code."""
    from octavo.experiments.loss_file import read_losses
    from octavo.inspect.compare import EXIT_CODES, compare_losses, worst
    from octavo.inspect.paired_test import MOST_SEEDS

    comparisons: list[LossComparison] = []
    for number, table in enumerate(tables := read_losses(path)):
        try:
            most = MOST_SEEDS if max_seeds is None else max_seeds
            comparisons.append(compare_losses(
                table.baseline, table.arms, margin=margin, confidence=confidence, max_seeds=most
            ))  # fmt: skip
        except ValueError as error:
            where = f"object {number + 1} of {len(tables)}: " if len(tables) > 1 else ""
            raise ValueError(f"{path}: {where}{error}") from None
    with verdict(EXIT_CODES[worst([comparison.outcome for comparison in comparisons])]):
        if is_first_rank():
            _show_comparisons(comparisons, as_json)


def _show_comparisons(comparisons: "list[LossComparison]", as_json: bool) -> None:
    if as_json:
        print(json.dumps([comparison.to_json() for comparison in comparisons], indent=1, allow_nan=False))
        return
    for number, comparison in enumerate(comparisons, 1):
        if len(comparisons) > 1:
            print_plain(stdout(), f"{number} of {len(comparisons)}")
        for arm in comparison.arms:
            print_verdict(stdout(), arm.sentence, arm.verdict, arm.notes)
        if comparison.extended:
            print_plain(stdout(), comparison.extension)


def _train(
    config: Path, overrides: list[str], arm: list[str], seeds: str, out: Path | None, margin: float | None,
    confidence: float, max_seeds: int | None, as_json: bool, shrink: bool,
) -> None:  # fmt: skip
    from octavo.experiments.compare_report import to_json
    from octavo.experiments.compare_runs import compare as run
    from octavo.experiments.compare_runs import make_arms
    from octavo.experiments.compare_verdict import STOPPED
    from octavo.experiments.progress_bars import ProgressBars
    from octavo.train import LostRankError, load_config
    from octavo.train.config.shrink import change_of
    from octavo.train.ranks import under_torchrun

    arms = make_arms(config, overrides, arm, seeds, change_of(shrink))
    notes: list[str] = []
    name = load_config(config, overrides, notes.append, change_of(shrink, notes.append)).run.name
    folder = out or Path("runs") / f"compare-{name}"
    runs = [arm.folder(seed) for seed in arms[0].configs for arm in arms]
    numbered = lambda run: f"{run} ({runs.index(run) + 1}/{len(runs)})"  # noqa: E731
    problem, comparison = "", None
    with ProgressBars(stderr(), numbered, notes) if is_first_rank() else nullcontext() as progress:
        try:
            comparison = run(
                arms, folder, margin=margin, confidence=confidence / 100, max_seeds=max_seeds, progress=progress
            )
        except LostRankError as error:
            problem = str(error).partition(". ")[0] + "."
        except KeyboardInterrupt:
            problem = "Interrupted before the run could save."
    with verdict(STOPPED if comparison is None else comparison.exit_code):
        if not is_first_rank():
            pass
        elif comparison is None:
            console = stderr() if as_json else stdout()
            if problem:
                show_error(problem)
            else:
                print_plain(console, "Stopped and saved: there is no verdict yet.")
            command = "under torchrun as before" if under_torchrun() else shlex.join(["octavo", *sys.argv[1:]])
            print_plain(console, f"To go on, the same command:\n  {command}")
        elif as_json:
            print(json.dumps(to_json(comparison), indent=1, allow_nan=False))
        else:
            _show(comparison, folder)


def _show(comparison: "Comparison", folder: Path) -> None:
    from octavo.experiments.compare_report import comparison_rows
    from octavo.experiments.progress_bars import value_table

    console = stdout()
    console.print(value_table([run.name for run in comparison.runs], comparison_rows(comparison)))
    for arm in comparison.losses.arms:
        print_verdict(console, arm.sentence, arm.verdict, arm.notes)
    if comparison.held_out is not None:
        print_plain(console, "On held-out data:")
        for losses in comparison.held_out.arms:
            print_verdict(console, losses.sentence, losses.verdict, losses.notes)
    for note in comparison.notes:
        print_plain(console, note)
    print_plain(console, f"\nreport   {folder / 'report.html'}\nresult   {folder / 'compare.json'}\nruns     {folder}")

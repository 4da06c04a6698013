"""`octavo compare`: arms against a baseline, on several seeds."""

import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from octavo.cli.app import Overrides, app, is_first_rank, say, show_error, user_errors
from octavo.cli.examples import EXAMPLES
from octavo.runtime.terminal import stdout

if TYPE_CHECKING:
    from octavo.train import TrainConfig
    from octavo.train.compare import Arm
    from octavo.train.compare_verdict import Comparison


@app.command(epilog=EXAMPLES["compare"])
def compare(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration of all runs.", show_default=False)],
    overrides: Overrides = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:SETTINGS", help="An arm, as rowwise:precision.level=O1. The first is the baseline."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="N|LIST", help="How many, from run.seed on, or which: 1,2,5. Two or more.")
    ] = "3",
    out: Annotated[
        Path | None, typer.Option(help="Folder of all runs; default: runs/compare-<run.name>.", show_default=False)
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="Loss gap that passes; an arm must be shown to stay within it."),
    ] = None,
    confidence: Annotated[float, typer.Option(metavar="PERCENT", help="Of the intervals of all arms together.")] = 95.0,
) -> None:
    """Train arms on several seeds, and say whether the losses differ.

    Runs of one seed share initial weights, data and order; SETTINGS are what an
    arm adds to CONFIG and the settings after it. Verdicts are from the gaps
    within seeds, with what gap would have been found. Runs that are there
    already are not repeated; stopped, the same command goes on.

    Exit code: 0 no arm is worse; 1 one is, or diverged; 2 a mistake; 3
    undecided, too few seeds for the margin; 4 stopped before the end.
    """
    with user_errors(context):
        from octavo.train import LostRankError, load_config
        from octavo.train.compare import check_limits, make_arms
        from octavo.train.compare import compare as run
        from octavo.train.compare_verdict import STOPPED
        from octavo.train.console import Bars
        from octavo.train.ranks import launched

        arms = make_arms(config, overrides or [], arm or [], seeds)
        check_limits(margin, confidence / 100)
        notes: list[str] = []
        name = load_config(config, overrides or [], notes.append).run.name
        folder = out or Path("runs") / f"compare-{name}"
        bars = Bars(Console(stderr=True), _numbered(arms)) if is_first_rank() else nullcontext()
        problem, found = "", None
        with bars as progress:
            if progress is not None:
                for note in notes:
                    progress.note(note)
            try:
                found = run(arms, folder, margin=margin, confidence=confidence / 100, progress=progress)
            except LostRankError as error:
                problem = str(error).partition(". ")[0] + "."
            except KeyboardInterrupt:
                problem = "Interrupted before the run could save."
        if is_first_rank() and found is not None:
            _show(found, folder)
        elif is_first_rank():
            if problem:
                show_error(problem)
            else:
                say(stdout(), "Stopped and saved: there is no verdict yet.")
            again = "under torchrun as before" if launched() else shlex.join(["octavo", *sys.argv[1:]])
            say(stdout(), f"To go on, the same command:\n  {again}")
        raise typer.Exit(STOPPED if found is None else found.exit_code)


def _numbered(arms: "list[Arm]") -> "Callable[[TrainConfig], str]":
    """Names the runs in the order in which they come: "rowwise-seed2 (4/6)"."""
    names = [arm.folder(seed) for seed in arms[0].configs for arm in arms]
    return lambda config: f"{config.run.name} ({names.index(config.run.name) + 1}/{len(names)})"


STYLES = {
    "indistinguishable": "bold green",
    "better": "bold green",
    "worse": "bold red",
    "diverged": "bold red",
    "none": "bold yellow",
}


def _show(comparison: "Comparison", folder: Path) -> None:
    """Table, verdicts and files."""
    from rich.box import ROUNDED
    from rich.table import Table
    from rich.text import Text

    from octavo.train.compare_report import comparison_rows

    console = stdout()
    table = Table(box=ROUNDED, border_style="dim", header_style="bold")
    table.add_column("")
    for name in (comparison.baseline, *(arm.name for arm in comparison.arms)):
        table.add_column(name, justify="right")
    for row in comparison_rows(comparison):
        table.add_row(row.label, *row.values)
    console.print(table)
    for arm in comparison.arms:
        text = Text(arm.sentence, style=STYLES[arm.status])
        for note in arm.notes:
            text.append(f"\n  {note}", style="not bold default")
        console.print(text)
    for note in comparison.notes:
        say(console, note)
    say(console, f"\nreport   {folder / 'report.html'}\nresult   {folder / 'compare.json'}\nruns     {folder}")

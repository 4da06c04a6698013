"""Terminal output of a run: a progress bar on stderr during training, tables on stdout at the end.

If stderr is not a terminal (a log file, CI), a bar would be unreadable: a plain line is printed for every tenth of the
run instead.
"""

from collections.abc import Callable, Sequence
from types import TracebackType

from rich.box import ROUNDED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from octavo.experiments.run_report import held_out_label, held_out_text, summary_rows
from octavo.experiments.verdict import PairVerdict, arm_name
from octavo.train.config.run_config import TrainConfig
from octavo.train.record.metrics import RunResult, StepMetrics
from octavo.train.tasks.registry import task_of

STATUS_STYLES = {"within": "bold green", "above": "bold yellow", "below": "bold yellow", "none": "bold red"}


class _Numbers(ProgressColumn):
    """Loss, speed and learning rate of the last step."""

    def render(self, task: Task) -> Text:
        row: StepMetrics | None = task.fields["row"]
        return Text("") if row is None else _numbers(row, task.fields["unit"])


class ProgressBars:
    """A `Progress` that draws one bar per run; notes appear above the bars. A context manager.

    Args:
        console: The console to draw on.
        label: Returns the label of a run from its name; default: its precision.
    """

    def __init__(self, console: Console, label: Callable[[str], str] | None = None) -> None:
        self._console = console
        self._label_of = label
        self._bars = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=max(8, min(32, console.width - 70))),
            MofNCompleteColumn(),
            _Numbers(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("", visible=False, row=None, unit="")
        self._label = ""
        self._steps = 0
        self._unit = "tokens"

    def __enter__(self) -> "ProgressBars":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage(self, text: str) -> None:
        """Print the beginning of a preparation."""
        self._print(f"{text} …", "dim")

    def start(self, config: TrainConfig, first_step: int) -> None:
        """Open the bar of a run."""
        label = self._label_of(config.run.name) if self._label_of else arm_name(config.precision_label)
        self._label, self._steps, self._unit = label, config.run.steps, task_of(config).unit
        self._task = self._bars.add_task(
            self._label, total=self._steps, completed=first_step, row=None, unit=self._unit
        )  # fmt: skip

    def step(self, row: StepMetrics) -> None:
        """Move the bar; without a terminal, write a line for every tenth of the run."""
        self._bars.update(self._task, completed=row.step, row=row)
        if not self._console.is_terminal and 10 * row.step // self._steps > 10 * (row.step - 1) // self._steps:
            self._print(f"{self._label}  step {row.step}/{self._steps}  {_numbers(row, self._unit).plain}", "")
        if row.held_out:
            shown = ", ".join(f"{held_out_label(name)} {held_out_text(name, v)}" for name, v in row.held_out.items())
            self._print(f"{self._label}  step {row.step}  {shown}", "")

    def note(self, text: str) -> None:
        """Print a notice."""
        self._print(f"note: {text}", "yellow")

    def finish(self, result: RunResult) -> None:
        """Leave the bar where it is."""

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _numbers(row: StepMetrics, unit: str) -> Text:
    loss = "not finite" if row.loss is None else f"{row.loss:.4f}"
    return Text.assemble(
        ("loss ", "dim"), (loss, "bold"), f"  {row.tokens_per_s:,.0f} {unit}/s", ("  lr ", "dim"), f"{row.lr:.1e}"
    )


def summary_table(results: Sequence[RunResult]) -> Table:
    """The summary of one run, or of a pair with their differences."""
    table = Table(box=ROUNDED, border_style="dim", header_style="bold")
    table.add_column("")
    for result in results:
        table.add_column(arm_name(result.precision), justify="right")
    if len(results) > 1:
        table.add_column("difference", justify="right")
    for row in summary_rows(results):
        table.add_row(row.label, *row.values, *([row.difference] if len(results) > 1 else []))
    return table


def verdict_text(verdict: PairVerdict) -> Text:
    """The verdict's sentences and, below them, its notes."""
    text = Text(verdict.sentence, style=STATUS_STYLES[verdict.status])
    if verdict.held_out_sentence:
        text.append(f"\n{verdict.held_out_sentence}", style=STATUS_STYLES[verdict.held_out_status])
    for note in verdict.notes:
        text.append(f"\n{note}", style="not bold default")
    return text

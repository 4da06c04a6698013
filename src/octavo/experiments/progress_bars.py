"""Terminal output of a run: a progress bar on stderr during training, tables on stdout at the end.

The loss of a line is the running mean over 5 % of the run.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import exp
from statistics import fmean

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.experiments.compare_verdict import arm_name
from octavo.experiments.curves import smoothing_window
from octavo.experiments.run_report import held_out_label, held_out_text, summary_rows
from octavo.runtime.terminal import table
from octavo.train.config.run_config import TrainConfig
from octavo.train.record.metrics import LOSS, ExpectedStep, RunResult, RunSetup, StepMetrics
from octavo.train.tasks.registry import task_of


class _Numbers(progress.ProgressColumn):
    """Numbers of the last step, cut where the width ends."""

    def render(self, task: progress.Task) -> Text:
        return Text("  ", no_wrap=True, overflow="ellipsis").join(task.fields["numbers"])


class ProgressBars:
    """A `Progress` that draws one bar per run; notes appear above the bars. A context manager."""

    def __init__(self, console: Console, label: Callable[[str], str] | None = None, notes: Sequence[str] = ()) -> None:
        self._console = console
        self._label_of, self._notes = label, notes
        bar = max(8, min(32, console.width - 90))
        self._bars = progress.Progress(
            progress.TextColumn("[bold]{task.description}"), progress.BarColumn(bar_width=bar),
            progress.MofNCompleteColumn(), _Numbers(), progress.TimeElapsedColumn(),
            progress.TextColumn("[dim]left[/dim]"), progress.TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> "ProgressBars":
        self._bars.start()
        for note in self._notes:
            self.note(note)
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, text: str) -> None:
        self._print(f"{text} …", "dim")

    def start(self, config: TrainConfig, first_step: int, setup: RunSetup) -> None:
        label = self._label_of(config.run.name) if self._label_of else arm_name(config.precision_label)
        self._label, self._steps, self._unit = label, config.run.steps, task_of(config).unit
        self._setup = setup
        self._losses: deque[float] = deque(maxlen=smoothing_window(config.run.steps))
        self._task = self._bars.add_task(self._label, total=self._steps, completed=first_step, numbers=[])

    def step(self, row: StepMetrics) -> None:
        """Move the bar; without a terminal, write a line for every tenth of the run."""
        self._losses += [] if row.loss is None else [row.loss]
        loss = fmean(self._losses) if self._losses else None
        numbers = _numbers(row, loss, self._unit, self._setup.expected)
        self._bars.update(self._task, completed=row.step, numbers=numbers)
        if not self._console.is_terminal and 10 * row.step // self._steps > 10 * (row.step - 1) // self._steps:
            shown = "  ".join(number.plain for number in numbers)
            self._print(f"{self._label}  step {row.step}/{self._steps}  {shown}", "")
        if row.held_out:
            shown = ", ".join(f"{held_out_label(name)} {held_out_text(name, v)}" for name, v in row.held_out.items())
            loss = row.held_out.get(LOSS)
            shown += f", perplexity {exp(loss):,.2f}" if loss is not None and loss < 100 else ""
            self._print(f"{self._label}  step {row.step}  {shown}", "")
        for sample in row.samples or ():
            self._print(f"{self._label}  step {row.step}  sample of {sample['prompt']!r}:", "")
            # Without the characters that steer a terminal.
            text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in sample["text"])
            self._print("    " + text.replace("\n", "\n    "), "dim")

    def note(self, text: str) -> None:
        self._print(f"note: {text}", "yellow")

    def finish(self, result: RunResult) -> None:
        """Leave the bar where it is."""

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _numbers(row: StepMetrics, loss: float | None, unit: str, expected: ExpectedStep | None) -> list[Text]:
    """What a step measured, the most important first; `loss`: the running mean."""
    peak = "" if row.peak_memory is None else f"{row.peak_memory / 2**30:.1f} GiB"
    if peak and expected is not None and expected.memory:
        peak += f" ({expected.memory / 2**30:.1f} predicted)"
    values = [
        ("loss", "not finite" if row.loss is None or loss is None else f"{loss:.4f}", "bold"),
        ("", f"{row.tokens_per_s:,.0f} {unit}/s", ""),
        ("MFU", "" if row.mfu is None else f"{row.mfu:.1%}", ""),
        ("|grad|", "not finite" if row.grad_norm is None else f"{row.grad_norm:.3g}", ""),
        ("lr", f"{row.lr:.1e}", ""),
        ("peak", peak, ""),
        ("epoch", "" if row.epoch is None else f"{row.epoch:.2f}", ""),
    ]
    return [
        Text.assemble((f"{name} " if name else "", "dim"), (value, style)) for name, value, style in values if value
    ]


def summary_table(results: Sequence[RunResult]) -> Table:
    """The summary of one run, or of a pair with their differences."""
    names = [arm_name(result.precision) for result in results]
    return value_table([*names, *(["difference"] if len(results) > 1 else [])], summary_rows(results))


def value_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = table("", *headings, right=tuple(headings))
    for row in rows:
        shown.add_row(*row)
    return shown

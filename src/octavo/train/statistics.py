"""What `[inspect]` leaves behind: one line per operand and sampled step in `statistics.jsonl`, and TensorBoard scalars.

As `metrics.jsonl` it is the record of truth: written and flushed when its step ends, cut back to the checkpoint's step
on resume. A run that samples nothing has no such file. JSON has no NaN and no Infinity: an SQNR that is NaN is null,
one that is infinite "inf".
"""

import json
import math
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from octavo.inspect.findings import Finding, History, Thresholds, findings
from octavo.inspect.stats import OPERANDS, OperandStats

STATISTICS_FILE = "statistics.jsonl"


def read_statistics(out: Path) -> list[OperandStats]:
    """Reads the statistics in the output folder `out`, in order; [] where there are none.

    A last line without its newline is one that a killed process did not finish, and is left out. Any other line that is
    not a row raises ValueError with its number.
    """
    path = out / STATISTICS_FILE
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            rows.append(OperandStats.from_json(json.loads(line)))
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is not a row of statistics: {error}") from None
    return rows


def statistics_of(folder: Path) -> list[OperandStats]:
    """The statistics of a run, or of a run up to one of its checkpoints.

    Args:
        folder: The run's output folder, or a `step-NNNNNN` of it.

    Raises:
        ValueError: Where there are none, with how to get some.
    """
    at = re.fullmatch(r"step-(\d+)", folder.resolve().name)
    run = folder.resolve().parents[1] if at else folder
    rows = [row for row in read_statistics(run) if at is None or row.step <= int(at[1])]
    if not rows:
        before = f" up to step {int(at[1])}" if at else ""
        raise ValueError(
            f"{run} has no statistics{before}: train with inspect.every=50, which samples every 50th step into "
            f"{STATISTICS_FILE}"
        )
    return rows


def all_findings(rows: Sequence[OperandStats], thresholds: Thresholds | None = None) -> list[Finding]:
    """What crossed a limit in any step of a run, as it would have been found when it happened."""
    history, found = History(), []
    for _, of_step in groupby(rows, key=lambda row: row.step):
        now = list(of_step)
        found += findings(now, thresholds or Thresholds(), history)
        history.add(now)
    return found


class StatisticsWriter:
    """Appends rows to `statistics.jsonl` and TensorBoard.

    Args:
        out: The output folder.
        after_step: Steps the run had finished when this process took over; later lines are dropped.
        board: TensorBoard's writer.
    """

    def __init__(self, out: Path, *, after_step: int, board: Any) -> None:
        self._path, self._board = out / STATISTICS_FILE, board
        if self._path.exists():
            kept = [row for row in read_statistics(out) if row.step <= after_step]
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(map(_line, kept)), encoding="utf-8")
            temporary.replace(self._path)

    def write(self, rows: Sequence[OperandStats]) -> None:
        """Appends the rows of a step."""
        if not rows:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, rows)))
        for row in rows:
            for figure, value in (("sqnr", row.sqnr), ("underflow", row.underflow), ("amax", row.amax)):
                self._scalar(f"{row.operand}_{figure}/{row.layer}", value, row.step)
        for operand in OPERANDS:
            levels = [row.sqnr for row in rows if row.operand == operand]
            if levels:
                self._scalar(f"inspect/lowest_sqnr_{operand}", min(levels), rows[0].step)

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._board.add_scalar(name, value, step)


def _line(row: OperandStats) -> str:
    return json.dumps(row.to_json(), allow_nan=False) + "\n"

"""What `[inspect]` leaves behind: one line per operand and sampled step in `statistics.jsonl`, and TensorBoard scalars.

A figure that crosses a limit (`[inspect.limits]`) is reported once, and not again while it lasts; a resumed run reads
earlier samples from the file. An SQNR that is NaN is null, one that is infinite "inf".
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from octavo.inspect.findings import Finding, History, Thresholds, findings
from octavo.inspect.stats import OPERANDS, OperandStats
from octavo.train.disk import names_file, write_file
from octavo.train.record.json_lines import NonNegative, Record, each_record, first_error, in_order

STATISTICS_FILE = "statistics.jsonl"
ROW = "a row of statistics"
CHECKPOINT = re.compile(r"step-(\d+)")  # Folder of a checkpoint


def _level(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError('NaN is null, and infinity "inf"')
    return {None: math.nan, "inf": math.inf}.get(value, value) if isinstance(value, str | None) else value


Level = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_level)]  # dB, as JSON has them


@dataclass(frozen=True, kw_only=True)
class _Row(OperandStats, Record):
    step: NonNegative
    elements: NonNegative
    nonfinite: NonNegative
    sqnr: Level
    what_if: dict[str, Level]
    channel_scales: tuple[float, ...] = ()


Row: Any = Annotated[_Row, AfterValidator(lambda row: OperandStats(**vars(row)))]  # The same, read as `OperandStats`


def read_statistics(out: Path) -> list[OperandStats]:
    """Read the statistics in the output folder `out`, in order; [] where there are none."""
    path = out / STATISTICS_FILE
    rows: Iterator[OperandStats] = each_record(path, Row, ROW)
    return list(in_order(path, rows, ROW, repeated=True))


def statistics_of(folder: Path) -> list[OperandStats]:
    """The statistics of a run, or of a run up to one of its checkpoints."""
    at = CHECKPOINT.fullmatch(folder.resolve().name)
    run = run_of(folder)
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}: give the output folder of a run, as runs/demo")
    rows = [row for row in read_statistics(run) if at is None or row.step <= int(at[1])]
    if not rows:
        before = f" up to step {int(at[1])}" if at else ""
        raise ValueError(f"{run} has no statistics{before}: train with inspect.every=50, for every 50th step")
    return rows


def run_of(folder: Path) -> Path:
    """The output folder of a run, given that or a checkpoint of it."""
    folder = folder.resolve()
    return folder.parents[1] if CHECKPOINT.fullmatch(folder.name) else folder


def limits_of(run: Path) -> Thresholds:
    """The limits of a run, from the `config.toml` of its output folder; the defaults without one."""
    from octavo.train.config.sections import Limits

    path = run / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return Thresholds(**Limits.model_validate(tables.get("inspect", {}).get("limits", {})).model_dump())
    except (ValueError, AttributeError, RecursionError) as error:
        reason = f"inspect.limits.{first_error(error)}" if isinstance(error, ValidationError) else error
        raise ValueError(f"{path} is not the configuration of a run: {reason}") from None


def all_findings(rows: Sequence[OperandStats], thresholds: Thresholds | None = None) -> list[Finding]:
    history, result = History(), []
    for now in _steps(rows):
        result += findings(now, thresholds or Thresholds(), history)
        history.add(now)
    return result


def _steps(rows: Sequence[OperandStats]) -> Iterator[list[OperandStats]]:
    return (list(of_step) for _, of_step in groupby(rows, key=lambda row: row.step))


class StatisticsWriter:
    def __init__(self, out: Path, *, after_step: int, board: Any, limits: Thresholds | None = None) -> None:
        self._path, self._board, self._limits = out / STATISTICS_FILE, board, limits or Thresholds()
        self._history = History()
        self._crossed: set[tuple[str, str, str]] = set()
        if self._path.exists():
            earlier = [row for row in read_statistics(out) if row.step <= after_step]
            for rows in _steps(earlier):
                self._news(rows)
            write_file(self._path, "".join(map(_line, earlier)))

    def write(self, rows: Sequence[OperandStats]) -> list[Finding]:
        """Append the rows of a step. Returns what crossed a limit in it, and did not in the sample before."""
        if not rows:
            return []
        with names_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, rows)))
        for row in rows:
            for figure, value in (("sqnr", row.sqnr), ("underflow", row.underflow), ("amax", row.amax)):
                self._scalar(f"{row.operand}_{figure}/{row.layer}", value, row.step)
        for operand in OPERANDS:
            if levels := [row.sqnr for row in rows if row.operand == operand]:
                self._scalar(f"inspect/lowest_sqnr_{operand}", min(levels), rows[0].step)
        return self._news(rows)

    def _news(self, rows: Sequence[OperandStats]) -> list[Finding]:
        crossings = findings(rows, self._limits, self._history)
        self._history.add(rows)
        before = self._crossed
        self._crossed = {(finding.layer, finding.operand, finding.what) for finding in crossings}
        return [finding for finding in crossings if (finding.layer, finding.operand, finding.what) not in before]

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._board.add_scalar(name, value, step)


def _line(row: OperandStats) -> str:
    return json.dumps(row.to_json(), allow_nan=False) + "\n"

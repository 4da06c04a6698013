"""`octavo inspect`: a table of a run's statistics."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.app import app, print_plain
from octavo.cli.options import EXAMPLES, flag, option, path_argument
from octavo.runtime.terminal import stdout, width

if TYPE_CHECKING:
    from octavo.inspect import OperandStats
    from octavo.numerics.display import Table

ORDERS: "dict[str, Callable[[OperandStats], float]]" = {  # Sort keys; the worst operand comes first
    "sqnr": lambda row: -math.inf if math.isnan(row.sqnr) else row.sqnr,
    "underflow": lambda row: -row.underflow,
    "saturation": lambda row: -row.saturation,
    "range": lambda row: -row.dynamic_range,
    "spread": lambda row: -row.scale_spread,
    "nonfinite": lambda row: -row.nonfinite,
}
SHOWN = 10  # Maximum number of findings shown


@app.command(name="inspect", epilog=EXAMPLES["inspect"])
def inspect_run(
    run: Annotated[Path, path_argument("RUN", "A run's folder, or a checkpoint.")],
    step: Annotated[int | None, option("A sampled step; default: the last.")] = None,
    by: Annotated[str, typer.Option(help=f"Worst first, by {', '.join(ORDERS)}.")] = "sqnr",
    top: Annotated[int, typer.Option(min=1, help="Rows shown.")] = 20,
    as_json: Annotated[bool, flag("--json", "All rows of the step as JSON.")] = False,
) -> None:
    """Show what FP8 does to the operands of a run's layers.

    Reads statistics.jsonl, which a run with inspect.every writes: what crossed
    a limit in any sampled step, and the worst operands of one of them.
    """
    from octavo.numerics.suggestions import counted_noun, nearest
    from octavo.train.record.metrics import all_findings, limits_of, run_of, statistics_of

    if by not in ORDERS:
        raise ValueError(f"--by {by}: no such order{nearest(by, ORDERS)}; one of {', '.join(ORDERS)}")
    rows = statistics_of(run)
    sampled = sorted({row.step for row in rows})
    selected = sampled[-1] if step is None else step
    if selected not in sampled:
        near = min(sampled, key=lambda number: abs(number - selected))
        raise ValueError(f"step {selected} was not sampled; the nearest that was is {near} (--step {near})")
    shown = sorted((row for row in rows if row.step == selected), key=ORDERS[by])
    if as_json:
        print(json.dumps([row.to_json() for row in shown], indent=1))
        return
    console = stdout()
    findings = all_findings(rows, limits_of(run_of(run)))
    figures = counted_noun(len(findings), "figure") if findings else "No figures"
    print_plain(console, f"{figures} crossed a limit in {counted_noun(len(sampled), 'sampled step')}.")
    for finding in findings[:SHOWN]:
        print_plain(console, f"  {finding}")
    if len(findings) > SHOWN:
        print_plain(console, f"  … and {len(findings) - SHOWN} more: report.html has a table and heat maps")
    title = f"step {selected:,}: {min(top, len(shown))} of {len(shown)}, worst {by} first"
    print("\n".join(_table(shown[:top], title).lines(width())))


def _table(rows: "list[OperandStats]", title: str) -> "Table":
    """Return a table of rows, without columns that are equal in all rows, or zero."""
    from octavo.numerics.display import Table

    recipes = {row.recipe for row in rows}
    columns: dict[str, Callable[[OperandStats], str]] = {"operand": lambda row: row.operand}
    if len(recipes) > 1:
        columns["recipe"] = lambda row: row.recipe
    columns["SQNR dB"] = lambda row: "not finite" if row.nonfinite else f"{row.sqnr:.1f}"
    for other in rows[0].what_if:
        columns[f"{other}?"] = partial(_what_if, other)
    columns["underflow"] = lambda row: f"{row.underflow:.3%}"
    if any(row.saturation for row in rows):
        columns["saturation"] = lambda row: f"{row.saturation:.3%}"
    columns |= {
        "amax": lambda row: f"{row.amax:.3g}",
        "range": lambda row: f"2^{row.dynamic_range:.0f}",
        "spread": lambda row: f"{row.scale_spread:.3g}",
    }
    of_all = f" ({recipes.pop()})" if len(recipes) == 1 else ""
    return Table(
        title=f"\n{title}{of_all}", headings=("layer", *columns),
        align="<" + "".join("<" if name in ("operand", "recipe") else ">" for name in columns),
        rows=[(row.layer, *(text(row) for text in columns.values())) for row in rows], shorten=True,
    )  # fmt: skip


def _what_if(recipe: str, row: "OperandStats") -> str:
    return f"{row.what_if[recipe]:.1f}"

"""Compile the kernels for Hopper, interpret their PTX, and compare the bytes with the reference.

One row per case and configuration. sectors and wavefronts are how many times the least that its vector accesses take,
of device and of shared memory; hazards are races in shared memory. `--write` renews results/ptx/sm_90.json and
docs/ptx.md. `--plant` shows that faults are found: it removes barriers, negates a predicate or has waits leave one
group of products more, and prints what differs.
Exit code 1 if any row has a hazard, differs from the reference, or is of a quantizer whose default configuration
accesses a matrix with more than 1.1 times the sectors that its bytes fill.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, write_text
from benchmarks.pages import fill, table

RESULT = RESULTS / "ptx" / "sm_90.json"
PAGE = Path(__file__).parents[2] / "docs" / "ptx.md"

Task = tuple[list[str], int, int, str, int]
"""Texts that select cases, index of the case, configuration, planted fault, random inputs."""


def main(arguments: list[str]) -> None:
    """Interpret and print; with `--write`, keep the rows and the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks ptx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=[""], nargs="+", help="only rows whose 'op case' contains one of these")
    parser.add_argument("--configs", action="store_true", help="all configurations, not the default one only")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random inputs in addition, per row")
    parser.add_argument(
        "--plant", choices=("none", "barriers", "predicates", "waits"), default=["none"], nargs="+",
        help="plant a fault in every kernel; of several, one row each",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--json", action="store_true", help="print JSON, one list of rows")
    parser.add_argument("--write", action="store_true", help=f"renew {RESULT.name} and docs/{PAGE.name}")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: kernels are interpreted by Triton then, not compiled; unset it")
    if options.write and (options.plant != ["none"] or options.only != [""] or options.configs):
        raise SystemExit(
            "--write keeps the whole table of default configurations: leave out --plant, --only, --configs"
        )
    rows = []
    for row in _run(list(_tasks(options)), options.jobs):
        rows.append(row)
        if not options.json:
            print(_line(row), flush=True)
    if options.json:
        print(json.dumps(rows))
    bad = [row for row in rows if row["mismatches"] or row["hazards"] or excess(row)]
    print(f"{len(rows)} rows; {len(bad)} differ from the reference, race, or take too many sectors", file=sys.stderr)
    if options.write:
        import triton

        text = ",\n".join(map(json.dumps, rows))
        write_text(RESULT, f'{{"triton": "{triton.__version__}", "rows": [\n{text}\n]}}\n')
        write_text(PAGE, document(json.loads(RESULT.read_text())))
    raise SystemExit(1 if bad else 0)


def _tasks(options: argparse.Namespace) -> Iterator[Task]:
    from benchmarks.ptx.cases import selected

    for index, check in enumerate(selected(options.only)):
        for config in check.configs if options.configs else check.configs[:1]:
            for plant in options.plant:
                yield options.only, index, config, plant, options.random


def _run(tasks: list[Task], jobs: int) -> Iterable[dict[str, Any]]:
    if jobs < 2 or len(tasks) < 2:
        yield from map(_row, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_row, tasks, chunksize=4)


def _row(task: Task) -> dict[str, Any]:
    from benchmarks.ptx.cases import as_json, examine, selected

    only, index, config, plant, random_inputs = task
    return as_json(examine(selected(only)[index], config, plant, random_inputs))


def ratio(counts: dict[str, list[int]], only: str = "") -> float | None:
    """Return units over ideal units of the kinds of access that contain a text; None without any."""
    chosen = [count for kind, count in counts.items() if only in kind]
    ideal = sum(count[2] for count in chosen)
    return sum(count[1] for count in chosen) / ideal if ideal else None


MOST_SECTORS = 1.1
MATRICES = ("x", "a", "b", "y", "q", "q_t")
"""Arguments of the quantizers that are not scales, maxima or fold factors."""


def excess(row: dict[str, Any]) -> list[str]:
    """Return a quantizer's accesses of matrices that take more than `MOST_SECTORS` times the ideal, as text.

    Other configurations may have blocks of fewer rows than a sector has bytes of the transposed copy.
    """
    if row["config"] or not row["op"].startswith(("quantize", "multiply")):
        return []
    ratios = {kind: ratio(row["sectors"], kind) for kind in row["sectors"] if kind.split()[-1] in MATRICES}
    return [f"{kind}: {times:.2f} sectors" for kind, times in ratios.items() if times and times > MOST_SECTORS]


def _line(row: dict[str, Any]) -> str:
    cells = [_times(ratio(row["sectors"], kind)) for kind in ("ld.global.v", "st.global.v")]
    cells.append(_times(ratio(row["wavefronts"])))
    mismatches = (f"{label}: {text}" for label, text in row["mismatches"].items())
    faults = "; ".join([*row["hazards"], *excess(row), *mismatches])
    name = f"{row['op']} {row['case']} {row['config']}"
    return (
        f"{name:<62} {row['instructions']:>6} loads {cells[0]} stores {cells[1]} shared {cells[2]}  {faults or 'equal'}"
    )


def _times(value: float | None) -> str:
    return "   –" if value is None else f"{value:.2f}"


def document(result: dict[str, Any]) -> str:
    """Return docs/ptx.md with its table anew."""
    cases = groupby(sorted(result["rows"], key=_kernels), lambda row: (row["op"], ", ".join(_kernels(row)[1])))
    made = []
    for (op, kernels), group in cases:
        rows = list(group)
        cells = [_range(rows, "sectors", kind) for kind in ("ld.global.v", "st.global.v")]
        made.append((op, kernels, len(rows), *cells, _range(rows, "wavefronts", "")))
    columns = ("op", "kernels", "cases", "sectors of loads", "sectors of stores", "bank conflicts")
    note = f"Triton {result['triton']}, {len(result['rows'])} cases.\n\n"
    return fill(PAGE.read_text("utf-8"), {"cases": note + table(columns, made, "llr")})


def _kernels(row: dict[str, Any]) -> tuple[str, list[str]]:
    return row["op"], list(dict.fromkeys(row["kernels"]))


def _range(rows: list[dict[str, Any]], field: str, kind: str) -> str:
    values = sorted(value for row in rows if (value := ratio(row[field], kind)) is not None)
    if not values:
        return "–"
    return f"{values[0]:.2f}" if f"{values[0]:.2f}" == f"{values[-1]:.2f}" else f"{values[0]:.2f} to {values[-1]:.2f}"

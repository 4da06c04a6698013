"""Host time of the GPU path, measured without a GPU.

Eager PyTorch hands each operation to the GPU from Python. Where the GPU finishes sooner, the host sets the pace. This
measures the host alone: Triton compiles for sm_90 and runs its real launcher, which calls a CUDA driver that launches
nothing (`libcuda.c`, built with the system's C compiler). Times are ratios to bf16's on the same machine; launches,
dispatched operations and Python calls are exact.

    launches      kernels that Triton launches
    kernels       all kernels: these, products, and what other operations start
    dispatches    operations that go through PyTorch's dispatcher
    python_calls  calls of Python functions

With `--only`, `--write` leaves the rows of the result file, from which the planner's ratios come, and renews those
that were measured later, in a table of their own.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULT = Path(__file__).parents[1] / "results" / "simulated" / "host.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "host_time.md"
COUNTS = ("launches", "kernels", "dispatches", "python_calls")
COLUMNS = ("", "forward µs", "total µs", "× bf16", "launches", "kernels", "dispatches", "calls")
BEFORE = (
    "*Before* is the code without direct launches and plans, on another machine: compare its ratios, which are to its "
    "own bf16, and its counts."
)
LATER = """*Before* is the code without plans of products by Triton, on the same machine. Other work ran on it
meanwhile: compare ratios. A product by Triton is a launch, with nothing in its place."""


def document(content: Row, page: str) -> str:
    """docs/host_time.md with its rows anew."""
    from benchmarks.pages import fill

    before = {row["name"]: row for row in content.get("before", ())}
    text = f"{_table(content['rows'], before)}\n{_measured(content)} {BEFORE}\n\n"
    if later := content.get("later"):
        names = {row["name"] for row in content["rows"]}
        new = {name: row for name, row in before.items() if name not in names}
        text += f"Rows measured later, in a run of their own:\n\n{_table(later['rows'], new)}\n"
        text += f"{_measured(later)}\n{LATER}\n\n"
    return fill(page, {"rows": text})


def _table(rows: list[Row], before: dict[str, Row]) -> str:
    from benchmarks.pages import table

    lines = []
    for row in rows:
        old = before.get(row["name"])
        changed = old is not None and old["python_calls"] != row["python_calls"]
        pairs = [(f"{row['name']}, before", old)] if changed else []
        for name, each in (*pairs, (f"**{row['name']}**" if changed else row["name"], row)):
            times = f"{each['forward_us']:.0f}", f"{each['total_us']:.0f}", f"{each['ratio']:.1f}"
            lines.append((name, *times, *(each[key] for key in COUNTS)))
    return table(COLUMNS, lines)


def _measured(content: Row) -> str:
    machine = content["environment"]
    return (
        f"Measured with `python -m benchmarks host` on one thread of {machine['device']}; torch {machine['torch']}, "
        f"Triton {machine['triton']}, torchao {machine['torchao'] or 'absent'}, Python {machine['python']}, "
        f"{machine['date']}."
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks host\n  python -m benchmarks host --only rowwise block --json FILE",
    )  # fmt: skip
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="measure these rows, and bf16")
    add("--counts", action="store_true", help="count, time nothing")
    add("--repetitions", type=int, default=300, help="samples of a millisecond of which the best counts")
    add("--json", type=Path, metavar="FILE", help="write the rows")
    add("--write", action="store_true", help="renew the result file and docs/host_time.md; with --only, its later rows")
    add("--before", type=Path, metavar="FILE", help="a result file of older code, to show beside the new one")
    add("--peers", type=Path, default=Path(sys.prefix) / "peers", help="folder with torchao (pip install --target)")
    options = parser.parse_args(arguments)
    sys.path.append(str(options.peers))
    from benchmarks.host import stub

    try:
        driver = stub.install()
    except stub.NoCompiler as error:
        sys.exit(f"python -m benchmarks host: {error}")
    import torch

    from benchmarks.environment import environment, write_json, write_text
    from benchmarks.host import measure

    torch.set_num_threads(1)
    known = measure.arms()
    if unknown := set(options.only) - set(known):
        parser.error(f"nothing is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rows = measure.measure(driver, tuple(options.only), options.repetitions, timed=not options.counts)
    content: Row = {
        "benchmark": "host", "command": "python -m benchmarks host",
        "note": "a stub driver launches nothing: host time, no GPU", "environment": environment(torch.device("cpu")),
        "rows": rows,
    }  # fmt: skip
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    earlier = json.loads(options.before.read_text())["rows"] if options.before else kept.get("before", [])
    if options.json is not None:
        write_json(options.json, content | {"before": earlier})
    if options.write:
        later = {"environment": content["environment"], "rows": rows}
        content = kept | {"later": later} if options.only else content | {"before": earlier}
        write_json(RESULT, content)
        write_text(DOCUMENT, document(content, DOCUMENT.read_text()))
        print(f"written to {RESULT} and {DOCUMENT}")

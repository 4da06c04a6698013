"""Host time of the GPU path, measured without a GPU: Triton's real launcher calls a driver that launches nothing
(docs/host_time.md). Times are ratios to bf16's on the same machine; launches, dispatches and calls are exact.
"""

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.compilers import CannotPretend

Row = dict[str, Any]
RESULT = Path(__file__).parents[1] / "results" / "simulated" / "host.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "host_time.md"
COUNTS = ("launches", "kernels", "dispatches", "python_calls")
COLUMNS = ("", "forward µs", "total µs", "× bf16", "launches", "kernels", "dispatches", "calls")


def document(content: Row, page: str) -> str:
    from benchmarks.pages import fill, table

    lines = []
    for row in content["rows"]:
        times = f"{row['forward_us']:.0f}", f"{row['total_us']:.0f}", f"{row['ratio']:.1f}"
        lines.append((row["name"], *times, *(row[key] for key in COUNTS)))
    machine = content["environment"]
    measured = (
        f"Measured with `python -m benchmarks host` on one thread of {machine['device']}; torch {machine['torch']}, "
        f"Triton {machine['triton']}, torchao {machine['torchao'] or 'absent'}, Python {machine['python']}, "
        f"{machine['date']}."
    )
    return fill(page, {"rows": f"{table(COLUMNS, lines)}\n{measured}"})


def main(arguments: list[str]) -> None:
    parser = command("host", __doc__, "host\nhost --only rowwise block --json FILE")
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="measure these rows, and bf16")
    add("--counts", action="store_true", help="count, time nothing")
    add("--repetitions", type=int, default=300, help="samples of a millisecond of which the best counts")
    add("--json", type=Path, metavar="FILE", help="write the rows")
    add("--write", action="store_true", help="renew the result file and docs/host_time.md (all rows)")
    add("--peers", type=Path, default=Path(sys.prefix) / "peers", help="folder with torchao (pip install --target)")
    options = parser.parse_args(arguments)
    if options.write and options.only:
        parser.error("--write renews all rows, from which the planner's ratios come: without --only")
    sys.path.append(str(options.peers))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr when it starts and stops
    from benchmarks.host import stub

    try:
        driver = stub.install()
    except CannotPretend as error:
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
    if options.json is not None:
        write_json(options.json, content)
    if options.write:
        write_json(RESULT, content)
        write_text(DOCUMENT, document(content, DOCUMENT.read_text()))
        print(f"written to {RESULT} and {DOCUMENT}")

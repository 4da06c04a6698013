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

RESULT = Path(__file__).parents[1] / "results" / "simulated" / "host.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "host_time.md"


def main(arguments: list[str]) -> None:
    """Measure, print, and write what is asked for."""
    options = _parser().parse_args(arguments)
    sys.path.append(str(options.peers))
    from benchmarks.host import stub

    try:
        driver = stub.install()
    except stub.NoCompiler as error:
        sys.exit(f"python -m benchmarks host: {error}")
    import torch

    from benchmarks.environment import environment, write_json, write_text
    from benchmarks.host import document, measure

    torch.set_num_threads(1)
    print(measure.HEADER)
    known = measure.arms()
    if unknown := set(options.only) - set(known):
        sys.exit(
            f"python -m benchmarks host: nothing is called {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    rows = measure.measure(driver, tuple(options.only), options.repetitions, timed=not options.counts)
    content: dict[str, Any] = {
        "benchmark": "host",
        "command": "python -m benchmarks host",
        "note": "a stub driver launches nothing: host time, no GPU",
        "environment": environment(torch.device("cpu")),
        "rows": rows,
    }
    if options.before is not None:
        content["before"] = json.loads(options.before.read_text())["rows"]
    elif RESULT.exists():
        content["before"] = json.loads(RESULT.read_text()).get("before", [])
    if options.json is not None:
        write_json(options.json, content)
    if options.write:
        if options.only:
            later = {"environment": content["environment"], "rows": rows}
            content = json.loads(RESULT.read_text()) | {"later": later}
        write_json(RESULT, content)
        write_text(DOCUMENT, document.text(content, DOCUMENT.read_text()))
        print(f"written to {RESULT} and {DOCUMENT}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks host\n  python -m benchmarks host --only rowwise block --json FILE",
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="measure these rows, and bf16")
    add("--counts", action="store_true", help="count, time nothing")
    add("--repetitions", type=int, default=300, help="samples of a millisecond of which the best counts")
    add("--json", type=Path, metavar="FILE", help="write the rows")
    add("--write", action="store_true", help="renew the result file and docs/host_time.md; with --only, its later rows")
    add("--before", type=Path, metavar="FILE", help="a result file of older code, to show beside the new one")
    add("--peers", type=Path, default=Path(sys.prefix) / "peers", help="folder with torchao (pip install --target)")
    return parser

"""What `torch.compile` makes of a Llama 3 8B decoder layer, without a GPU.

Fake tensors on a pretended H100 go through Dynamo, AOTAutograd's partitioner and Inductor's scheduler and code; the
code is kept and not run. Numbers are exact for this version of PyTorch, apart from bytes, which are Inductor's own
estimate: it counts each tensor that a kernel reads or writes once.

    kernels    all calls: generated kernels, and extern ones (products, attention, Octavo's ops)
    opaque     calls of Octavo's ops among these, which run Python in every step; of them `quantize_pair` and
               `quantize` by tensor launch two kernels each
    kept       what the forward graph returns for backward, without parameters and inputs
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "simulated" / "compiled.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "compile.md"


def main(arguments: list[str]) -> None:
    """Measure, print a row at a time, and write what is asked for."""
    options = _parser().parse_args(arguments)
    if options.families is not None:
        return _measure_families(options)
    sys.path.append(str(options.peers))
    from benchmarks.compiled import pretend

    try:
        graphs = pretend.install()
    except pretend.CannotPretend as error:
        sys.exit(f"python -m benchmarks compiled: {error}")
    import torch

    warnings.simplefilter("ignore")  # of PyTorch and Triton about themselves
    from benchmarks.arms import has_torchao
    from benchmarks.compiled import block, document, measure
    from benchmarks.environment import environment, write_json, write_text

    if unknown := set(options.only) - set(block.ARMS):
        sys.exit(
            f"python -m benchmarks compiled: no arm is called {', '.join(sorted(unknown))}; there are "
            f"{', '.join(block.ARMS)}"
        )
    print(measure.HEADER)
    rows = []
    arms = [(arm, options.combo_kernels) for arm in options.only or block.ARMS]
    if options.write and not options.only:
        arms += [(arm, True) for arm in document.COMBINED if not options.combo_kernels]
    # Once a model of a process stores activations, graphs of all models look for inputs to recompute.
    arms.sort(key=lambda arm: arm[0].startswith("stored"))
    for arm, combo_kernels in arms:
        if arm.startswith("torchao") and not has_torchao():
            print(f"{arm:<26}torchao is not importable (see --peers)")
            continue
        rows.append(measure.measure(graphs, arm, combo_kernels=combo_kernels))
        print(measure.line(rows[-1]), flush=True)
    content: dict[str, Any] = {
        "benchmark": "compiled",
        "command": "python -m benchmarks compiled",
        "note": "a pretended H100: nothing ran",
        "tokens": block.TOKENS,
        "environment": environment(torch.device("cpu")),
        "rows": rows,
    }
    if options.json:
        write_json(options.json, content)
        print(f"written to {options.json}")
    if options.write:
        old = json.loads(RESULT.read_text())
        content |= {"rows": document.merged(old["rows"], rows), "families": old["families"]}
        write_json(RESULT, content)
        write_text(DOCUMENT, document.document(content, DOCUMENT.read_text()))
        print(f"written to {RESULT} and {DOCUMENT}")


def _measure_families(options: argparse.Namespace) -> None:
    """Measure models on this CPU, which runs them: nothing is pretended."""
    from benchmarks.compiled import document, families
    from benchmarks.environment import write_json, write_text

    if unknown := set(options.families) - set(families.FAMILIES):
        sys.exit(
            f"python -m benchmarks compiled: no family is called {', '.join(sorted(unknown))}; there are "
            f"{', '.join(families.FAMILIES)}"
        )
    warnings.simplefilter("ignore")
    rows = families.measured(options.families)
    if options.write:
        content = json.loads(RESULT.read_text())
        new = {row["family"] for row in rows}
        content["families"] = [row for row in content.get("families", []) if row["family"] not in new] + rows
        write_json(RESULT, content)
        write_text(DOCUMENT, document.document(content, DOCUMENT.read_text()))
        print(f"written to {RESULT} and {DOCUMENT}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks compiled\n"
        '  python -m benchmarks compiled --only bf16 "octavo rowwise"',
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="ARM", help="measure these arms")
    add("--families", nargs="*", metavar="FAMILY", help="run small models of families instead, on this CPU")
    add("--combo-kernels", action="store_true", help="with Inductor's option of that name")
    add("--json", type=Path, metavar="FILE", help="write the rows")
    add(
        "--write",
        action="store_true",
        help="renew the measured rows of benchmarks/results/simulated/compiled.json and the tables of docs/compile.md",
    )
    add("--peers", type=Path, default=Path(sys.prefix) / "peers", help="folder with torchao (pip install --target)")
    return parser

"""What `torch.compile` makes of a Llama 3 8B decoder layer, without a GPU.

Fake tensors on a pretended H100 go through Dynamo, AOTAutograd's partitioner and Inductor's scheduler and code; the
code is kept and not run. Numbers are exact for this version of PyTorch, apart from bytes, which are Inductor's own
estimate: it counts each tensor that a kernel reads or writes once.

    kernels    all calls: generated kernels, and extern ones (products, attention, Octavo's ops)
    opaque     calls of Octavo's ops among these, which run Python in every step; of them `quantize_pair` and
               `quantize` by tensor launch two kernels each
    kept       what the forward graph returns for backward, without parameters and inputs
"""

import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import command
from benchmarks.compilers import CannotPretend

if TYPE_CHECKING:
    from benchmarks.compiled.pretend import Graph, Graphs

Row = dict[str, Any]
RESULT = Path(__file__).parents[1] / "results" / "simulated" / "compiled.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "compile.md"
RECIPES = {
    "bf16": "bf16", "octavo rowwise": "**rowwise**", "opaque rowwise": "rowwise, opaque ops",
    "torchao rowwise": "torchao rowwise", "octavo tensorwise": "**tensorwise**",
    "opaque tensorwise": "tensorwise, opaque ops", "torchao tensorwise": "torchao tensorwise",
    "octavo blockwise": "**blockwise**",
}  # fmt: skip
STORED = {
    "octavo rowwise": "rowwise", "stored rowwise": 'rowwise, `activations="fp8"`', "octavo tensorwise": "tensorwise",
    "stored tensorwise": 'tensorwise, `activations="fp8"`',
}  # fmt: skip
COMBINED = {"bf16": "bf16", "octavo rowwise": "**rowwise**", "torchao rowwise": "torchao rowwise"}
COLUMNS = ("", "kernels", "of them generated", "opaque", "GB moved", "saved, bytes per token")


def measure(graphs: "Graphs", arm: str, *, combo_kernels: bool = False) -> Row:
    import torch
    from torch._inductor import config as inductor

    from benchmarks.compiled import block
    from octavo.runtime.torch_compat import FakeTensorMode

    torch._dynamo.reset()
    graphs.take()
    with FakeTensorMode(), block.built(arm) as model, inductor.patch(combo_kernels=combo_kernels):
        like = {"dtype": torch.bfloat16, "device": "cuda"}
        x = torch.empty(1, block.TOKENS, block.WIDTH, requires_grad=True, **like)
        angles = torch.empty(block.TOKENS, block.WIDTH // block.HEADS, **like)
        y = torch.compile(model, fullgraph=True, dynamic=False)(x, angles, angles)
        y.backward(torch.empty_like(y))
    forward, backward = graphs.take()
    result, *saved = forward.lowered.module.graph.output_node().args[0]
    kept = {node for node in saved if node is not None and node.op != "placeholder" and node is not result}
    values = [node.meta["val"] for node in kept]
    row: Row = {"arm": arm, "combo_kernels": combo_kernels, "forward": counts(forward), "backward": counts(backward)}
    parts = row["forward"], row["backward"]
    row["kernels"] = sum(part["generated"] + part["extern"] for part in parts)
    row["opaque"] = sum(sum(part["opaque"].values()) for part in parts)
    row["kept_bytes_per_token"] = sum(v.nbytes for v in values if isinstance(v, torch.Tensor)) // block.TOKENS
    return row


def counts(graph: "Graph") -> Row:
    body = graph.code[graph.code.index("def call(") :]
    body = "\n".join(line for line in body.splitlines() if not line.lstrip().startswith("assert_"))
    ops = re.findall(r"\btorch\.ops\.(\w+\.\w+)\.\w+\(", body)
    return {
        "generated": len(re.findall(r"\btriton_\w+\.run\(", body)),
        "extern": len(re.findall(r"\bextern_kernels\.\w+\(", body)) + len(ops),
        "opaque": dict(Counter(op for op in ops if op.startswith("octavo."))),
        "gigabytes": round(graph.bytes / 1e9, 3),
    }


def cells(row: Row) -> tuple[Any, ...]:
    pairs = [f"{row['forward'][key]:{form}} + {row['backward'][key]:{form}}"
             for key, form in (("generated", ""), ("gigabytes", ".2f"))]  # fmt: skip
    return row["kernels"], pairs[0], row["opaque"], pairs[1], f"{row['kept_bytes_per_token']:,}"


def document(rows: list[Row], page: str) -> str:
    """The page with the tables of these rows between its marks; arms without a row are left out."""
    from benchmarks.pages import fill, table

    known = {(row["arm"], row["combo_kernels"]): row for row in rows}
    parts = {}
    for name, arms, combo in (("recipes", RECIPES, False), ("combo", COMBINED, True), ("stored", STORED, False)):
        lines = [(title, *cells(known[arm, combo])) for arm, title in arms.items() if (arm, combo) in known]
        parts[name] = table(COLUMNS, lines)
    return fill(page, parts)


def main(arguments: list[str]) -> None:
    parser = command("compiled", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="ARM", help='measure these arms, such as bf16 "octavo rowwise"')
    add("--combo-kernels", action="store_true", help="with Inductor's option of that name")
    add("--json", type=Path, metavar="FILE", help="write the rows")
    add("--write", action="store_true", help=f"renew measured rows of {RESULT.name} and the tables of docs/compile.md")
    add("--peers", type=Path, default=Path(sys.prefix) / "peers", help="folder with torchao (pip install --target)")
    options = parser.parse_args(arguments)
    sys.path.append(str(options.peers))
    from benchmarks.compiled import pretend

    try:
        graphs = pretend.install()
    except CannotPretend as error:
        sys.exit(f"python -m benchmarks compiled: {error}")
    import torch

    warnings.simplefilter("ignore")  # of PyTorch and Triton about themselves
    from benchmarks.arms import TORCHAO, importable
    from benchmarks.compiled import block
    from benchmarks.environment import environment, write_json, write_text

    if unknown := set(options.only) - set(block.ARMS):
        parser.error(f"no arm is called {', '.join(sorted(unknown))}; there are {', '.join(block.ARMS)}")
    arms = [(arm, options.combo_kernels) for arm in options.only or block.ARMS]
    if options.write and not options.only:
        arms += [(arm, True) for arm in COMBINED if not options.combo_kernels]
    # Once a model of a process stores activations, graphs of all models look for inputs to recompute.
    arms.sort(key=lambda arm: arm[0].startswith("stored"))
    form = "{:<26}{:>8}{:>18}{:>8}{:>18}{:>24}"
    print(form.format(*COLUMNS))
    rows: list[Row] = []
    for arm, combo in arms:
        if arm.startswith("torchao") and not importable(TORCHAO):
            print(f"{arm:<26}torchao is not importable (see --peers)")
            continue
        rows.append(measure(graphs, arm, combo_kernels=combo))
        print(form.format(arm + ", combo" * combo, *cells(rows[-1])), flush=True)
    content: Row = {
        "benchmark": "compiled", "command": "python -m benchmarks compiled", "note": "a pretended H100: nothing ran",
        "tokens": block.TOKENS, "environment": environment(torch.device("cpu")), "rows": rows,
    }  # fmt: skip
    if options.json:
        write_json(options.json, content)
    if options.write:
        old = json.loads(RESULT.read_text())
        again = {(row["arm"], row["combo_kernels"]): row for row in (*old["rows"], *rows)}
        write_json(RESULT, content | {"rows": list(again.values()), "families": old["families"]})
        write_text(DOCUMENT, document(list(again.values()), DOCUMENT.read_text()))
        print(f"written to {RESULT} and {DOCUMENT}")

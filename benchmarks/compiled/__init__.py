"""What `torch.compile` makes of a Llama 3 8B decoder layer, without a GPU (docs/compile.md): fake tensors on a
pretended H100 go through Dynamo, AOTAutograd and Inductor, whose code is kept and not run.
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
    from benchmarks.compiled.pretend import Graph

Row = dict[str, Any]


def measure(graphs: "list[Graph]", arm: str) -> Row:
    import torch

    from benchmarks.compiled import block
    from octavo.runtime.torch_compat import FakeTensorMode

    torch._dynamo.reset()
    graphs.clear()
    with FakeTensorMode():
        like = {"dtype": torch.bfloat16, "device": "cuda"}
        x = torch.empty(1, block.TOKENS, block.WIDTH, requires_grad=True, **like)
        angles = torch.empty(block.TOKENS, block.WIDTH // block.HEADS, **like)
        y = torch.compile(block.built(arm), fullgraph=True, dynamic=False)(x, angles, angles)
        y.backward(torch.empty_like(y))
    forward, backward = graphs
    result, *saved = forward.lowered.module.graph.output_node().args[0]
    kept = {node for node in saved if node is not None and node.op != "placeholder" and node is not result}
    values = [node.meta["val"] for node in kept]
    row: Row = {"arm": arm, "forward": counts(forward), "backward": counts(backward)}
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


def main(arguments: list[str]) -> None:
    parser = command("compiled", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="ARM", help='measure these arms, such as bf16 "octavo rowwise"')
    add("--json", type=Path, metavar="FILE", help="write the rows")
    options = parser.parse_args(arguments)
    from benchmarks.compiled import pretend

    try:
        graphs = pretend.install()
    except CannotPretend as error:
        sys.exit(f"python -m benchmarks compiled: {error}")
    import torch

    warnings.simplefilter("ignore")  # of PyTorch and Triton about themselves
    from benchmarks.compiled import block
    from benchmarks.environment import environment, write_json

    if unknown := set(options.only) - set(block.ARMS):
        parser.error(f"no arm is called {', '.join(sorted(unknown))}; there are {', '.join(block.ARMS)}")
    # Once a model of a process stores activations, graphs of all models look for inputs to recompute.
    arms = sorted(options.only or block.ARMS, key=lambda arm: arm.startswith("stored"))
    rows: list[Row] = []
    for arm in arms:
        rows.append(measure(graphs, arm))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        write_json(options.json, {"environment": environment(torch.device("cpu")), "rows": rows})

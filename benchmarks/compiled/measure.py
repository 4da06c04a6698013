"""What Inductor makes of a decoder layer: kernels, calls, bytes, and what forward keeps for backward."""

import re
from collections import Counter
from typing import Any

import torch
from torch._inductor import config as inductor

from benchmarks.compiled import block
from benchmarks.compiled.pretend import Graph, Graphs
from octavo.runtime.torch_compat import FakeTensorMode

Row = dict[str, Any]


def measure(graphs: Graphs, arm: str, *, combo_kernels: bool = False) -> Row:
    """Compile forward and backward of the block in one arm."""
    torch._dynamo.reset()
    graphs.take()
    with FakeTensorMode(), block.built(arm) as model, inductor.patch(combo_kernels=combo_kernels):
        like = {"dtype": torch.bfloat16, "device": "cuda"}
        x = torch.empty(1, block.TOKENS, block.WIDTH, requires_grad=True, **like)
        angles = torch.empty(block.TOKENS, block.WIDTH // block.HEADS, **like)
        y = torch.compile(model, fullgraph=True, dynamic=False)(x, angles, angles)
        y.backward(torch.empty_like(y))
    forward, backward = graphs.take()
    row: Row = {"arm": arm, "combo_kernels": combo_kernels}
    row |= {"forward": counts(forward), "backward": counts(backward)}
    row["kernels"] = sum(row[part]["generated"] + row[part]["extern"] for part in ("forward", "backward"))
    row["opaque"] = sum(sum(row[part]["opaque"].values()) for part in ("forward", "backward"))
    row["kept_bytes_per_token"] = kept_bytes(forward) // block.TOKENS
    return row


def counts(graph: Graph) -> Row:
    """Generated kernels, calls of other kernels, calls of Octavo's ops among these, and gigabytes."""
    body = graph.code[graph.code.index("def call(") :]
    body = "\n".join(line for line in body.splitlines() if not line.lstrip().startswith("assert_"))
    ops = re.findall(r"\btorch\.ops\.(\w+\.\w+)\.\w+\(", body)
    return {
        "generated": len(re.findall(r"\btriton_\w+\.run\(", body)),
        "extern": len(re.findall(r"\bextern_kernels\.\w+\(", body)) + len(ops),
        "opaque": dict(Counter(op for op in ops if op.startswith("octavo."))),
        "gigabytes": round(graph.bytes / 1e9, 3),
    }


def kept_bytes(forward: Graph) -> int:
    """Bytes that the forward graph returns for backward: neither its result nor inputs such as parameters."""
    result, *saved = forward.lowered.module.graph.output_node().args[0]
    tensors = {node for node in saved if node is not None and node.op != "placeholder" and node is not result}
    values = [node.meta["val"] for node in tensors]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


HEADER = f"{'':<26}{'kernels':>8}{'generated':>16}{'extern':>12}{'opaque':>8}{'GB moved':>18}{'kept B/token':>14}"


def line(row: Row) -> str:
    """A row for a terminal."""
    forward, backward = row["forward"], row["backward"]
    pairs = [f"{forward[key]} + {backward[key]}" for key in ("generated", "extern", "gigabytes")]
    name = row["arm"] + (", combo" if row["combo_kernels"] else "")
    return (
        f"{name:<26}{row['kernels']:>8}{pairs[0]:>16}{pairs[1]:>12}{row['opaque']:>8}{pairs[2]:>18}"
        f"{row['kept_bytes_per_token']:>14}"
    )

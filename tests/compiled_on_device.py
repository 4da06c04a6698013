"""Run by test_compile.py in a process of its own, on a pretended H100: compile linears, decoder layers and a step.

Prints for each case the graphs that Dynamo made in two forwards and backwards and its graph breaks, or the error.
Arguments: a backend of torch.compile, and the names of cases.
"""

import json
import sys

from benchmarks.compiled import pretend

pretend.install()

import torch  # noqa: E402  after the device is there
from benchmarks.compiled import block  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import octavo  # noqa: E402
from octavo.nn.loss import linear_cross_entropy  # noqa: E402
from octavo.runtime.torch_compat import FakeTensorMode  # noqa: E402

block.WIDTH, block.HIDDEN, block.HEADS = 256, 512, 16
TOKENS, VOCABULARY = 64, 320
BFLOAT16 = {"dtype": torch.bfloat16, "device": "cuda"}


class Step(nn.Module):
    """A decoder layer, a norm, a head and its loss."""

    def __init__(self):
        super().__init__()
        self.block, self.norm = block.Block(), block.Norm(block.WIDTH)
        self.head = block._linear(block.WIDTH, VOCABULARY)

    def forward(self, x, cos, sin):
        hidden = self.norm(self.block(x, cos, sin))
        target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device="cuda")
        return linear_cross_entropy(hidden, self.head.weight, target)


class Linear(nn.Module):
    """A linear with a bias, which takes what a decoder layer takes."""

    def __init__(self):
        super().__init__()
        self.linear = block._linear(block.WIDTH, block.WIDTH)
        self.linear.bias = nn.Parameter(torch.empty(block.WIDTH, **BFLOAT16))

    def forward(self, x, cos, sin):
        return self.linear(x)


KINDS = {"linear": [Linear], "layers": [block.Block] * 2, "step": [Step]}


def result(case, backend):
    """Compile each module of a case by itself; a case is a kind, a recipe and perhaps "stored"."""
    kind, recipe, *stored = case.split()
    torch._dynamo.reset()
    counters.clear()
    with FakeTensorMode():
        modules = nn.ModuleList(make() for make in KINDS[kind])
        octavo.convert(modules, recipe, verbose=False, activations="fp8" if stored else "bf16")
        x = torch.empty(1, TOKENS, block.WIDTH, **BFLOAT16, requires_grad=True)
        angles = torch.empty(TOKENS, block.WIDTH // block.HEADS, **BFLOAT16)
        try:
            for _ in range(2):
                y = x
                for module in modules:
                    y = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)(y, angles, angles)
                y.sum().backward()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


json.dump({case: result(case, sys.argv[1]) for case in sys.argv[2:]}, sys.stdout)

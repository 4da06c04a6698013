"""What each operation keeps for backward, by the names that the running release of torch gives its autograd nodes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo.activations.saved_tensors import MIN_COMPRESS_NUMEL, compressed
from octavo.nn.memory_audit import saved_for_backward

SIZE = 64 * 64
SHAPES = {"square": (64, 64), "batch": (2, 32, 64), "heads": (1, 2, 32, 64), "image": (4, 4, 16, 16)}


def ends(groups):
    return torch.arange(1, groups + 1, dtype=torch.int32) * (64 // groups)


# Operation of activations x, y, z and a weight w of the dtype; which shape they have, and how many of the tensors that
# the operation saves are rounded and exact.
PRODUCTS = {
    "linear": (lambda x, y, z, w: F.linear(x, w(64, 64)), "square", 1, 0),
    "linear of a batch": (lambda x, y, z, w: F.linear(x, w(64, 64)), "batch", 1, 0),
    "linear with a bias": (lambda x, y, z, w: F.linear(x, w(64, 64), w(64)), "square", 1, 0),
    "linear of a batch with a bias": (lambda x, y, z, w: F.linear(x, w(64, 64), w(64)), "batch", 1, 0),
    "linear of a transposed batch": (lambda x, y, z, w: F.linear(x.transpose(0, 1), w(64, 64)), "batch", 1, 0),
    "mm": (lambda x, y, z, w: x @ w(64, 64), "square", 1, 0),
    "mm, weight first": (lambda x, y, z, w: w(64, 64) @ x, "square", 1, 0),
    "addmm": (lambda x, y, z, w: torch.addmm(w(64), x, w(64, 64)), "square", 1, 0),
    "addmm, weight first": (lambda x, y, z, w: torch.addmm(w(64), w(64, 64), x), "square", 1, 0),
    "bmm": (lambda x, y, z, w: torch.bmm(x, w(2, 64, 64)), "batch", 1, 0),
    "bmm, weight first": (lambda x, y, z, w: torch.bmm(w(2, 64, 32), x), "batch", 1, 0),
    "baddbmm": (lambda x, y, z, w: torch.baddbmm(w(2, 1, 64), x, w(2, 64, 64)), "batch", 1, 0),
    "baddbmm, weight first": (lambda x, y, z, w: torch.baddbmm(w(2, 1, 64), w(2, 64, 32), x), "batch", 1, 0),
    "einsum": (lambda x, y, z, w: torch.einsum("bsk,nk->bsn", x, w(64, 64)), "batch", 1, 0),
    "grouped_mm": (lambda x, y, z, w: F.grouped_mm(x, w(4, 64, 64), offs=ends(4)), "square", 1, 0),
    "conv1d": (lambda x, y, z, w: F.conv1d(x, w(32, 1, 4), groups=32), "batch", 1, 0),
    "conv2d": (lambda x, y, z, w: F.conv2d(x, w(8, 4, 4, 4), stride=4), "image", 1, 0),
    "mm of two activations": (lambda x, y, z, w: x @ y, "square", 0, 2),
    "bmm of two activations": (lambda x, y, z, w: torch.bmm(x.mT, y), "batch", 0, 2),
    "einsum of two activations": (lambda x, y, z, w: torch.einsum("bsk,btk->bst", x, y), "batch", 0, 2),
    "conv2d of two activations": (lambda x, y, z, w: F.conv2d(x, y), "image", 0, 2),
}
OTHERS = {
    "silu": (lambda x, y, z, w: F.silu(x), "batch", 1, 0),
    "gelu": (lambda x, y, z, w: F.gelu(x), "batch", 1, 0),
    "gelu_tanh": (lambda x, y, z, w: F.gelu(x, approximate="tanh"), "batch", 1, 0),
    "silu gate": (lambda x, y, z, w: F.silu(x) * y, "batch", 3, 0),
    "gelu gate": (lambda x, y, z, w: x * F.gelu(y), "batch", 3, 0),
    "relu gate": (lambda x, y, z, w: F.relu(x).reshape(64, 64) * y.view(64, 64), "batch", 1, 1),
    "product": (lambda x, y, z, w: x * y, "batch", 0, 2),
    "quotient": (lambda x, y, z, w: x / y, "batch", 0, 2),
    "maximum": (lambda x, y, z, w: torch.maximum(x, y), "batch", 0, 2),
    "atan2": (lambda x, y, z, w: torch.atan2(x, y), "batch", 0, 2),
    "dist": (lambda x, y, z, w: torch.dist(x, y), "batch", 0, 2),
    "relu": (lambda x, y, z, w: F.relu(x), "batch", 0, 1),
    "sigmoid": (lambda x, y, z, w: torch.sigmoid(x), "batch", 0, 1),
    "tanh": (lambda x, y, z, w: torch.tanh(x), "batch", 0, 1),
    "exp": (lambda x, y, z, w: torch.exp(x), "batch", 0, 1),
    "softplus": (lambda x, y, z, w: F.softplus(x), "batch", 0, 1),
    "square": (lambda x, y, z, w: x.pow(2), "batch", 0, 1),
    "cosine": (lambda x, y, z, w: x.cos(), "batch", 0, 1),
    "softmax": (lambda x, y, z, w: x.softmax(-1), "batch", 0, 1),
    "log_softmax": (lambda x, y, z, w: x.log_softmax(-1), "batch", 0, 1),
    "layer_norm": (lambda x, y, z, w: F.layer_norm(x, (64,), w(64), w(64)), "batch", 0, 1),
    "sdpa": (lambda x, y, z, w: F.scaled_dot_product_attention(x, y, z), "heads", 0, 4),
    "causal sdpa": (lambda x, y, z, w: F.scaled_dot_product_attention(x, y, z, is_causal=True), "heads", 0, 4),
}
CASES = PRODUCTS | OTHERS


def kept(operation, shape, dtype, autocast=False):
    """Elements that are kept in FP8, and in other floating dtypes, in units of an activation; no statistics."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() * 1 for _ in range(3))
    weights = nn.ParameterDict()

    def weight(*size):
        if str(size) not in weights:
            weights[str(size)] = nn.Parameter(torch.randn(*size, generator=generator).to(dtype))
        return weights[str(size)]

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return operation(x, y, z, weight)

    run()  # makes the weights
    owner = nn.ModuleList([weights])
    for matrix in (p for p in weights.values() if p.ndim == 2):
        owner.append(nn.Linear(1, 1, bias=False))
        owner[-1].weight = matrix
    with saved_for_backward(owner) as saved:
        result = compressed(owner, (), run)
    assert result.requires_grad
    rows = [(row.dtype, math.prod(row.shape)) for row in saved]
    rounded = sum(count for dtype, count in rows if dtype == torch.float8_e4m3fn)
    exact = sum(
        count for dtype, count in rows if dtype in (torch.float32, torch.bfloat16) and count >= MIN_COMPRESS_NUMEL
    )
    return rounded / SIZE, exact / SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_rounds_what_it_may_and_nothing_else(name, dtype):
    operation, shape, rounded, exact = CASES[name]
    assert kept(operation, SHAPES[shape], dtype) == (rounded, exact)


@pytest.mark.parametrize("name", ["linear", "linear of a batch with a bias", "bmm", "conv2d"])
def test_products_under_autocast_round_the_cast_of_an_activation_and_no_weight(name):
    operation, shape, rounded, _ = CASES[name]
    exact = {"bmm": 2, "conv2d": 0}.get(name, 1)  # the cast of the weight; a small one for conv2d
    assert kept(operation, SHAPES[shape], torch.float32, autocast=True) == (rounded, exact)

"""The float32 products of the long comparisons round as PyTorch's bf16 products do."""

import pytest
import torch
import torch.nn.functional as F

from bf16_products import Float32Products
from octavo.numerics import sqnr

OFFSETS = torch.tensor([10, 10, 40, 64], dtype=torch.int32)
PRODUCTS = {
    "mm": (lambda x, w: x @ w, (64, 96), (96, 80)),
    "addmm": (lambda x, w: torch.addmm(x[:1, :80], x, w, beta=0.5), (64, 96), (96, 80)),
    "bmm": (torch.bmm, (4, 64, 96), (4, 96, 80)),
    "grouped": (lambda x, w: F.grouped_mm(x, w, offs=OFFSETS), (64, 96), (4, 96, 80)),
}


def gradients(product, x, w):
    x, w = (value.detach().requires_grad_() for value in (x, w))
    y = product(x, w)
    y.float().square().sum().backward()
    return y, x.grad, w.grad


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients(name):
    """A sum in another order may round to the neighbour: rarely, so 60 dB, where rounding to bf16 alone has 50."""
    product, *shapes = PRODUCTS[name]
    x, w = (torch.randn(shape).bfloat16() for shape in shapes)
    with Float32Products():
        wide = gradients(product, x, w)
    for one, other in zip(gradients(product, x, w), wide, strict=True):
        assert other.dtype == torch.bfloat16 and sqnr(one, other) > 60
    if name != "grouped":
        assert sqnr(product(x.double(), w.double()), wide[0]) > 49


def test_other_dtypes_are_left_alone():
    x = torch.randn(8, 8, dtype=torch.float64)
    with Float32Products():
        squared = x @ x
    assert torch.equal(squared, x @ x)

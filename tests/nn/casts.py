"""What the tests of this folder observe of quantization, and how they set it up."""

import sys
from contextlib import contextmanager

from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR
from octavo.kernels.registry import Backend


@contextmanager
def counted(op):
    """The arguments of every call of an op inside the block."""
    calls = []
    backend = op.backends["reference"]
    op._forced.append(Backend(name="reference", run=lambda *a: calls.append(a) or backend.run(*a)))
    try:
        yield calls
    finally:
        op._forced.pop()


def set_copies(monkeypatch, enabled):
    """Operands in both memory orders, as FP8 matrix units want them, or not."""
    for module in ("octavo.nn.linear", "octavo.nn.operands", "octavo.nn.weights"):
        monkeypatch.setattr(sys.modules[module], "needs_both_orders", lambda device: enabled)


@contextmanager
def weight_casts(*weights):
    """How often tensors of the shapes of these weights are quantized inside the block, as a list of shapes."""
    shapes = {weight.shape for weight in weights}
    shapes_cast = []
    with counted(QUANTIZE) as casts, counted(QUANTIZE_PAIR) as pairs:
        yield shapes_cast
    shapes_cast += [call[0].shape for call in casts + pairs if call[0].shape in shapes]


def set_steady(layer, x):
    """Bring an equalized layer to a pass that neither measures nor changes its channel scales, for 16 passes."""
    if not getattr(layer, "recipe", None) or not layer.recipe.equalization:
        return
    layer(x)
    layer.equalizer.advance(33)

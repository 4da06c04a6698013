"""glu: h = activation(gate) · up, in FP8 or not, and its gradients.

    dgate = grad · up · activation'(gate)         dup = grad · activation(gate)

in float32, each result rounded once to gate's dtype; the FP8 output quantizes the rounded h. Backward does not need h:
the gradients use gate and up, and the product that reads h saves the FP8 output.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.fused import reference
from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.fused.reference import cases_of_inputs, check_output, empty_outputs, optional_spec
from octavo.kernels.library import check_like, check_matrix, define, sample
from octavo.kernels.quantize.reference import unpack_outputs
from octavo.kernels.registry import Case, register, same_bytes, triton_backend
from octavo.numerics.spec import QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.tensor import Order, ScaledTensor


def glu(
    gate: Tensor, up: Tensor, activation: str = "silu", spec: QuantSpec | None = None, order: Order = "rows"
) -> Tensor | ScaledTensor:
    """Gated activation of a gated linear unit (Shazeer, arXiv 2002.05202): h [R,C] in gate's dtype.

    gate and up [R,C], float32, bfloat16 or float16, have any strides: they may be halves of one [R,2C] tensor. With a
    spec of scales by row or blocks of 1x16 to 1x128, the result is `quantize(h, spec, order=order)`. Raises ValueError
    for other specs, an unknown activation, or an operand of a wrong dtype, shape or device.
    """
    _check("glu", gate, up, None, activation)
    check_output("glu", spec, order)
    outputs: list[Tensor] = torch.ops.octavo.glu(gate, up, activation, "" if spec is None else spec.text, order)
    return outputs[0] if spec is None else unpack_outputs(outputs, spec, order)


def glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str = "silu", *, joined: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of `glu`: dgate and dup [R,C] of gate's dtype, from ∂L/∂h; `joined`: halves of one [R,2C] tensor."""
    _check("glu_backward", gate, up, grad, activation)
    outputs = torch.ops.octavo.glu_backward(grad, gate, up, activation, joined)
    dgate, dup = outputs[0].split(gate.shape[1], dim=1) if joined and gate.shape[1] else (outputs[0], outputs[-1])
    return dgate, dup


def _check(op: str, gate: Tensor, up: Tensor, grad: Tensor | None, activation: str) -> None:
    check_matrix(op, "gate", gate)
    check_like(op, "up", up, tuple(gate.shape), (gate.dtype,), gate)
    check_like(op, "grad", grad, tuple(gate.shape), (gate.dtype,), gate)
    check_choice(f"{op}: activation", activation, ACTIVATIONS)


def _inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    (activation, text), (gate, up) = case, sample(device, 2, torch.bfloat16)
    return [(gate, up, activation, optional_spec(text), order) for order in ("rows", "both")[: 1 + bool(text)]]


_CASES: dict[str, Case] = {f"{a} {text}".rstrip(): (a, text) for a in ACTIVATIONS for text in cases_of_inputs()}

GLU = register(
    "glu", _CASES, same_bytes(reference.glu, _inputs), triton_backend("fused.triton:glu"), reference=reference.glu
)
GLU_BACKWARD = register(
    "glu_backward", {a: (a,) for a in ACTIVATIONS},
    same_bytes(reference.glu_backward, lambda device, case: [(*sample(device, 3, torch.bfloat16), case[0], True)]),
    triton_backend("fused.triton:glu_backward"), reference=reference.glu_backward,
)  # fmt: skip


def _run(gate: Tensor, up: Tensor, activation: str, spec: str, order: str) -> list[Tensor]:
    return GLU.choose(gate.device, (activation, spec)).run(gate, up, activation, optional_spec(spec), order)


def _run_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str, joined: bool) -> list[Tensor]:
    return GLU_BACKWARD.choose(gate.device, (activation,)).run(grad, gate, up, activation, joined)


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str, joined: bool) -> list[Tensor]:
    rows, columns = gate.shape
    return [gate.new_empty((rows, 2 * columns))] if joined else [gate.new_empty(gate.shape) for _ in range(2)]


define("glu", _run, lambda gate, up, activation, spec, order: empty_outputs(gate, optional_spec(spec), order))
define("glu_backward", _run_backward, _fake_backward)

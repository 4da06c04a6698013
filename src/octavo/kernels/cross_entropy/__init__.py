"""cross_entropy: the loss of logits and its gradient, which takes their place: 6 bytes per logit in bf16.

Exponentials and the order of sums differ in last bits from device to device.
"""

import torch
from torch import Tensor

from octavo.kernels.conformance.mismatches import low_sqnr
from octavo.kernels.library import define
from octavo.kernels.registry import Backend, Case, register, triton_backend

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
"""Dtypes of logits by name."""


def loss_and_gradient(
    logits: Tensor, target: Tensor, ignore_index: int, scale: float, softcap: float | None, needs_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each row and its gradient by the logits [C,V], float32 (float64), by PyTorch's operations."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    if scale != 1.0:
        z = z * scale
    slope = None
    if softcap is not None:
        slope = torch.tanh(z / softcap)
        z = slope * softcap
    counts = (target != ignore_index).unsqueeze(1)
    index = target.unsqueeze(1).masked_fill(~counts, 0)
    lse = z.logsumexp(1, keepdim=True)
    loss = (lse - z.gather(1, index)).masked_fill(~counts, 0).squeeze(1)
    if not needs_gradient:
        return loss, None
    g = z.sub_(lse).exp_() if z is not logits else (z - lse).exp_()
    g.scatter_(1, index, g.gather(1, index) - 1)
    g.masked_fill_(~counts, 0)
    if slope is not None:
        g.mul_(slope.square_().neg_().add_(1))
    return loss, g.mul_(scale) if scale != 1.0 else g


def reference(logits: Tensor, target: Tensor, ignore_index: int, scale: float, softcap: float | None) -> Tensor:
    loss, gradient = loss_and_gradient(logits, target, ignore_index, scale, softcap)
    assert gradient is not None
    logits.copy_(gradient)
    return loss


def _probe(backend: Backend[Tensor], device: torch.device, case: Case) -> str | None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(6, 5000, generator=generator, device="cpu", dtype=torch.float32).mul(3).to(device, DTYPES[case[0]])
    target = torch.tensor([0, 4999, -100, 7, 4096, 4095], device=device)
    for scale, softcap in ((1.0, None), (0.5, 30.0)):
        given, expected = z.clone(), z.clone()
        loss = reference(expected, target, -100, scale, softcap)
        found = backend.run(given, target, -100, scale, softcap)
        # Bits of 16-bit gradients that lie between two numbers may flip.
        decibels = 100.0 if given.dtype == torch.float32 else 50.0
        if why := low_sqnr([loss, expected], [found, given], decibels, ("loss", "gradient")):
            return why
    return None


CROSS_ENTROPY = register(
    "cross_entropy", {name: (name,) for name in DTYPES}, _probe, triton_backend("cross_entropy.triton:cross_entropy"),
    reference=reference,
)  # fmt: skip


def _run(
    logits: Tensor, target: Tensor, ignore_index: int = -100, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    backend = CROSS_ENTROPY.choose(logits.device, (str(logits.dtype).removeprefix("torch."),))
    return backend.run(logits, target, ignore_index, scale, softcap)


cross_entropy_ = define(
    "cross_entropy_", _run, lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.float32),
    mutates=("logits",),
)  # fmt: skip
"""Return the loss of each row of logits [C,V], float32 [C], and write the gradient of their sum over the logits.

A target (int64 [C]) that is no class makes a row's loss NaN on a GPU; `ignore_index` makes loss and gradient 0.
Logits are multiplied by `scale`, then become softcap · tanh(logits / softcap).
"""

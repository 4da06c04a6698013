"""adamw: one step on many parameters, with FP8 or float32 moments and exact 16- or 32-bit masters.

Not a torch op: it updates lists of tensors in place, and nothing differentiates or compiles through it.
"""

import torch
from torch import Tensor

from octavo.kernels.adamw import reference
from octavo.kernels.adamw.reference import HyperParams, ParamState, Work, compress, split
from octavo.kernels.registry import Backend, Case, register, triton_backend
from octavo.numerics.error import sqnr

CASE: Case = ("step",)  # The only case of the op


def step(work: Work) -> None:
    """Take one step on each parameter, in place; all are on one device."""
    if work:
        ADAMW.choose(work[0][0].param.device, CASE).run(work)


def example(values: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, master: str, compact: bool) -> ParamState:
    """Return a bf16 parameter (float32 for `master="own"`) and its states, of float32 values [R,C]."""
    upper, remainder = split(values)
    return ParamState(
        param=values.clone() if master == "own" else upper, grad=grad,
        moments=(compress(m, True), compress(v, False)) if compact else ((m.clone(),), (v.clone(),)),
        remainder=remainder if master == "remainder" else None, master=values.clone() if master == "fp32" else None,
        seed=3 if compact else None,
    )  # fmt: skip


EXAMPLE = HyperParams(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7)  # Of a step of `example`


def sample(device: torch.device) -> Work:
    work = []
    shapes = {"remainder": (5, 256), "fp32": (3, 128), "none": (1, 70), "own": (40, 200)}
    for kind, (master, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(kind)
        values, m, v, grad = torch.randn(4, *shape, generator=generator, dtype=torch.float32, device="cpu").to(device)
        grad = (grad * 1e-3).to(torch.float32 if master == "own" else torch.bfloat16)
        state = example(values, grad, m * 1e-3, v.square() * 1e-5, master=master, compact=kind % 2 == 0)
        work.append((state, EXAMPLE))
    return work


def _probe(backend: Backend[None], device: torch.device, case: Case) -> str | None:
    # The kinds that training uses most: a kernel takes up to 1.6 s to compile.
    expected, actual = sample(device)[:2], sample(device)[:2]
    reference.step_all(expected)
    backend.run(actual)
    for (want, _), (got, _) in zip(expected, actual, strict=True):
        pairs = {"param": (want.param, got.param), "master": (want.master, got.master)}
        pairs |= {f"moment {i}": (want.moments[i][0], got.moments[i][0]) for i in range(2)}
        for name, (a, b) in pairs.items():
            if a is not None and b is not None and not sqnr(a.float(), b.float()) > 40:
                return f"SQNR of {name} against reference is {sqnr(a.float(), b.float()):.1f} dB; above 40 dB expected"
    return None


ADAMW = register("adamw", {"step": CASE}, _probe, triton_backend("adamw.triton:step"), reference=reference.step_all)

"""adamw: one step on many parameters, with FP8 or float32 moments and exact 16- or 32-bit masters.

Not a torch op: it updates lists of tensors in place, and nothing differentiates or compiles through it.
"""

import torch
from torch import Tensor

from octavo.kernels.adamw import reference
from octavo.kernels.adamw.moments import GROUP, compress, expand, groups, random_bits, seed_after
from octavo.kernels.adamw.reference import HyperParams, ParamState, Work, exact_values, split
from octavo.kernels.registry import Backend, Case, Op, register, triton_unsupported
from octavo.numerics.error import sqnr

__all__ = [
    "ADAMW", "CASE", "GROUP", "HyperParams", "ParamState", "Work", "compress", "exact_values", "expand", "groups",
    "random_bits", "seed_after", "split", "step",
]  # fmt: skip

CASE: Case = ("step",)
"""The only case of the op."""


def step(work: Work) -> None:
    """Take one step on each parameter, in place.

    Args:
        work: Parameters with their states and hyperparameters, all on one device.
    """
    if work:
        ADAMW.choose(work[0][0].param.device, CASE).run(work)


def _run_triton(work: Work) -> None:
    from octavo.kernels.adamw import triton  # imports Triton

    triton.step(work)


def sample(device: torch.device) -> Work:
    """Return small parameters of every kind, with states as after some steps."""
    work = []
    for kind, shape in enumerate([(5, 200), (3, 128), (1, 70), (40, 256)]):
        generator = torch.Generator().manual_seed(kind)

        def random(*size: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(size, generator=generator, device="cpu", dtype=torch.float32).to(device)

        values, m, v = random(*shape), random(*shape) * 1e-3, random(*shape).square() * 1e-5
        upper, remainder = split(values)
        compact = kind % 2 == 0
        state = ParamState(
            param=upper if kind < 3 else values,
            grad=random(*shape).to(torch.bfloat16 if kind < 3 else torch.float32) * 1e-3,
            moments=(compress(m, True), compress(v, False)) if compact else ((m,), (v,)),
            remainder=remainder if kind == 0 else None,
            master=values.clone() if kind == 1 else None,
            seed=kind if compact else None,
        )
        work.append((state, HyperParams(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7)))
    return work


def _probe(backend: Backend, device: torch.device, case: Case) -> str | None:
    expected, actual = sample(device), sample(device)
    reference.step_all(expected)
    backend.run(actual)
    for (want, _), (got, _) in zip(expected, actual, strict=True):
        pairs = {"param": (want.param, got.param), "master": (want.master, got.master)}
        pairs |= {f"moment {i}": (want.moments[i][0], got.moments[i][0]) for i in range(2)}
        for name, (a, b) in pairs.items():
            if a is not None and b is not None and not sqnr(a.float(), b.float()) > 40:
                return f"SQNR of {name} against reference is {sqnr(a.float(), b.float()):.1f} dB; above 40 dB expected"
    return None


ADAMW = register(Op(name="adamw", cases={"step": CASE}, probe=_probe))
ADAMW.add(Backend(name="triton", run=_run_triton, unsupported_reason=triton_unsupported))
ADAMW.add(Backend(name="reference", run=reference.step_all))
